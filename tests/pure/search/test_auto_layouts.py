"""Layouts of operators: the programme finds what is known to be good, and nothing worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_samples import gpus, tiny, work

from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.storage import Storage
from triptych.model.load import load_model
from triptych.model.model import Experts, Model
from triptych.model.operators import block_operators
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload
from triptych.search.intra.block import Layer
from triptych.search.intra.convert import conversion
from triptych.search.intra.ilp import solve
from triptych.search.intra.layouts import layer_of, layouts, restricted
from triptych.search.intra.modes import ENTRY, flows
from triptych.search.intra.roles import ROLES, Axis, best_with, named, stage_axes


def layer(
    model: Model,
    axes: tuple[int, ...],
    rows: int,
    *,
    cluster: str = "1x8xH100-SXM",
    batch: int = 64,
) -> Layer:
    pricer = Pricer(
        model, parse_cluster(cluster), Workload(sequence_length=4096, global_batch=batch)
    )
    plan = Plan.uniform(model.num_layers, precision=Precision.mixed())
    return Layer(
        pricer=pricer,
        block=pricer.kinds[-1],
        axes=axes,
        rows=rows,
        num_microbatches=batch // rows,
        setting=Setting.of(plan),
        storage=Storage.of(plan),
    )


def chosen_roles(asked: Layer, limit_bytes: float = float("inf")) -> tuple[str, ...] | None:
    choice = solve(asked.graph(limit_bytes))
    assert choice is not None
    return named(asked, choice)


def whole_bytes(asked: Layer) -> float:
    """What the layer needs on one device."""
    alone = replace_axes(asked, (1,)).graph()
    return alone.total_bytes([0] * len(alone.seconds))


def replace_axes(asked: Layer, axes: tuple[int, ...]) -> Layer:
    return replace(asked, axes=axes)


DENSE, MOE = load_model("llama-3.1-70b"), load_model("mixtral-8x7b-v0.1")


def test_sequences_for_everyone_make_data_parallelism() -> None:
    assert chosen_roles(layer(DENSE, (8,), 8)) == ("data",)


def test_one_sequence_and_little_memory_make_columns_rows_and_sequence_parallelism() -> None:
    asked = layer(DENSE, (8,), 1)
    assert chosen_roles(asked, whole_bytes(asked) / 7) == ("tensor+sequence",)


def test_experts_are_dealt_to_the_data_ranks() -> None:
    asked = layer(MOE, (8,), 8)
    assert chosen_roles(asked, whole_bytes(asked) / 4) == ("expert",)


def test_two_axes_have_roles_of_their_own() -> None:
    asked = layer(DENSE, (2, 8), 2, cluster="2x8xH100-SXM")
    assert chosen_roles(asked, whole_bytes(asked) / 7) == ("data", "tensor+sequence")


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("llama-3.1-8b", (2, 2)),
        ("gpt-2-xl", (4,)),
        ("mixtral-8x7b-v0.1", (2, 2)),
        ("deepseek-v3", (4,)),
    ],
)
def test_the_best_layout_is_no_slower_than_those_with_names(
    model: str, axes: tuple[int, ...]
) -> None:
    asked = layer(load_model(model), axes, 4, cluster="1x4xH100-SXM")
    graph = asked.graph()
    choice = solve(graph)
    assert choice is not None
    count = 0
    for role in (r for r in ROLES if r != "expert" or asked.pricer.model.experts):
        allowed = best_with(asked, [role] * len(axes))
        if allowed is not None:
            planned = restricted(graph, allowed)
            assert planned is not None
            assert graph.total_s(choice) <= graph.total_s(planned) * (1 + 1e-9)
            assert set(named(asked, planned) or ()) == {role}
            count += 1
    assert count >= 3


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"tp": 4, "sp": 1}, {"tp": 4}, {"dp": 2, "tp": 2}])
def test_a_plan_in_the_programme_costs_what_the_cost_model_says(degrees: dict[str, int]) -> None:
    """All but the host, and gradients that a backward hides; compiled layers hide nothing else."""
    model, cluster, asked = (
        tiny(hidden=4096, heads=32, kv_heads=8, head_dim=128, width=14336),
        gpus(1, 4, memory_bytes=400e9),
        work(16, 4096),
    )
    parallel = bool(degrees.get("sp"))
    sizes = {key: size for key, size in degrees.items() if key != "sp"}
    plan = Plan.uniform(
        6,
        microbatch=2,
        compile=True,
        precision=Precision.mixed(),
        sequence_parallel=parallel,
        **sizes,
    )
    pricer = Pricer(model, cluster, asked)
    frame, axes = Frame.of(pricer, plan), stage_axes(plan, plan.stages[0])
    found, _ = layer_of(frame, plan, 0, axes, 0)
    graph = found.graph()
    planned = restricted(graph, best_with(found, [axis.role for axis in axes]))
    assert planned is not None
    piece = pricer.piece(0, frame.settings[0])
    expected = piece.forward.total_s + piece.backward.total_s
    assert graph.total_s(planned) == pytest.approx(expected, rel=0.03)


def test_alike_stages_are_solved_once_and_the_best_has_a_name() -> None:
    model, where = load_model("llama-3.1-70b"), parse_cluster("8x8xH100-SXM")
    plan = Plan.uniform(
        80,
        tp=8,
        dp=2,
        pp=4,
        sequence_parallel=True,
        zero=1,
        recompute="selective",
        precision=Precision.mixed(),
    )
    (found,) = layouts(Pricer(model, where, Workload(sequence_length=4096, global_batch=64)), plan)
    assert found.stages == (0, 1, 2, 3)
    assert found.axes == (Axis("data", 2), Axis("tensor+sequence", 8))
    assert found.is_best == (found.best_s == found.seconds)
    assert found.is_best == (found.roles == ("data", "tensor+sequence"))


def test_what_is_shown_runs_and_what_is_faster_is_a_bound() -> None:
    """Megatron's layout is shown; attention on whole sequences would be a little faster."""
    model, where = load_model("llama-2-13b"), parse_cluster("1x8xA100-80")
    plan = Plan.uniform(
        40,
        tp=2,
        dp=4,
        zero=1,
        microbatch=2,
        sequence_parallel=True,
        compile=True,
        precision=Precision.mixed(),
    )
    (found,) = layouts(Pricer(model, where, Workload(sequence_length=2048, global_batch=64)), plan)
    shown = dict(found.operators)
    assert shown["mlp_up"] == ("data", "column") and shown["mlp_down"] == ("data", "row")
    assert shown["attention"] == ("data", "heads") and shown["mlp_norm"] == ("data", "sequence")
    assert 0.98 * found.seconds < found.best_s < found.seconds and found.roles is None
    best = dict(found.best)
    assert best["attention"] == ("data", "data") and best["mlp_up"] == shown["mlp_up"]


