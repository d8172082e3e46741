"""The search finds what trying every plan, with `verify` and the exact simulator, finds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest
from search_samples import cpus, gpus, tiny, work

from triptych.cluster.cluster import Cluster
from triptych.cost.frame import Frame
from triptych.cost.predict import predict
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.step import Priced, step_seconds
from triptych.cost.storage import Storage
from triptych.cost.uncertainty import MEMORY_SPARE
from triptych.model.model import Experts, Model
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.short import default_precision, precision
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS
from triptych.search.objective import Objective
from triptych.search.options import FIT, rounded
from triptych.search.search import FRONT_SLOWER, search
from triptych.search.space import AUTOMATIC_SIZE, CHUNKS, RECOMPUTE_EVERY
from triptych.search.splits import layer_splits
from triptych.units import GIB

Case = tuple[Model, Cluster, Workload, Mapping[str, str]]

KINDS = [("none", 1), *((kind, k) for kind in ("selective", "full") for k in RECOMPUTE_EVERY)]


def settings(fixed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Everything but degrees, pipeline and micro-batch that keeps the pins."""
    names = ("sequence_parallel", "shard_activations", "zero", "hybrid_shard", "accumulation")
    choices = product((False, True), (False, True), range(4), (0, 1), ("auto", "reduce_last"))
    found = []
    for (recompute, every), chosen in product(KINDS, choices):
        one: dict[str, Any] = dict(zip(names, chosen, strict=True))
        one |= {"recompute": recompute, "recompute_every": every}
        repeats = (
            (one["accumulation"] == "reduce_last" and one["zero"] < 2)
            or (one["hybrid_shard"] and not one["zero"])
            or (recompute == "selective" and every > 1 and "recompute_every" not in fixed)
        )
        if not repeats and all(str(one.get(key, value)) == value for key, value in fixed.items()):
            found.append(one)
    return found


def compiles(model: Model, cluster: Cluster) -> bool:
    """On GPUs layers without experts are compiled."""
    return cluster.device.kind != "cpu" and model.experts is None


def every_plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    fixed: Mapping[str, str],
    most_tensor: int = 0,
) -> Iterator[Plan]:
    """All legal plans of the grid that a search walks, by the rules alone.

    Up to `most_tensor` tensor ranks; 0: those of a node.
    """
    used, most = precision(default_precision(cluster)), most_tensor or cluster.devices_per_node
    chosen = settings(fixed)
    for plan in _pipelines(model, cluster, workload, fixed, most):
        data, inside = plan.dp, cluster.devices_per_node // plan.tp
        for one in chosen:
            repeats = (
                (one["sequence_parallel"] and plan.tp == 1 and "sequence_parallel" not in fixed)
                or (one["zero"] and data == 1 and "zero" not in fixed)
                or (one["hybrid_shard"] and not 1 < inside < data)
            )
            if repeats:
                continue
            shard = inside if one["hybrid_shard"] else 0
            is_compiled = compiles(model, cluster)
            whole = plan.with_(
                **(one | {"hybrid_shard": shard, "compile": is_compiled}), precision=used
            )
            if not verify(whole, model, cluster, workload):
                yield whole


