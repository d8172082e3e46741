"""Small random LLMs on two groups of one core each, for benchmarks of a real fleet."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2] / "tests" / "procs" / "serve"
sys.path.insert(0, str(_TESTS))

from serve_samples import config_of, save_model  # noqa: E402

NAMES = ("ant", "bee", "cat", "dog")
NEW = "elk"
"""A model that comes later."""
GROUPS = (("ant", "bee", "cat"), ("bee", "cat", "dog"))
SIZES = {"context": 256, "max_running": 32, "token_budget": 128}
IDS = (10, 250)
"""Token ids of prompts, the second excluded."""
EXTRA = {"temperature": 0, "ignore_eos": True, "stream": False}


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Random Llamas of 10 layers, a different one for each name."""
    config = config_of(
        hidden_size=640,
        intermediate_size=1760,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=5,
        max_position_embeddings=512,
    )
    for seed, name in enumerate(names):
        (folder / name).mkdir()
        save_model(folder / name, config, seed)


def fleet_text(models: Sequence[str], groups: Sequence[Sequence[str]], slo_s: float) -> str:
    """A fleet file."""
    lines = [f"[devices]\ncount = {len(groups)}"]
    for name in models:
        sizes = "\n".join(f"{key} = {value}" for key, value in SIZES.items())
        lines.append(f'[[models]]\nname = "{name}"\nfolder = "{name}"\nslo_s = {slo_s}\n{sizes}')
    cores = sorted(os.sched_getaffinity(0))
    for index, held in enumerate(groups):
        listed = ", ".join(f'"{name}"' for name in held)
        core = cores[index % len(cores)]
        lines.append(f"[[groups]]\nmodels = [{listed}]\ncores = [{core}]")
    return "\n\n".join(lines) + "\n"


def row(claim: str, metric: str, ours: float, theirs: float) -> dict[str, Any]:
    """A row of a table."""
    found: dict[str, Any] = {"claim": claim, "peer": "simulator or before", "metric": metric}
    ratio = float(ours) / theirs if theirs else float(ours == theirs)
    return {
        **found,
        "ours": float(ours),
        "theirs": float(theirs),
        "ratio": ratio,
        "better": "higher",
    }