def test_a_layer_that_fits_nowhere_has_no_layout() -> None:
    asked = layer(DENSE, (8,), 8)
    assert solve(asked.graph(whole_bytes(asked) / 9)) is None


def test_flows_join_branches_and_come_back_to_the_start() -> None:
    model = tiny(experts=Experts(count=4, top_k=2, width=64, shared_width=64))
    operators = (ENTRY, *block_operators(model, model.blocks[0]))
    names = [op.name for op in operators]
    found = {(names[a], names[b]) for a, b in flows(operators)}
    assert {("mlp_norm", "router"), ("router", "dispatch"), ("mlp_norm", "dispatch")} <= found
    assert {("mlp_norm", "shared_up"), ("combine", "mlp_residual")} <= found
    assert {("shared_down", "mlp_residual"), ("attention_residual", "mlp_residual")} <= found
    assert ("mlp_residual", "input") in found and ("input", "attention_residual") in found


@pytest.mark.parametrize(
    ("source", "target", "passes"),
    [
        ("P", "R", ("all_reduce", "")),  # Megatron's g
        ("R", "G", ("", "all_reduce")),  # and f
        ("P", "S", ("gather", "gather")),
        ("S", "G", ("gather", "gather")),
        ("S", "F", ("all_to_all", "all_to_all")),  # Ulysses
        ("B", "B", ("", "")),
        ("R", "E", None),
    ],
)
def test_conversions_are_the_known_collectives(
    source: str, target: str, passes: tuple[str, str] | None
) -> None:
    assert conversion(source, target) == passes
