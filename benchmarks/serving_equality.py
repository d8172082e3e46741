"""The engine's greedy text on real weights, token by token beside that of `transformers`.

SmolLM2-135M in fp32, 64 prompts of mixed lengths (pieces of this repository's documents, half of
which begin like another one) that arrive at random moments between steps. The engine is kept tight:
prompts come in chunks beside decodes, sequences are preempted, prefixes are found again; every plan
must give the tokens that `generate` of `transformers` gives for each prompt alone.

    python examples/smollm2/unpack.py smollm2
    python benchmarks/serving_equality.py smollm2 [--plans tp=1 tp=2 tp=3 pp=2 tp=2,pp=2]
        [--prompts 64] [--tokens 32] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from triptych.plan.plan import Plan, Precision
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.values import Ask

PLANS = ("tp=1", "tp=2", "tp=3", "pp=2", "tp=2,pp=2")
LONGEST = 160
TIGHT = EngineSettings(max_running=12, token_budget=64, num_blocks=60, context=256, growth_tokens=0)
DOCUMENTS = Path(__file__).parents[1] / "docs"


class Found(NamedTuple):
    """What an engine said, and how hard it was."""

    answers: list[list[int]]
    load: Load
    seconds: float


def prompts_of(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Pieces of documents; every other one begins with the beginning of all."""
    draws = random.Random(seed)
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    ids: list[int] = tokenizer.encode(text).ids
    found = []
    for number in range(count):
        size, start = draws.randint(1, LONGEST), draws.randrange(len(ids) - LONGEST)
        shared = size * 2 // 3 if number % 2 else 0
        found.append(ids[:shared] + ids[start : start + size - shared])
    return found


def of_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids_1L = torch.tensor([prompt])
        whole_1L = model.generate(
            ids_1L,
            attention_mask=torch.ones_like(ids_1L),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(whole_1L[0, len(prompt) :].tolist())
    return found


def of_engine(folder: Path, plan: Plan, prompts: list[list[int]], count: int, seed: int) -> Found:
    """The engine's under a plan, with random arrivals."""
    draws, began_s = random.Random(seed), time.perf_counter()
    answers: list[list[int]] = [[] for _ in prompts]
    with Engine.open(folder, plan, TIGHT) as engine:
        for output in _arriving(engine, prompts, count, draws):
            assert output.token is not None
            answers[output.request_id].append(output.token)
        return Found(answers, engine.load, time.perf_counter() - began_s)


def _arriving(
    engine: Engine, prompts: list[list[int]], count: int, draws: random.Random
) -> Iterator[Any]:
    sampling = Sampling(ignores_end=True)
    for number, prompt in enumerate(prompts):
        for _ in range(draws.randrange(4)):
            yield from engine.step()
        ask = Ask(id=number, prompt=prompt, max_tokens=count, sampling=sampling)
        assert engine.add_request(ask).refusal is None
    while engine.is_busy:
        yield from engine.step()


def row(plan: str, expected: list[list[int]], found: Found) -> dict[str, Any]:
    """How many answers and tokens are the same."""
    pairs = list(zip(expected, found.answers, strict=True))
    return {
        "claim": f"greedy tokens of SmolLM2-135M fp32 under {plan}",
        "peer": "transformers generate",
        "metric": "equal answers",
        "ours": sum(theirs == ours for theirs, ours in pairs),
        "theirs": len(pairs),
        "ratio": sum(theirs == ours for theirs, ours in pairs) / len(pairs),
        "first_differences": [
            next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
            for theirs, ours in pairs
            if theirs != ours
        ],
        "preemptions": found.load.num_preemptions,
        "reused_tokens": found.load.num_reused_tokens,
        "seconds": found.seconds,
        "better": "higher",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = ModelSource.open(options.folder)
    prompts = prompts_of(source.tokenizer(), options.prompts, options.seed)
    expected = of_transformers(options.folder, prompts, options.tokens)
    fp32, layers = Precision(parameter="fp32", master="fp32"), source.model().num_layers
    rows = []
    for text in options.plans:
        degrees = {name: int(value) for name, value in (p.split("=") for p in text.split(","))}
        plan = Plan.uniform(layers, precision=fp32, **degrees)
        found = of_engine(options.folder, plan, prompts, options.tokens, options.seed)
        rows.append(row(text, expected, found))
        if not options.json:
            print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))
    sys.exit(any(r["ours"] != r["theirs"] or not r["preemptions"] for r in rows))


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['claim']:52} {row['ours']} of {row['theirs']} equal, {row['preemptions']} "
        f"preemptions, {row['reused_tokens']} tokens reused, {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
