"""Run folders are read whole, in part, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import InputError
from triptych.report.run import FILES, Evaluation, read_run


def test_a_whole_run_is_read(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert run.name == "first-run"
    assert run.absent == {}
    assert run.plan is not None and run.plan.pp == 2
    assert run.job == {"train": {"steps": 20}}
    assert [step.step for step in run.steps] == list(range(1, 21))
    assert run.evaluations == (Evaluation(step=20, loss=6.5, tokens=1000),)
    assert run.timeline is not None and len(run.timeline.spans) == 13
    assert run.predicted_timeline is not None and len(run.predicted_timeline.spans) == 12


@pytest.mark.parametrize("name", FILES)
def test_each_file_may_be_missing_and_is_named(run_folder: Path, name: str) -> None:
    (run_folder / name).unlink()
    why = "none, the job named its plan" if name == "search.json" else "missing"
    assert read_run(run_folder).absent == {name: why}


@pytest.mark.parametrize("name", FILES)
def test_each_file_may_be_damaged_and_is_named(run_folder: Path, name: str) -> None:
    (run_folder / name).write_text("{ = \n{")
    absent = read_run(run_folder).absent
    assert list(absent) == [name]
    assert absent[name].startswith("cannot be read: ")


def test_a_document_of_a_later_schema_is_not_guessed_at(run_folder: Path) -> None:
    (run_folder / "search.json").write_text('{"schema_version": 9}')
    run = read_run(run_folder)
    assert run.search is None
    assert "schema_version 9; this version reads 1" in run.absent["search.json"]


def test_a_damaged_predicted_timeline_is_named_when_read(
    run_folder: Path, make_prediction: Callable[..., dict[str, Any]]
) -> None:
    document = make_prediction(timeline={"schema_version": 1, "num_ranks": 1, "spans": [[0]]})
    (run_folder / "prediction.json").write_text(json.dumps(document))
    assert "timeline" in read_run(run_folder).absent["prediction.json"]


def test_a_half_written_last_line_is_left_out(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 5.')
    run = read_run(run_folder)
    assert run.steps[-1].step == 20
    assert run.absent == {}


def test_a_step_done_again_after_a_restart_counts_once(
    run_folder: Path, make_step: Callable[..., dict[str, Any]]
) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        for number in (19, 20, 21):
            file.write(json.dumps(make_step(number, loss=1.0)) + "\n")
    steps = read_run(run_folder).steps
    assert [step.step for step in steps] == list(range(1, 22))
    assert [step.loss for step in steps[-3:]] == [1.0, 1.0, 1.0]


def test_unknown_keys_and_null_values_of_a_step_are_no_obstacle(
    run_folder: Path, make_step: Callable[..., dict[str, Any]]
) -> None:
    line = make_step(1, memory_bytes=None, something_new=3)
    (run_folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (step,) = read_run(run_folder).steps
    assert step.memory_bytes is None


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_folder_of_runs_is_refused_with_the_runs_in_it(run_folder: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run folder(.|\n)*works: .*first-run"):
        read_run(run_folder.parent)
