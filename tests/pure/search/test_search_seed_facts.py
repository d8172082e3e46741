"""The facts that the project's two seed documents state, as the planner has them."""

from __future__ import annotations

import pytest
from search_samples import gpus, tiny, work

from triptych.cost.predict import predict
from triptych.cost.pricer import EMBEDDING, Pricer
from triptych.cost.setting import Setting
from triptych.cost.storage import Storage
from triptych.model.count import parameters
from triptych.plan.plan import Plan, Precision
from triptych.plan.ranks import axis_groups
from triptych.search.search import SearchResult, search
from triptych.units import GIB, MIB


def bytes_per_parameter(precision: Precision) -> float:
    """Weights, gradients and Adam's state of a data-parallel rank, by the cost model.

    And, where gradients travel in another dtype than they are kept in, their copy.
    """
    model = tiny(layers=2)
    plan = Plan.uniform(2, dp=2, precision=precision)
    terms = predict(model, gpus(1, 2), work(), plan).memory_gib
    state = sum(terms[term] for term in ("weights", "gradients", "optimizer")) * GIB
    storage = Storage.of(plan)
    return state / parameters(model) + (storage.reduction_bytes if storage.converts else 0.0)


@pytest.mark.parametrize(("tensor", "mib"), [(1, 5000), (2, 2500)])
def test_an_embedding_with_gradient_and_adam_halves_under_tensor_parallelism(
    tensor: int, mib: int
) -> None:
    model = tiny(vocab=64_000, hidden=5120, heads=32, kv_heads=32, head_dim=160, layers=1)
    pricer = Pricer(model, gpus(1, tensor), work())
    plan = Plan.uniform(1, tp=tensor, precision=Precision())
    elements = pricer.unit(EMBEDDING, Setting.of(plan)).total
    storage = Storage.of(plan)
    each = storage.parameter_bytes + storage.gradient_bytes + storage.optimizer_bytes
    assert elements * each / MIB == mib


@pytest.mark.parametrize(
    ("precision", "each"),
    [
        (Precision(), 16),
        (Precision(parameter="bf16", gradient="bf16", reduction="bf16"), 16),
        (Precision.mixed(), 18),
        (Precision(parameter="bf16", reduction="bf16"), 20),
    ],
)
def test_a_parameter_needs_16_18_or_20_bytes_by_choice_of_dtypes(
    precision: Precision, each: int
) -> None:
    assert bytes_per_parameter(precision) == pytest.approx(each, rel=1e-12)


def planned() -> SearchResult:
    fixed = {"tp": "4", "pp": "4", "dp": "2", "zero": "1", "schedule": "1f1b", "microbatch": "1"}
    return search(tiny(layers=8, heads=8), gpus(8, 4), work(32), fixed=fixed, top=1)


def test_32_gpus_in_nodes_of_4_keep_tensor_groups_in_their_node() -> None:
    (best,) = planned().plans
    assert (best.plan.tp, best.plan.pp, best.plan.dp, best.plan.world_size) == (4, 4, 2, 32)
    groups = axis_groups(best.plan, "tp")
    assert len(groups) == 8
    assert all(len({rank // 4 for rank in group}) == 1 for group in groups)


def test_why_zero_1_with_a_pipeline_the_bytes_of_1_2_and_3() -> None:
    result = planned()
    sent = result.zero_bytes
    count = result.plans[0].plan.num_microbatches(32)
    assert list(sent) == ["1", "2", "3"]
    assert count > 1
    assert sent["1"] < sent["2"] < sent["3"]
    assert sent["2"] > sent["1"] * count / 2
    assert result.to_json()["zero_bytes"] == sent
