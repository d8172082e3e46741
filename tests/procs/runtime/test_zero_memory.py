"""Live tensor bytes by term obey the formulas of ZeRO (domain.md section 2), padding apart."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import batch_of, make_engine, split, tiny_config
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
from triptych.runtime.data.units import units_of
from triptych.runtime.engine import Engine

CONFIG = tiny_config()
PRECISIONS = {"fp32": Precision(), "bf16": Precision.mixed()}


def _step(engine: Engine, step: int = 0) -> None:
    rows = batch_of(step, 8, 24, CONFIG["vocab_size"])
    engine.step(split(rows, engine.plan, engine.mesh.coordinates), 1e-3)


def _live(plan: Plan) -> LiveBytes:
    engine = make_engine(plan, CONFIG)
    for step in range(2):
        _step(engine, step)
    return engine.live_bytes()


def _formula(plan: Plan) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state: 2 or 4, 4, and 8 or 12 an element."""
    elements, divisor = parameters(from_config(CONFIG, "tiny")), plan.dp
    wide = plan.precision.parameter == "fp32"
    return (
        elements * (4 if wide else 2) / (divisor if plan.zero >= 3 else 1),
        elements * 4 / (divisor if plan.zero >= 2 else 1),
        elements * (8 if wide else 12) / (divisor if plan.zero >= 1 else 1),
    )


def _predicted(plan: Plan) -> tuple[float, float, float]:
    work = Workload(sequence_length=24, global_batch=8)
    model = from_config(CONFIG, "tiny")
    pricer = Pricer(model, parse_cluster(f"1x{plan.world_size}xcpu"), work)
    return state_bytes(Frame.of(pricer, plan).costs, Storage.of(plan))[:3]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_pub_010_every_term_of_memory_is_that_of_the_formula(
    zero: int, dp: int, precision: str
) -> None:
    plan = Plan.uniform(4, dp=dp, zero=zero, precision=PRECISIONS[precision])
    expected = _formula(plan)
    assert _predicted(plan) == pytest.approx(expected, rel=1e-6)
    for live in run_ranks(dp, _live, plan):
        print(plan.short(), live)
        for term, formula in zip(live[:3], expected, strict=True):
            assert term == pytest.approx(formula, rel=0.005)
        assert live.padding < 0.01 * sum(expected)
        assert live.gathered == live.travelling == live.offloaded == 0


def test_pub_011_what_is_sharded_halves_from_two_to_four_ranks() -> None:
    two, four = (run_ranks(dp, _live, Plan.uniform(4, dp=dp, zero=3))[0] for dp in (2, 4))
    for more, less in zip(two[:3], four[:3], strict=True):
        assert less == pytest.approx(more / 2, rel=0.05)


class _Watched:
    """Units that are whole, and gradients that travel, whenever more of them become so."""

    def __init__(self, engine: Engine) -> None:
        self.units = self.gathered = self.travelling = 0
        self._engine = engine
        self._unit_of = units_of(engine.stages, engine.plan, engine.model)
        comm: Any = engine.mesh.shard
        self._gather, self._scatter = comm.start_all_gather, comm.start_reduce_scatter
        comm.start_all_gather, comm.start_reduce_scatter = self.gather, self.scatter

    def largest_unit(self) -> int:
        """Bytes of the largest unit, padding included."""
        sizes: dict[object, int] = {}
        for bucket in self._engine.buckets.buckets:
            key = self._unit_of(bucket.slots[0])
            sizes[key] = sizes.get(key, 0) + bucket.values.nbytes
        return max(sizes.values())

    def gather(self, *args: Any, **options: Any) -> Any:
        self._look()
        return self._gather(*args, **options)

    def scatter(self, *args: Any, **options: Any) -> Any:
        self._look()
        return self._scatter(*args, **options)

    def _look(self) -> None:
        whole = [bucket for bucket in self._engine.buckets.buckets if bucket.is_whole]
        units = {self._unit_of(slot) for bucket in whole for slot in bucket.slots}
        live = self._engine.live_bytes()
        self.units = max(self.units, len(units))
        self.gathered = max(self.gathered, live.gathered)
        self.travelling = max(self.travelling, live.travelling)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "full"},
        {"pp": 2},
        {"pp": 2, "schedule": "gpipe"},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_at_most_the_unit_in_use_and_those_ahead_are_whole(
    settings: dict[str, Any], prefetch: int
) -> None:
    def body(plan: Plan) -> tuple[int, int, int, int, int]:
        engine = make_engine(plan, CONFIG)
        watched = _Watched(engine)
        _step(engine)
        largest = watched.largest_unit()
        after = engine.live_bytes().gathered
        return watched.units, watched.gathered, watched.travelling, largest, after

    plan = Plan.uniform(4, dp=2, zero=3, prefetch=prefetch, **settings)
    for units, gathered, travelling, largest, after in run_ranks(plan.world_size, body, plan):
        assert units <= 1 + prefetch
        assert 0 < gathered <= (1 + prefetch) * largest
        assert 0 < travelling <= 2 * largest
        assert after == 0


def test_gradients_of_zero_2_are_never_whole() -> None:
    def body(plan: Plan) -> tuple[int, int]:
        engine = make_engine(plan, CONFIG)
        watched = _Watched(engine)
        _step(engine)
        return watched.travelling, sum(bucket.gradients.nbytes for bucket in engine.buckets.buckets)

    plan = Plan.uniform(4, dp=2, zero=2, bucket_bytes=40_000)
    for travelling, whole in run_ranks(2, body, plan):
        # Two buckets at most, of which the largest is one table of the vocabulary.
        assert travelling <= 2 * 4 * 512 * 64 + 50_000 < whole


def test_offloaded_state_is_in_host_memory_alone() -> None:
    plan = Plan.uniform(4, dp=2, zero=1, precision=Precision.mixed(), offload="optimizer")
    live, kept = (run_ranks(2, _live, p)[0] for p in (plan, plan.with_(offload="none")))
    assert (live.optimizer, live.offloaded) == (0, kept.optimizer)


def test_memory_does_not_grow_from_step_to_step() -> None:
    def body() -> list[LiveBytes]:
        engine = make_engine(Plan.uniform(4, dp=2, zero=3), CONFIG)
        seen = []
        for step in range(4):
            _step(engine, step)
            seen.append(engine.live_bytes())
        return seen

    for seen in run_ranks(2, body):
        assert len(set(seen)) == 1