def _pipelines(
    model: Model, cluster: Cluster, workload: Workload, fixed: Mapping[str, str], most_tensor: int
) -> Iterator[Plan]:
    """Degrees, micro-batches, schedules, chunks and layers."""
    devices = cluster.num_devices
    pricer, dtype = Pricer(model, cluster, workload), default_precision(cluster)
    experts = [e for e in divisors(model.experts.count)] if model.experts else [1]
    for tp, pp, ep in product(divisors(most_tensor), divisors(devices), experts):
        dp, rest = divmod(devices, tp * pp)
        if rest or workload.global_batch % dp:
            continue
        sizes = divisors(workload.global_batch // dp)
        least_again = "none" if fixed.get("recompute_every", "1") == "1" else "selective"
        again, is_parallel = fixed.get("recompute", least_again), "sequence_parallel" in fixed
        is_parallel = is_parallel and tp > 1 and fixed["sequence_parallel"] == "True"
        first = int(fixed.get("microbatch", sizes[0]))
        setting = Setting(
            tp, 1, ep, is_parallel, first, again, "sdpa", compiles(model, cluster), dtype
        )
        least = TRAITS[fixed.get("schedule", "1f1b")].least_chunks
        for chunks, schedule, microbatch in product(CHUNKS if pp > 1 else [least], TRAITS, sizes):
            count = workload.global_batch // (dp * microbatch)
            is_other = pp == 1 and schedule != fixed.get("schedule", "1f1b")
            is_automatic = schedule == "zb-auto" and pp * count > AUTOMATIC_SIZE
            if (
                is_other
                or (is_automatic and "schedule" not in fixed)
                or pp * chunks > model.num_layers
                or str(pp) != fixed.get("pp", str(pp))
                or str(tp) != fixed.get("tp", str(tp))
                or schedule != fixed.get("schedule", schedule)
                or str(microbatch) != fixed.get("microbatch", str(microbatch))
                or not TRAITS[schedule].allows(pp, count, chunks)
            ):
                continue
            for layers in layer_splits(pricer, setting, pp * chunks):
                yield Plan.uniform(
                    model.num_layers,
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    ep=ep,
                    layers=layers,
                    chunks=chunks,
                    microbatch=microbatch,
                    schedule=schedule,
                )


class Tried(NamedTuple):
    """A plan with its exact figures."""

    plan: Plan
    step_s: float
    peak_bytes: float
    fits: bool


def priced(case: Case, most_tensor: int = 0) -> list[Tried]:
    """All plans that the search may give, each simulated."""
    model, cluster, workload, fixed = case
    pricer, is_cpu = Pricer(model, cluster, workload), cluster.device.kind == "cpu"
    found = []
    for plan in every_plan(model, cluster, workload, fixed, most_tensor):
        if is_cpu and unrunnable(plan, model):
            continue
        frame, storage = Frame.of(pricer, plan), Storage.of(plan)
        step_s = step_seconds(frame, Priced.of(frame, storage), plan.schedule)
        peak = frame.largest_memory(storage, plan.schedule).total_bytes
        fits = peak * (1 + MEMORY_SPARE) <= pricer.memory_limit_bytes * FIT
        found.append(Tried(plan, rounded(step_s), rounded(peak), fits))
    return found


def families(plans: list[Tried], by_memory: bool = False) -> list[float]:
    """The best figure of each set of degrees, best first."""
    best: dict[tuple[int, ...], float] = {}
    for plan, step_s, peak_bytes, fits in plans:
        if fits:
            key = (plan.tp, plan.pp, plan.dp, plan.ep)
            best[key] = min(best.get(key, float("inf")), peak_bytes if by_memory else step_s)
    return sorted(best.values())


def compare(case: Case, plans: list[Tried]) -> None:
    """Asserts that a search finds what the plans, all that there are, hold."""
    model, cluster, workload, fixed = case
    expected = families(plans)
    result = search(model, cluster, workload, fixed=fixed, top=len(expected))
    assert [rounded(c.prediction.step_time_s) for c in result.plans] == expected
    assert result.legal == len(plans)
    assert result.rejected.get("memory", 0) <= sum(not plan.fits for plan in plans)
    assert sum(result.bounds.values()) + result.simulated == result.legal


PINS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "recompute_every": ("1", "2"),
    "zero": ("0", "1", "2", "3"),
    "microbatch": ("1", "2"),
    "schedule": tuple(TRAITS),
    "sequence_parallel": ("False", "True"),
    "shard_activations": ("False",),
    "pp": ("1", "2", "4"),
}


