"""Predicted and measured quantities meet under the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.report.compare import Comparison, comparisons, measured, worded
from triptych.report.run import Run, Step, read_run


def row(rows: tuple[Comparison, ...], name: str) -> Comparison:
    return next(row for row in rows if row.name == name)


def test_every_quantity_of_a_run_is_compared(run_folder: Path) -> None:
    rows = comparisons(read_run(run_folder))
    assert [row.name for row in rows] == [
        "step time",
        "compute",
        "tensor communication",
        "bubble",
        "tokens per second",
        "MFU",
        "bubble fraction",
        "tensor axis, sent per rank",
        "peak memory",
    ]


def test_predicted_stands_beside_measured(run_folder: Path) -> None:
    rows = comparisons(read_run(run_folder))
    step = row(rows, "step time")
    assert (step.predicted, step.measured, step.relative_error) == (0.1, pytest.approx(0.2), -0.5)
    assert row(rows, "tokens per second").predicted == 400 / 0.1
    assert row(rows, "tensor axis, sent per rank").relative_error == 0.0


def test_peak_memory_is_compared_in_bytes_with_the_largest_step(run_folder: Path) -> None:
    memory = row(comparisons(read_run(run_folder)), "peak memory")
    assert (memory.predicted, memory.measured) == (2**29, 2**29 + 20)


def test_the_recorded_bubble_comes_from_the_timeline(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert run.timeline is not None
    bubble = row(comparisons(run), "bubble fraction")
    assert (bubble.predicted, bubble.measured) == (0.25, run.timeline.bubble_fraction)


def test_medians_leave_out_the_first_fifth_of_the_steps() -> None:
    times_s = (9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    steps = [Step(step=i, loss=1.0, step_time_s=t) for i, t in enumerate(times_s)]
    result = measured(steps)
    assert (result.num_steps, result.step_time_s) == (8, 4.5)


def test_at_most_ten_steps_are_left_out() -> None:
    assert measured([Step(step=i, loss=1.0) for i in range(1000)]).num_steps == 990


def test_medians_are_of_the_last_plan_only() -> None:
    before = [Step(step=i, loss=1.0, step_time_s=9.0, plan="tp=1") for i in range(50)]
    after = [Step(step=i, loss=1.0, step_time_s=1.0, plan="tp=2") for i in range(50, 60)]
    result = measured(before + after)
    assert (result.num_steps, result.step_time_s) == (8, 1.0)


def test_a_run_without_steps_has_no_measured_side() -> None:
    result = measured(())
    assert (result.num_steps, result.step_time_s, result.memory_bytes) == (0, None, None)


def test_a_run_without_prediction_has_no_predicted_side() -> None:
    (step,) = comparisons(Run(name="x", steps=(Step(step=1, loss=1.0, step_time_s=2.0),)))
    assert (step.predicted, step.measured, step.relative_error) == (None, 2.0, None)


def test_an_unknown_term_is_shown_too() -> None:
    run = Run(name="x", prediction={"time_s": {"checkpointing": 1.0, "compute": 2.0}})
    assert [row.name for row in comparisons(run)] == ["compute", "checkpointing"]


def test_a_run_measures_bubble_and_pipeline_communication_together() -> None:
    run = Run(
        name="x",
        prediction={"time_s": {"compute": 5.0, "pipeline_comm": 1.0, "bubble": 2.0}},
        steps=(Step(step=1, loss=1.0, time_s={"compute": 6.0, "pipeline_comm": 4.0}),),
    )
    rows = [(row.name, row.predicted, row.measured) for row in comparisons(run)]
    assert rows == [("compute", 5.0, 6.0), ("bubble and pipeline", 3.0, 4.0)]


def test_the_length_of_the_whole_step_is_not_one_of_its_parts() -> None:
    steps = (Step(step=1, loss=1.0, time_s={"compute": 6.0, "step": 7.0}),)
    assert [row.name for row in comparisons(Run(name="x", steps=steps))] == ["compute"]


def test_field_names_become_words() -> None:
    assert worded("data_comm") == "data communication"
    assert worded("optimizer") == "optimizer"


def test_the_exchange_of_a_tied_embedding_counts_as_gradient_exchange(run_folder: Path) -> None:
    run = read_run(run_folder)
    step = replace(run.steps[0], time_s={"compute": 0.1, "data_comm": 0.01, "tie_comm": 0.02})
    rows = comparisons(replace(run, steps=(step,)))
    assert row(rows, "data communication").measured == pytest.approx(0.03)
    assert not any(found.name == "tie communication" for found in rows)
