"""LLMs on 16 simulated H100: replication beside groups, on the Azure traces.

python benchmarks/llm_fleet.py TRACES [--rates 1 2 3] [--seconds S] [--json]

TRACES is a folder with `AzureLLMInferenceTrace2023_{conv,code}.csv`. Sixteen Llama-2-13B: the hour
of each trace is cut into eight parts, and each part is what one model is asked, all at the same
time, with the gaps, prompts and answers of the trace. Groups of one shape are planned on the first
half of each part (models dealt by load, the shape by simulation) and judged on the second.
Replication is the same with groups of one device. A request is in time if its first token comes
within 1 s and the others within 50 ms each on average. The gain is per request, its 95 % interval
by batch means. `--seconds` takes only so much of the beginning of each half.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from triptych.cluster.text import parse_cluster
from triptych.fleet.llm import LlmFleet, LlmGroup
from triptych.fleet.models import Shape
from triptych.fleet.terms import Terms
from triptych.model.load import load_model
from triptych.simulate.metrics import mean
from triptych.simulate.trace import Trace, read_trace

PARTS = 8
SHAPES = (Shape(1), Shape(1, 2), Shape(2), Shape(1, 4), Shape(4), Shape(2, 2))
OBJECTIVES = Terms(ttft_s=1.0, tpot_s=0.05)
CONTEXT = (3000, 1000)  # tokens of the longest prompt and answer that are sent


def halves(folder: Path, seconds: float) -> tuple[Trace, Trace]:
    """Requests to plan on and to judge by: the first and second half of each part, laid over."""
    first: list[Trace] = []
    second: list[Trace] = []
    for name in ("conv", "code"):
        trace = read_trace(folder / f"AzureLLMInferenceTrace2023_{name}.csv").capped(*CONTEXT)
        edges_s = np.linspace(0.0, float(trace.arrival_s[-1]) + 1e-6, 2 * PARTS + 1)
        for index, (low_s, high_s) in enumerate(pairwise(edges_s.tolist())):
            end_s = min(high_s, low_s + seconds)
            part = trace.only((trace.arrival_s >= low_s) & (trace.arrival_s < end_s))
            kept = second if index % 2 else first
            kept.append(replace(part, arrival_s=part.arrival_s - low_s))
    return _laid_over(first), _laid_over(second)


def _laid_over(parts: list[Trace]) -> Trace:
    """All parts at once, the i-th for model i."""
    model = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    arrival_s = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        arrival_s=arrival_s[order],
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts])[order],
        output_tokens=np.concatenate([part.output_tokens for part in parts])[order],
        model=model[order],
        models=tuple(f"m{i}" for i in range(len(parts))),
        slo_s=np.full(len(model), np.inf),
    )


def planned(fleet: LlmFleet, trace: Trace) -> dict[Shape, tuple[list[LlmGroup], float]]:
    """Of each shape: groups dealt by the tokens of the requests, and their attainment."""
    tokens = trace.prompt_tokens / 8 + trace.output_tokens  # prompts are computed side by side
    loads = np.bincount(trace.model, weights=tokens, minlength=len(fleet.models)).tolist()
    found = {}
    for shape in SHAPES:
        groups = fleet.dealt(shape, loads)
        found[shape] = groups, float(fleet.served(groups, trace).mean())
    return found


def main() -> None:
    """Prints each rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each half")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, cluster = load_model("Llama-2-13B"), parse_cluster("2x8xH100-SXM")
    number = 2 * PARTS
    fleet = LlmFleet([model] * number, [OBJECTIVES] * number, cluster)
    first, second = halves(options.traces, options.seconds)
    rows = []
    for factor in options.rates:
        plan_on, judge_on = (t.at_rate(t.rate_per_s * factor) for t in (first, second))
        kinds = planned(fleet, plan_on)
        best = max(kinds, key=lambda shape: kinds[shape][1])
        ours, theirs = (fleet.served(kinds[s][0], judge_on) for s in (best, Shape(1)))
        gain = mean(ours.astype(float) - theirs.astype(float))
        claim = f"{judge_on.rate_per_s:.0f} requests/s"
        rows.append(
            {
                "claim": claim,
                "peer": "replication",
                "metric": "attainment",
                "ours": float(ours.mean()),
                "theirs": float(theirs.mean()),
                "ratio": float(ours.mean() / max(1e-9, theirs.mean())),
                "better": "higher",
                "gain": list(gain),
            }
        )
        if not options.json:
            tried = "  ".join(f"{shape} {share:.3f}" for shape, (_, share) in kinds.items())
            print(f"{claim}, planned: {tried}")
            print(
                f"  judged: groups of {best} {ours.mean():.3f}, replication {theirs.mean():.3f}, "
                f"gain {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})",
                flush=True,
            )
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
