"""What the schedules cost: halves of backwards, chunks, messages, memory between I and W."""

from __future__ import annotations

from typing import Any

import pytest
from cost_samples import cluster, frame_of, llama, plan, work

from triptych.cost.predict import predict
from triptych.cost.prediction import Prediction
from triptych.cost.step import Priced, price_step
from triptych.cost.storage import Storage
from triptych.cost.traffic import rank_traffic
from triptych.schedule.traits import SCHEDULES, TRAITS

MODEL = llama(layers=8, hidden=1024, width=2816, vocab=2000)


def predicted(schedule: str, *, microbatches: int = 12, **settings: Any) -> Prediction:
    chunks = TRAITS[schedule].least_chunks
    chosen = plan(MODEL, pp=4, schedule=schedule, chunks=chunks, **settings)
    return predict(MODEL, cluster(4), work(1024, microbatches), chosen)


def test_a_weight_half_is_about_a_third_of_forward_and_backward() -> None:
    middle = frame_of(MODEL, plan(MODEL, pp=4), workload=work(512, 8)).costs[1]
    share = middle.weight_s / (middle.forward_s + middle.backward_s)
    assert 0.25 < share < 0.35


def test_a_weight_half_grows_with_the_products_alone() -> None:
    short, long = (
        frame_of(MODEL, plan(MODEL, pp=4), workload=work(length, 8)).costs[1]
        for length in (4096, 8192)
    )
    assert long.weight_s / short.weight_s < 2.0 < long.backward_s / short.backward_s


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first", "zb-h1", "zb-v", "zb-auto"])
def test_bubbles_shrink_against_1f1b(schedule: str) -> None:
    assert predicted(schedule).bubble_fraction < 0.8 * predicted("1f1b").bubble_fraction
    assert predicted(schedule).step_time_s < predicted("1f1b").step_time_s


def test_the_timeline_of_every_schedule_is_that_of_the_prediction() -> None:
    for schedule in SCHEDULES:
        prediction = predicted(schedule)
        assert prediction.timeline is not None
        assert prediction.bubble_fraction == pytest.approx(prediction.timeline.bubble_fraction)


def test_memory_follows_what_schedules_keep() -> None:
    memory = {name: predicted(name).memory_gib for name in SCHEDULES}
    kept = {name: terms["activations"] + terms["logits"] for name, terms in memory.items()}
    assert kept["1f1b"] < kept["interleaved"] < kept["breadth-first"]
    assert kept["1f1b"] <= kept["zb-h1"] < kept["zb-h2"] <= kept["zb-auto"]
    assert kept["zb-v"] < kept["zb-h2"]


def test_between_the_halves_the_factors_of_products_are_kept_even_if_all_is_recomputed() -> None:
    middle = frame_of(MODEL, plan(MODEL, pp=4, recompute="full"), workload=work(1024, 12)).costs[1]
    assert middle.deferred_bytes > 5 * middle.saved_bytes
    plain, split = predicted("1f1b", recompute="full"), predicted("zb-h1", recompute="full")
    assert split.memory_gib["activations"] > plain.memory_gib["activations"]


def test_messages_of_a_loop_and_of_a_v() -> None:
    def messages(pp: int, schedule: str) -> list[int]:
        frame = frame_of(MODEL, plan(MODEL, pp=pp, chunks=2, schedule=schedule))
        return [sum(frame.placement[hop.source] == r for hop in frame.hops) for r in range(pp)]

    assert messages(3, "interleaved") == [3, 4, 3]
    assert messages(3, "zb-v") == [2, 4, 2]
    assert messages(1, "interleaved") == [0]


def test_a_v_sends_less_than_a_loop() -> None:
    sent = {}
    for schedule in ("interleaved", "zb-v"):
        chosen = plan(MODEL, pp=4, schedule=schedule, chunks=2)
        frame = frame_of(MODEL, chosen, workload=work(1024, 12))
        sent[schedule] = rank_traffic(frame, Storage.of(chosen), 0).pipeline
    assert sent["zb-v"] / sent["interleaved"] == pytest.approx(2 / 3)


def test_both_ends_of_a_v_are_on_the_first_rank() -> None:
    chosen = plan(MODEL, pp=4, schedule="zb-v", chunks=2)
    frame = frame_of(MODEL, chosen)
    assert list(frame.stages_of(0)) == [0, 7]
    assert frame.placement == (0, 1, 2, 3, 3, 2, 1, 0)


def test_the_automatic_schedule_continues_at_its_steady_pace() -> None:
    chosen = plan(MODEL, pp=2, schedule="zb-auto")
    few, many = (
        frame_of(MODEL, chosen, cluster(2), work(1024, batch)) for batch in (1500, 1500 + 400)
    )
    few_s, many_s = (
        price_step(frame, Priced.of(frame, Storage.of(chosen)), "zb-auto").makespan_s
        for frame in (few, many)
    )
    busiest_s = max(cost.forward_s + cost.input_s + cost.weight_s for cost in many.costs)
    assert many_s - few_s == pytest.approx(400 * busiest_s, rel=1e-6)


def test_a_tied_table_with_both_ends_on_one_rank_is_held_once() -> None:
    held = {}
    for tied in (False, True):
        model = llama(layers=8, vocab=50_000, tied=tied)
        chosen = plan(model, pp=4, schedule="zb-v", chunks=2)
        frame, storage = frame_of(model, chosen), Storage.of(chosen)
        held[tied] = frame.memory(0, storage, "zb-v").weights
        assert rank_traffic(frame, storage, 0).tie == 0
    assert held[False] - held[True] == 2 * 50_000 * model.hidden
