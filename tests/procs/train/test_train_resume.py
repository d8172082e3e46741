"""Runs through the launcher: the loss falls, resuming goes on exactly, under any other plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import eval_losses, losses, make_job, metrics, run_job, stop_fork_server

from triptych.checkpoint.find import newest_complete
from triptych.errors import CheckpointError
from triptych.schedule.timeline import Timeline
from triptych.train.learning_rate import LearningRate

LENGTH = ("train.steps=12", "optimizer.warmup_steps=3", "optimizer.learning_rate=3e-3")


def settings(folder: Path) -> tuple[str, ...]:
    return (*LENGTH, f'data.eval="{folder}/text/document-0[01].txt"', "train.eval_every=4")


def rates(job_path: Path) -> dict[int, float]:
    """The learning rate by step."""
    return {line["step"]: line["learning_rate"] for line in metrics(job_path) if "loss" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of 12 steps in one process."""
    path = make_job(tmp_path_factory.mktemp("whole"))
    summary = run_job(path, *settings(path.parent), "parallel.plan=dp=1")
    assert summary.step == 12 and summary.checkpoint is not None
    return path


def test_the_loss_falls_on_text_kept_out_of_training(whole: Path) -> None:
    found = eval_losses(whole)
    assert list(found) == [0, 4, 8, 12]
    assert found[0] > 5.0 and found[12] < found[0] - 1.0


def test_the_learning_rate_is_the_closed_form_of_the_step(whole: Path) -> None:
    """User case pub_017."""
    rate = LearningRate(peak=3e-3, minimum=0.0, warmup_steps=3, total_steps=12)
    assert rates(whole) == {step: rate.at(step) for step in range(1, 13)}


def test_the_run_folder_tells_what_happened(whole: Path) -> None:
    run = whole.parent / "run"
    timeline = Timeline.from_json(json.loads((run / "timeline.json").read_text()))
    labels = {span.label for span in timeline.spans}
    assert {"0F0", "0B0", "optimizer"} <= labels
    assert not any("eval" in label for label in labels)
    line = metrics(whole)[-2]
    assert line["tokens"] == 8 * 16 and line["memory_bytes"] > 0 and line["time_s"]["compute"] > 0
    assert newest_complete(run)[0] == run / "checkpoints" / "step-00000012"
    names = {path.name for path in (run / "checkpoints" / "step-00000012").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2,pp=2", "dp=4,zero=1"),
        ("dp=2,zero=1,microbatch=2", "tp=2"),
        ("dp=1", "pp=2,dp=2,zero=1"),
        ("tp=2+1,dp=1+2,zero=1,microbatch=2", "tp=1+2,dp=2+1"),
    ],
)
def test_a_run_that_stops_and_goes_on_under_another_plan_equals_the_unbroken_one(
    tmp_path: Path, whole: Path, first: str, second: str
) -> None:
    """User case pub_046."""
    path = make_job(tmp_path)
    common = (*settings(tmp_path), "checkpoint.every=5", "checkpoint.keep_last=3")
    run_job(path, *common, f"parallel.plan={first}")
    for name in ("step-00000010", "step-00000012"):  # as if it had stopped before step 10
        folder = tmp_path / "run" / "checkpoints" / name
        folder.rename(tmp_path / name)
    with pytest.raises(CheckpointError, match="holds step-00000005"):
        run_job(path, *common, "checkpoint.resume=never", f"parallel.plan={second}")
    summary = run_job(path, *common, f"parallel.plan={second}")
    assert summary.step == 12
    assert losses(path) == pytest.approx(losses(whole), abs=1e-5)
    assert {k: v for k, v in eval_losses(path).items() if k != 5} == pytest.approx(
        eval_losses(whole), abs=1e-5
    )
    assert rates(path) == rates(whole)
    assert [line["step"] for line in metrics(path) if "loss" in line] == list(range(1, 13))


def test_a_run_that_is_complete_does_nothing_more(whole: Path) -> None:
    before = (whole.parent / "run" / "metrics.jsonl").read_text()
    summary = run_job(whole, *settings(whole.parent), "parallel.plan=dp=2")
    assert summary.step == 12 and summary.loss is None
    assert (whole.parent / "run" / "metrics.jsonl").read_text() == before


def test_a_longer_run_goes_on_from_a_complete_one(tmp_path: Path) -> None:
    path = make_job(tmp_path)
    run_job(path, "parallel.plan=dp=1", "train.steps=2")
    assert run_job(path, "parallel.plan=dp=2", "train.steps=3").step == 3
    assert list(losses(path)) == [1, 2, 3]


def test_a_run_does_not_go_on_with_other_text(tmp_path: Path) -> None:
    path = make_job(tmp_path)
    run_job(path, "parallel.plan=dp=1", "train.steps=2")
    (tmp_path / "text" / "document-00.txt").write_text("other text\n" * 50)
    with pytest.raises(Exception, match="of other data: text") as caught:
        run_job(path, "parallel.plan=dp=1", "train.steps=3")
    assert getattr(caught.value, "exit_code", None) == 2


def test_a_half_written_checkpoint_is_skipped_aloud(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """User case pub_049."""
    path = make_job(tmp_path)
    common = ("train.steps=4", "checkpoint.every=2", "parallel.plan=dp=1")
    run_job(path, *common)
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json").unlink()
    stop_fork_server()  # a new one writes to where this test reads
    capfd.readouterr()
    assert run_job(path, *common).step == 4
    said = capfd.readouterr().err
    assert "step-00000004 is skipped" in said and "state.json" in said
    assert "resumed from" in said and "step-00000002" in said


def test_if_no_checkpoint_is_complete_the_run_does_not_start_from_zero(tmp_path: Path) -> None:
    """User case pub_049."""
    path = make_job(tmp_path)
    common = ("train.steps=2", "parallel.plan=dp=1")
    run_job(path, *common)
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json"):
        run_job(path, *common, "train.steps=3")


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    path = make_job(tmp_path)
    run_job(
        path,
        "train.steps=11",
        "checkpoint.every=1",
        "checkpoint.keep_last=3",
        "parallel.plan=dp=1",
    )
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000010", "step-00000011"]
