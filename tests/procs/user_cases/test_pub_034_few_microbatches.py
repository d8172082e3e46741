"""User case PUB-034: fewer micro-batches than stages work, and the run says what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import losses
from verbs import Ranks, job

from triptych.cluster.local import cache_file, local_cluster
from triptych.cluster.toml import write_cluster
from triptych.schedule.timeline import Timeline


def plan_for_free_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for this machine with free messages: bubbles are then the rule's."""
    cluster = local_cluster()
    link = replace(cluster.network, latency_s=1e-9, bytes_per_s=1e15)
    groups = tuple(replace(group, link=link) for group in cluster.groups)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    file = cache_file({"XDG_CACHE_HOME": str(folder)})
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(write_cluster(replace(cluster, network=link, groups=groups)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 1), ("gpipe", 3), ("1f1b", 7)])
def test_pub_034_four_stages_train_any_number_of_micro_batches_and_tell_the_bubble(
    ranks: Ranks, tmp_path: Path, schedule: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every schedule with every count is in the runtime's tests."""
    plan_for_free_messages(tmp_path / "cache", monkeypatch)
    path = job(tmp_path)
    run = tmp_path / "run"
    short = ("--set", "train.steps=2", f"train.global_batch={count}")
    ended = ranks.done("train", path, "--plan", f"pp=4,schedule={schedule}", *short)
    predicted = json.loads((run / "prediction.json").read_text())["bubble_fraction"]
    assert f"pipeline: {count} micro-batches over 4 ranks" in ended.err
    assert f"predicted bubble {predicted:.0%}" in ended.err
    warned = f"fewer micro-batches ({count}) than pipeline ranks (4)" in ended.err
    assert warned is (count < 4)
    assert predicted == pytest.approx(3 / (count + 3), abs=0.15)  # the closed form, equal stages
    recorded = Timeline.from_json(json.loads((run / "timeline.json").read_text()))
    assert 0 < recorded.bubble_fraction < 1
    found = losses(path)
    run.rename(tmp_path / "pipelined")
    ranks.done("train", path, "--plan", "dp=1", *short)
    assert found == pytest.approx(losses(path), abs=1e-5)
