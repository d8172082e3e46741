"""Four models of 104B parameters on 64 V100s: fixed groups of 16 devices beside our placement.

python benchmarks/large_models.py [--every N] [--json]

The comparison of AlpaServe's figure for large models (2302.11665, section 6.3): groups of 16
devices of 16 x 1, 8 x 2, 4 x 4 or 2 x 8 stages x tensor ranks, one model on each, against a search
that may put several models on a larger group. BERT of 128 layers of 8,192, prompts of 1,024 tokens,
13 GiB for weights on a device: 16 devices hold one model. Seconds of the stages are predicted by
the serving cost model on nodes of 8 V100s, without what is sent between stages, then made longer
alike so that all of them on one device take the 4.6 s of AlpaServe's code; objectives are multiples
of that. As there, each stage takes 0.9 % longer for each stage of its group. Shares of the models
follow a power law with exponent 0.5. Placements are planned on three seeds, judged on three others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from triptych.cluster.text import parse_cluster
from triptych.cost.serving.engine import TRIPTYCH
from triptych.cost.serving.layout import layout
from triptych.cost.serving.step import Load, Stepper
from triptych.fleet.find import Effort, find
from triptych.fleet.judge import Judge
from triptych.fleet.models import Fleet, Served, Shape, evenly
from triptych.fleet.placement import Group, Placement
from triptych.model.count import parameters
from triptych.model.hf import from_config
from triptych.plan.serving import ServingPlan
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
from triptych.simulate.trace import Trace, fixed_lengths, make
from triptych.units import GIB

BERT_104B = {
    "model_type": "gpt2",
    "n_layer": 128,
    "n_embd": 8192,
    "n_head": 64,
    "vocab_size": 51200,
    "n_positions": 1024,
}
TOKENS, NUM_MODELS, NUM_DEVICES = 1024, 4, 64
ALONE_S, STAGE_OVERHEAD = 4.6, 0.009
FIXED = (Shape(16, 1), Shape(8, 2), Shape(4, 4), Shape(2, 8))
SPAN_S = 1200.0
PLANNED_ON, JUDGED_ON = (1, 2, 3), (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Point:
    """Requests a second, their burstiness, and objectives as multiples of the latency alone."""

    rate_per_s: float = 8.0
    cv: float = 4.0
    slo_scale: float = 2.0


MIDDLE = Point()
POINTS = (
    *(replace(MIDDLE, rate_per_s=rate) for rate in (0.5, 2.0, 4.0, 6.0, 8.0)),
    *(replace(MIDDLE, cv=cv) for cv in (1.0, 2.0, 3.0)),
    *(replace(MIDDLE, slo_scale=scale) for scale in (0.5, 1.0, 4.0, 6.0, 8.0)),
)


def models() -> Fleet:
    """Four copies with their predicted stages in each shape that has room for one."""
    model, cluster = from_config(BERT_104B, "BERT-104B"), parse_cluster("8x8xV100-SXM2-16GB")
    load = Load(prompt_tokens=TOKENS, prompt_pairs=TOKENS**2)

    def stages_s(shape: Shape) -> list[float]:
        layers = (128 // shape.pipeline,) * shape.pipeline
        plan = ServingPlan(layers=layers, tensor=shape.tensor, replicas=1, batch=1, chunk=TOKENS)
        return Stepper(layout(model, plan), cluster, plan, TRIPTYCH).stages_s(load)

    longer = ALONE_S / sum(stages_s(Shape(1)))
    shapes = [Shape(p, t) for p in (2, 4, 8, 16, 32, 64) for t in (1, 2, 4, 8)]
    profiles = {
        shape: evenly(
            [longer * s for s in stages_s(shape)], 2.0 * parameters(model), shape, STAGE_OVERHEAD
        )
        for shape in shapes
        if 16 <= shape.devices <= NUM_DEVICES
    }
    served = tuple(Served(f"m{i}", profiles) for i in range(NUM_MODELS))
    return Fleet(served, NUM_DEVICES, 13 * GIB)


def requests(point: Point, seed: int) -> Trace:
    """Requests for all models."""
    rng = np.random.default_rng(seed)
    window = Window(SPAN_S, point.rate_per_s, point.cv)
    arrival_s, model = draw_models([window], power_law_shares(NUM_MODELS, 0.5), rng)
    names = tuple(f"m{i}" for i in range(NUM_MODELS))
    trace = make(arrival_s, fixed_lengths(1, 1), rng, model, names)
    return replace(trace, slo_s=np.full(len(trace), point.slo_scale * ALONE_S))


def compare(fleet: Fleet, point: Point) -> tuple[dict[str, float], Placement]:
    """Attainment of each fixed shape and of our placement, and that placement."""
    planned_on = [requests(point, seed) for seed in PLANNED_ON]
    judge = Judge(fleet, [requests(point, seed) for seed in JUDGED_ON])
    found = {}
    for shape in FIXED:
        one_each = Placement(tuple(Group(shape, frozenset({m})) for m in range(NUM_MODELS)))
        found[str(shape)] = judge.of(one_each).attainment
    ours = find(fleet, planned_on, Effort(trials=100)).placement
    return found | {"ours": judge.of(ours).attainment}, ours


def lines(fleet: Fleet, every: int) -> Iterator[tuple[Point, dict[str, float], str]]:
    """Each point with all attainments and what our placement is."""
    for point in POINTS[::every]:
        found, ours = compare(fleet, point)
        groups = " ".join(
            f"{group.shape}:{''.join(map(str, sorted(group.models)))}" for group in ours.groups
        )
        yield point, found, groups


def main() -> None:
    """Prints each point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every N-th point")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fleet, rows = models(), []
    for shape, profile in [] if options.json else fleet.models[0].profiles.items():
        stages_s = profile.stage_s
        print(f"{shape}: {sum(stages_s):.2f} s alone, {1 / max(stages_s):.2f} requests/s at most")
    for point, found, groups in lines(fleet, options.every):
        best = max(value for name, value in found.items() if name != "ours")
        rows.append(
            {
                "claim": f"rate {point.rate_per_s:g}, CV {point.cv:g}, SLO x{point.slo_scale:g}",
                "peer": "best of the fixed shapes",
                "metric": "attainment",
                "ours": found["ours"],
                "theirs": best,
                "ratio": found["ours"] / best if best else 1.0,
                "better": "higher",
            }
        )
        if not options.json:
            shares = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
            print(f"{rows[-1]['claim']:26} {shares}  {groups}", flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
