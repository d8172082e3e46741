"""Experts are held by one rank in ep: live bytes by term, as predicted, whatever ZeRO divides."""

from __future__ import annotations

from typing import Any

import pytest
from family_samples import family_config
from layouts import batch_of, make_engine, split
from ranks import run_ranks

from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.memory import state_bytes
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.model.count import parameters
from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload
from triptych.runtime.data.live import LiveBytes

CONFIG = family_config("mixtral")
MODEL = from_config(CONFIG, "tiny")
EXPERTS = 4 * 4 * 3 * 64 * 160  # layers, experts, matrices


def _live(plan: Plan) -> LiveBytes:
    engine = make_engine(plan, CONFIG)
    rows = batch_of(0, 4, 24, CONFIG["vocab_size"])
    engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3)
    return engine.live_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "zero": 1},
        {"dp": 4, "ep": 2, "zero": 2},
        {"dp": 4, "ep": 4, "zero": 3},
        {"dp": 4, "ep": 2, "zero": 3, "hybrid_shard": 2},
    ],
    ids=str,
)
def test_live_bytes_are_those_of_the_formula(settings: dict[str, Any]) -> None:
    plan = Plan.uniform(4, precision=Precision.mixed(), **settings)
    shards = plan.shards_of(plan.stages[0])
    held = parameters(MODEL) - EXPERTS + EXPERTS / plan.ep
    own = (parameters(MODEL) - EXPERTS) / shards + EXPERTS / plan.ep / max(1, shards // plan.ep)
    expected = [
        2 * (own if plan.zero >= 3 else held),
        4 * (own if plan.zero >= 2 else held),
        12 * (own if plan.zero >= 1 else held),
    ]
    work = Workload(sequence_length=24, global_batch=4)
    pricer = Pricer(MODEL, parse_cluster(f"1x{plan.world_size}xcpu"), work)
    predicted = state_bytes(Frame.of(pricer, plan).costs, Storage.of(plan))[:3]
    assert predicted == pytest.approx(expected, rel=1e-6)
    for live in run_ranks(plan.world_size, _live, plan):
        assert live[:3] == pytest.approx(expected, rel=0.02)
        assert live.gathered == live.travelling == 0
