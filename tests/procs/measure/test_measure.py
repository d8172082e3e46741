"""`triptych measure` on two ranks: what it writes, and how it goes on after it was cut off."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from triptych.cluster.toml import read_cluster
from triptych.cost.predict import predict
from triptych.errors import RunError
from triptych.measure import figures, host, kernels, messages, run, watch
from triptych.model.hf import from_config
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload

RANKS = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All figures, with few and small points."""
    small = {
        (watch, "ROUNDS"): 1,
        (watch, "LEAST_S"): 1e-4,
        (watch, "POOL_BYTES"): {"cpu": 1 << 16},
        (kernels, "ROWS"): (8, 64),
        (kernels, "INNER"): (8, 64),
        (kernels, "COLUMNS"): (8, 64),
        (kernels, "LENGTHS"): (16, 64),
        (kernels, "HEAD_SIZES"): (8, 16),
        (kernels, "ELEMENTS"): (2048.0, 16384.0, 32768.0),
        (kernels, "UPDATED"): (1024.0, 4096.0),
        (kernels, "COPIED_BYTES"): 1 << 16,
        (host, "STEPS"): 1,
        (messages, "SIZES"): (1024, 4096),
        (messages, "MOST_CALLS"): 2,
    }
    for (module, name), value in small.items():
        monkeypatch.setattr(module, name, value)
    yield


def order(out: Path, again: bool = False) -> run.Order:
    return run.Order(out=out, dtypes=("fp32",), again=again)


def _measured(out: Path) -> int:
    torch.set_num_threads(1)
    found = run.measure(order(out), RANKS, lambda text: None)
    return found.resumed if found else -1


def test_the_file_is_a_cluster_that_prices_plans_and_no_record_is_left(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    assert run_ranks(RANKS, _measured, out) == [0, -1]
    assert os.listdir(tmp_path) == ["cluster.toml"]
    cluster = read_cluster(out)
    assert cluster.num_devices == RANKS
    assert any(note.startswith("torch: ") for note in cluster.notes)
    config = host._CONFIG | {"num_hidden_layers": 2}
    model = from_config(config, "tiny")
    work = Workload(sequence_length=32, global_batch=4)
    for text in ("tp=2", "pp=2", "dp=2,zero=3"):
        found = predict(model, cluster, work, parse_plan(f"{text},precision=fp32", model))
        assert 1e-5 < found.step_time_s < 10.0


def _cut_off(out: Path, number: int) -> None:
    """Ends rank 1 ahead of a figure."""
    ahead = run._measure
    count = iter(range(1_000))

    def measure(*args: Any) -> None:
        if next(count) == number and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ahead(*args)

    setattr(run, "_measure", measure)  # noqa: B010 (in this process only)
    _measured(out)


def test_after_a_killed_rank_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with pytest.raises(AssertionError, match="failed"):
        run_ranks(RANKS, _cut_off, out, 3)
    assert not out.exists()
    kept = (tmp_path / ".cluster.toml.part").read_text().splitlines()
    assert len(kept) >= 2
    resumed, _ = run_ranks(RANKS, _measured, out)
    assert resumed == len(kept) - 1
    assert read_cluster(out).num_devices == RANKS


def _full(out: Path) -> str:
    """What rank 0 says when the disk is full; the other rank ends as well."""
    try:
        run.measure(order(out, again=True), RANKS, lambda text: None)
    except (RunError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_full_disk_is_one_message_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    (tmp_path / ".cluster.toml.part").symlink_to("/dev/full")
    told, other = run_ranks(RANKS, _full, out)
    assert told == f"cannot write {tmp_path}/.cluster.toml.part: No space left on device"
    assert other
    assert not out.exists()


def test_figures_have_names_of_their_own() -> None:
    place = watch.Place(rank=0, world=4, per_node=2, device=torch.device("cpu"))
    names = [figure.name for figure in figures.figures(place, ("fp32", "bf16"))]
    assert len(set(names)) == len(names)
    assert {"network all_reduce", "link all_reduce"} <= set(names)


def test_groups_of_a_size_cover_all_ranks_within_nodes_and_across() -> None:
    place = watch.Place(rank=0, world=6, per_node=3, device=torch.device("cpu"))
    assert messages.group_sizes(place, False) == [2, 3]
    assert messages.groups(place, 2, False) == [(0, 1), (3, 4)]
    assert messages.groups(place, 2, True) == [(0, 3), (1, 4), (2, 5)]


def test_ranks_that_no_group_has_say_nothing_of_its_messages() -> None:
    assert messages.mean_of_members([0.5, messages.LEFT_OVER_S, 0.25]) == 0.375
    assert messages.mean_of_members([2.0, 2.0]) == 2.0  # of a size, which all say


def test_what_is_timed_is_the_mean_of_calls_without_what_runs_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = watch.Place(rank=0, world=1, per_node=1, device=torch.device("cpu"))
    alone, clock_s, calls = watch.Watch(place), [0.0], list[str]()
    took_s = iter([5.0, 1.0, 1.0, 9.0, 1.0])  # the first call is not counted; one is held up
    monkeypatch.setattr(alone, "now_s", lambda: clock_s[0])

    def lasts(name: str, seconds: float) -> None:
        calls.append(name)
        clock_s[0] += seconds

    mean_s = alone.seconds(lambda: lasts("call", next(took_s)), 4, lambda: lasts("work", 100.0))
    assert mean_s == 3.0
    assert calls == ["call", *["work", "call"] * 4]
