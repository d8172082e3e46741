"""Stages of their own: known layouts come out again, mixed clusters gain, the answer is sound."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from search_samples import gpus, tiny, with_memory, work

from triptych.cli.plan import command
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.kernels.rates import slowest_device
from triptych.cost.memory import room_bytes
from triptych.cost.predict import predict
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.errors import PlanError
from triptych.model.load import load_model
from triptych.model.model import Experts, Model
from triptych.plan.plan import Plan
from triptych.plan.rules import verify
from triptych.plan.workload import Workload
from triptych.report.automatic import automatic_text, ranges_text
from triptych.search.auto import unit_bounds
from triptych.search.automatic import answer_automatic
from triptych.search.inter.price import Units
from triptych.search.inter.rounds import base_plan, places, rounds, submesh_sizes, suits
from triptych.search.pins import Pins
from triptych.search.result import SearchResult
from triptych.search.search import Question


def find(model: Model, where: Cluster, asked: Workload, **fixed: str) -> SearchResult:
    question = Question(model=model, cluster=where, workload=asked, pins=Pins.read(fixed))
    return answer_automatic(question, top=3)


@cache
def few_layers(name: str, layers: int) -> Model:
    model = load_model(name)
    return replace(model, blocks=model.blocks[-layers:])


PAIRS = {  # model, layers, cluster, sequence, batch -> what the plan has
    "a small model: data": ("smollm2-135m", 4, "1x8xH100-SXM", 2048, 64, "data"),
    "a small model of GPT's": ("gpt-2", 4, "1x8xA100-80", 1024, 64, "data"),
    "a small model on two nodes": ("smollm2-360m", 4, "2x8xH100-SXM", 2048, 128, "data"),
    "one sequence a node": ("llama-3.1-70b", 4, "1x8xH100-SXM", 4096, 1, "megatron"),
    "two sequences of a wide model": ("llama-3.1-405b", 2, "1x8xH100-SXM", 4096, 1, "megatron"),
    "long and wide on A100": ("llama-2-70b", 4, "1x8xA100-80", 4096, 1, "megatron"),
    "experts": ("mixtral-8x7b-v0.1", 4, "1x8xH100-SXM", 4096, 64, "experts"),
    "many experts": ("qwen3-235b-a22b", 6, "2x8xH100-SXM", 4096, 64, "experts"),
    "experts on two nodes": ("mixtral-8x7b-v0.1", 6, "2x8xH100-SXM", 4096, 64, "experts"),
    "memory is short": ("llama-2-7b", 16, "1x8xA100-40", 2048, 64, "zero"),
    "memory is short on V100": ("gpt-3-6.7b", 12, "1x8xV100-32", 1024, 64, "zero"),
    "memory is very short": ("llama-3.1-8b", 16, "1x8xA100-40", 2048, 64, "zero"),
}


def _traits(plan: Plan) -> set[str]:
    """What kinds of parallelism a plan is made of."""
    stages = plan.stages
    found = set()
    if all(s.tensor == s.context == s.expert == 1 for s in stages) and plan.pp == 1:
        found.add("data")
    if plan.sequence_parallel and all(s.tensor == 8 for s in stages):
        found.add("megatron")
    if all(s.expert > 1 for s in stages):
        found.add("experts")
    if plan.zero and any(s.data > 1 for s in stages):
        found.add("zero")
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_known_layouts_are_found_again(name: str) -> None:
    model, layers, where, length, batch, kind = PAIRS[name]
    asked = Workload(sequence_length=length, global_batch=batch)
    plan = find(few_layers(model, layers), parse_cluster(where), asked).plans[0].plan
    assert kind in _traits(plan), plan.short()
    if kind == "zero":
        whole = predict(few_layers(model, layers), parse_cluster(where), asked, plan.with_(zero=0))
        assert not whole.fits


MIXED = ("1x4xA100-80+1x4xV100-32", "1x2xH100-SXM+1x2xA100-80")


@pytest.mark.parametrize("where", MIXED)
def test_on_mixed_clusters_the_faster_devices_have_more_layers(where: str) -> None:
    model, cluster, asked = few_layers("llama-2-7b", 6), parse_cluster(where), work(16, 1024)
    result = find(model, cluster, asked)
    best = result.plans[0]
    assert best.prediction.fits and not verify(best.plan, model, cluster, asked)
    assert best.prediction.runnable
    hand = result.automatic.hand_made if result.automatic else None
    assert hand and best.prediction.step_time_s < hand.prediction.step_time_s
    frame = Frame.of(Pricer(model, cluster, asked), best.plan)
    layers = dict.fromkeys((0, 1), 0)
    for stage, own in zip(frame.stages, frame.pricers, strict=True):
        layers[cluster.groups.index(own.cluster.groups[0])] += stage.num_layers
    assert layers[0] > layers[1] > 0


def test_the_answer_is_never_slower_than_uniform_plans_and_says_what_decisions_save() -> None:
    model, where = tiny(layers=7, vocab=200_003), with_memory(gpus(1, 4), 2.2e9)
    result = find(model, where, work(16))
    assert result.automatic is not None and result.automatic.hand_made is not None
    best, hand = result.plans[0].prediction, result.automatic.hand_made.prediction
    assert best.step_time_s <= hand.step_time_s
    for one in result.automatic.decisions:
        assert one.value != one.instead or one.name == "microbatch"
        assert (one.saved_s is None) == bool(one.reason)
    assert result.automatic.layouts
    text = automatic_text(result.to_json())
    assert "stages of plan 1" in text and "operators" in text


def test_settings_that_are_fixed_are_kept_and_those_that_leave_nothing_are_refused() -> None:
    plan = find(tiny(), gpus(1, 4), work(), tp="2", zero="1").plans[0].plan
    assert {stage.tensor for stage in plan.stages} == {2} and plan.zero == 1
    with pytest.raises(PlanError, match="pp, layers"):
        find(tiny(), gpus(1, 4), work(), pp="2", layers="3+3")


def test_submeshes_tile_nodes_and_layers_are_clustered() -> None:
    assert submesh_sizes(3, 8) == [1, 2, 4, 8, 16, 24]
    assert submesh_sizes(2, 6) == [1, 6, 12]
    few, many = tiny(layers=5), tiny(layers=100)
    assert unit_bounds(Pricer(few, gpus(1, 4), work())) == (0, 1, 2, 3, 4, 5)
    bounds = unit_bounds(Pricer(many, gpus(1, 4), work()))
    assert len(bounds) == 49 and bounds[-1] == 100
    assert {b - a for a, b in pairwise(bounds)} == {2, 3}
    assert ranges_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_experts_with_shared_ones_have_layouts() -> None:
    experts = Experts(count=8, top_k=2, width=256, shared_width=128)
    result = find(tiny(experts=experts, layers=3), gpus(1, 2), work())
    assert result.automatic is not None
    names = {name for layout in result.automatic.layouts for name, _ in layout.operators}
    assert not result.automatic.layouts[0].axes or {"router", "shared_up"} <= names


def test_the_command_takes_auto_and_mixed_clusters_need_not_ask() -> None:
    options = {"seq": 512, "batch": 16, "top": 2}
    said = command("gpt-2", "1x1xA100-80+1x1xV100-32", **options)
    assert said.document is not None and said.document["automatic"] is not None
    assert "stages of plan 1" in (said.text or "")
    plain = command("gpt-2", "1x2xA100-80", **options)
    assert plain.document is not None and plain.document["automatic"] is None


def test_spans_cost_the_sums_of_their_clusters_and_the_whole_model_what_its_figures_say() -> None:
    """Clusters that are alike are priced once: as if every one were priced for itself."""
    model, where = tiny(layers=5, vocab=50_003), gpus(1, 4)
    space = Question(model=model, cluster=where, workload=work(16), pins=Pins.read({})).space()
    pricer = Pricer(model, where, work(16))
    units = Units(space=space, pricer=pricer, bounds=unit_bounds(pricer))
    shared = next(round for round in rounds(space) if round.rows == 4)
    count = 0
    for place, zero in product(places(space, 0), (0, 1, 3)):
        if not suits(space, place, shared):
            continue
        count += 1
        frame, clusters = units.at(place, shared).frame, units.clusters(place, shared, zero)
        assert clusters is not None
        option = clusters.option()
        storage = Storage.of(base_plan(space, shared, zero).with_(stages=frame.stages[:1]))
        passes_s = [sum(pair) for pair in frame.passes(storage)[0]]
        ends_s = option.seconds[0] - np.array(passes_s)
        held = np.array([cost.holdings.total for cost in frame.costs], dtype=float)
        assert ends_s == pytest.approx(held * (ends_s.sum() / held.sum()), abs=1e-12)
        assert option.seconds[2, 1] == pytest.approx(option.seconds[0, 1:4].sum())
        flight = [cost.saved_bytes + cost.head_gradient_bytes for cost in frame.costs]
        assert option.flight_bytes[0] == pytest.approx(flight)
        whole = (option.seconds[-1, 0], option.state_bytes[-1, 0], option.flight_bytes[-1, 0])
        assert clusters.figures() == pytest.approx(whole)
    assert count > 10


def test_places_at_which_no_cluster_fits_are_left_out_and_no_others() -> None:
    model, where = tiny(layers=5, hidden=1024, width=4096), gpus(1, 4, memory_bytes=900e6)
    space = Question(model=model, cluster=where, workload=work(16), pins=Pins.read({})).space()
    pricer = Pricer(model, where, work(16))
    units = Units(space=space, pricer=pricer, bounds=unit_bounds(pricer))
    roomy = replace(space, cluster=gpus(1, 4))
    plenty = Pricer(model, gpus(1, 4), work(16))
    whole = Units(space=roomy, pricer=plenty, bounds=units.bounds)
    left_out = 0
    for shared in rounds(space):
        for place, zero in product(places(space, 0), (0, 1, 3)):
            if not suits(space, place, shared):
                continue
            found, asked = units.clusters(place, shared, zero), whole.clusters(place, shared, zero)
            assert asked is not None
            limit_bytes = space.room_bytes(pricer.memory_limit_bytes)
            room = room_bytes(limit_bytes, pricer.software.footprint, False)
            option = replace(asked.option(), limit_bytes=room)
            if found is None:
                assert option.in_flight().max() == 0
            left_out += found is None
    assert left_out > 10


def test_ranks_on_several_kinds_wait_for_the_slowest_at_each_kind_of_work() -> None:
    """An L40S is quicker than an A100 at products and slower at what memory bounds."""
    both = parse_cluster("1x2xA100-80+1x2xL40S")
    kinds = [group.device for group in both.groups]
    slowest = slowest_device(both)
    assert slowest.memory_bytes_per_s == min(kind.memory_bytes_per_s for kind in kinds)
    for dtype in ("bf16", "fp32"):
        assert slowest.peak_flops[dtype] == min(kind.peak_flops[dtype] for kind in kinds)
    model, asked, plan = few_layers("gpt-2-xl", 4), work(16, 1024), Plan.uniform(4, dp=4, zero=1)
    whole = predict(model, both, asked, plan).step_time_s
    for kind in ("A100-80", "L40S"):
        alone = predict(model, parse_cluster(f"2x2x{kind}"), asked, plan).step_time_s
        assert whole >= alone * 0.999