def random_case(rng: random.Random) -> Case:
    """A small model on a few devices, short of memory now and then, with some pins."""
    heads = rng.choice((4, 6, 8))
    model = tiny(
        layers=rng.randint(2, 8),
        vocab=rng.choice((500, 2003, 60_000)),
        tied=rng.random() < 0.3,
        heads=heads,
        kv_heads=2 if heads == 6 else rng.choice((2, 4)),
        experts=Experts(count=4, top_k=2, width=96) if rng.random() < 0.2 else None,
    )
    memory_bytes = rng.choice((1.8e9, 1.88e9, 1.95e9, 8e9))
    cluster = rng.choice(
        (
            gpus(1, 2, memory_bytes=memory_bytes),
            gpus(1, 4, memory_bytes=memory_bytes),
            gpus(2, 2, memory_bytes=memory_bytes, network_bytes_per_s=rng.choice((1e9, 25e9))),
            cpus(2, memory_bytes=rng.choice((6e8, 4e9))),
        )
    )
    chosen = {key: rng.choice(PINS[key]) for key in rng.sample(sorted(PINS), 5)}
    if chosen.get("recompute") == "none":
        chosen.pop("recompute_every", None)
    return model, cluster, work(rng.choice((2, 4)), rng.choice((128, 2048))), chosen


def test_a_search_is_as_good_as_trying_everything_on_200_random_small_cases() -> None:
    rng, compared, short = random.Random(20), 0, 0
    while compared < 200:
        case = random_case(rng)
        plans = priced(case)
        fitting = sum(plan.fits for plan in plans)
        if fitting:
            compare(case, plans)
            compared, short = compared + 1, short + (fitting < len(plans))
    assert short >= 20  # memory decides in some of them


CASES: Mapping[str, Case] = {
    "two nodes": (tiny(layers=5), gpus(2, 2), work(4), {"zero": "1", "microbatch": "1"}),
    "hybrid shards": (tiny(layers=3), gpus(2, 2), work(4), {"pp": "1", "tp": "1"}),
    "short of memory": (
        tiny(vocab=50_000),
        gpus(1, 4, memory_bytes=1.95e9),
        work(8, 2048),
        {"schedule": "zb-v", "microbatch": "1"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_larger_spaces_too(case: Case) -> None:
    compare(case, priced(case))


def test_least_memory_is_found_too() -> None:
    case: Case = (
        tiny(layers=4),
        gpus(1, 4),
        work(4, 1024),
        {"microbatch": "1", "pp": "2", "zero": "1"},
    )
    expected = families(priced(case), by_memory=True)
    objective = Objective(name="memory")
    result = search(*case[:3], fixed=case[3], top=len(expected), objective=objective)
    found = [rounded(c.prediction.peak_memory_gib * GIB) for c in result.plans]
    assert found == pytest.approx(expected, rel=1e-8)


def test_the_front_is_what_no_other_plan_beats_in_both() -> None:
    fixed = {"microbatch": "2", "zero": "1", "sequence_parallel": "False"}
    case: Case = tiny(layers=4, vocab=30_000), gpus(1, 4), work(8, 1024), fixed
    points = {(plan.step_s, plan.peak_bytes) for plan in priced(case) if plan.fits}
    until_s = FRONT_SLOWER * min(points)[0]
    expected = sorted(
        point
        for point in points
        if point[0] <= until_s
        and not any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in points)
    )
    result = search(*case[:3], fixed=fixed, with_front=True)
    found = [(rounded(p.step_time_s), rounded(p.peak_bytes)) for p in result.front]
    assert found == expected
    assert len(found) > 1


def test_an_answer_predicts_what_predict_does() -> None:
    model, cluster, workload = tiny(layers=7), gpus(2, 2), work(8)
    for candidate in search(model, cluster, workload).plans:
        alone = predict(model, cluster, workload, candidate.plan)
        assert candidate.prediction.to_json() == alone.to_json()
