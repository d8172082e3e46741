"""Do layouts in bf16 train as one process does? Loss of 500 steps, beside what the seed does.

One process trains with five seeds; the range of their losses, over a sliding mean, is the band.
Each layout trains with the first seed, and its curve may nowhere be further from that of one
process than half the band is wide: what another seed changes. At many steps the first seed is
itself an edge of the band; at how many a layout lies between the edges is printed beside it.

    python benchmarks/layout_curves.py [--steps 500] [--out DIR] [--only tp] [--json]

`--out` keeps the runs: what is there already is not run again. The text is the Python standard
library's own sources. The model is tiny: processors without bf16 units multiply it at 1 GFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from sides.rows import show
from triptych.api import train
from triptych.train.tokenizer_training import train_tokenizer

SEEDS = range(5)
LAYOUTS = (
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2,sp=1",
    "pp=2,schedule=1f1b",
    "cp=2",
    "tp=2,pp=2",
)
WINDOW = 25  # steps of the sliding mean
TEXT = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "tarfile", "typing", "zipfile")

JOB = """\
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 80
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
[tokenizer]
path = "{out}/tokenizer"
[data]
train = ["{out}/text"]
sequence_length = 32
cache = "{out}/tokens"
[train]
steps = {steps}
global_batch = 4
microbatch = 2
[optimizer]
learning_rate = 2e-3
warmup_steps = 20
[checkpoint]
every = 100
[parallel]
precision = "bf16"
"""

Curve = npt.NDArray[np.float64]


def prepare(out: Path, steps: int) -> Path:
    """The job, with its text and tokenizer."""
    library, text = Path(sysconfig.get_path("stdlib")), out / "text"
    text.mkdir(parents=True, exist_ok=True)
    for name in TEXT:
        found = library / f"{name}.py"
        source = found if found.is_file() else library / name / "__init__.py"
        (text / f"{name}.txt").write_bytes(source.read_bytes())
    if not (out / "tokenizer").is_dir():
        train_tokenizer([text], 288, out / "tokenizer")
    job = out / "job.toml"
    job.write_text(JOB.format(out=out, steps=steps))
    return job


def curve(job: Path, plan: str, seed: int, steps: int) -> Curve:
    """The loss of each step under a plan, smoothed."""
    run = job.parent / f"{plan.replace(',', '_')}-{seed}"
    if not (run / "done").is_file():
        changes = [f"run.folder={run}", f"train.seed={seed}", f"parallel.plan={plan}"]
        train(job, changes, say=lambda _: None)
        (run / "done").touch()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = np.array([line["loss"] for line in lines if "loss" in line])
    assert len(losses) == steps, f"{run} has {len(losses)} steps"
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def compare(layout: str, mine: Curve, band: list[Curve]) -> dict[str, Any]:
    """The largest distance of a layout from one process, over the band's half width there."""
    low, high = np.min(band, axis=0), np.max(band, axis=0)
    distance, half_width = np.abs(mine - band[0]), (high - low) / 2
    worst = int(np.argmax(distance / half_width))
    inside = np.mean((mine >= low) & (mine <= high))
    return {
        "claim": f"loss of {layout}, bf16, beside one process",
        "peer": f"half the band of {len(band)} seeds",
        "metric": "loss",
        "ours": float(distance[worst]),
        "theirs": float(half_width[worst]),
        "ratio": float(distance[worst] / half_width[worst]),
        "in_band": float(inside),
        "final": float(mine[-1]),
        "final_one_process": float(band[0][-1]),
        "better": "lower",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        job = prepare((options.out or Path(temporary)).absolute(), options.steps)
        band = [curve(job, "dp=1", seed, options.steps) for seed in SEEDS]
        layouts = [layout for layout in LAYOUTS if options.only in layout]
        rows = [compare(name, curve(job, name, 0, options.steps), band) for name in layouts]
    show(rows, options.json)
    if not options.json:
        least = min(row["in_band"] for row in rows)
        print(f"steps between the edges of the band: {least:.1%} or more")


if __name__ == "__main__":
    main()
