"""A save is all or nothing: full disks, kills, wrong parts, rotation."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import (
    assert_same_bytes,
    layout,
    make_tensors,
    save_steps,
    shard_of,
    steps_in,
    wanted,
    whole_shards,
)
from ranks import run_ranks

from triptych.checkpoint.find import newest_complete
from triptych.checkpoint.read import load, state
from triptych.checkpoint.write import rotate, save
from triptych.errors import CheckpointError, RunError
from triptych.runtime.shard import Shard


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _save_with_full_disk(folder: Path, full: int) -> str:
    """Rank `full` cannot write more than a few bytes to a file."""
    rank = dist.get_rank()
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    try:
        save(folder, 20, layout(make_tensors(2), 2, 3)[rank], {})
    except RunError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("full", [0, 2])
def test_a_disk_full_on_one_rank_is_one_error_on_all_and_leaves_nothing(
    tmp_path: Path, full: int
) -> None:
    save_steps(tmp_path, 10)
    before = tree(tmp_path)
    errors = run_ranks(3, _save_with_full_disk, tmp_path, full)
    assert len(set(errors)) == 1
    assert "File too large" in errors[0]
    assert "needed: " in errors[0] and "free: " in errors[0]
    assert tree(tmp_path) == before
    assert newest_complete(tmp_path) == (tmp_path / "step-00000010", [])


def test_a_save_that_cannot_fit_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    huge = 1 << 50
    shard = Shard(
        kind="weight",
        name="model.embed_tokens.weight",
        shape=(huge,),
        box=((0, huge),),
        tensor=torch.zeros(1).expand(huge),
        saved=True,
    )
    with pytest.raises(RunError, match=rf"needed: {4 * huge} bytes.*4096.00 TiB"):
        save(tmp_path, 10, [shard], {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_run_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match=r"needed"):
        save(tmp_path / "run" / "checkpoints", 10, whole_shards(make_tensors()), {})


class Deadly(Mapping[str, Any]):
    """A mapping that kills its reader: a crash at a point of our choice."""

    def __getitem__(self, key: str) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def __iter__(self) -> Iterator[str]:
        return iter(["position"])

    def __len__(self) -> int:
        return 1


class DeadlyTensor(torch.Tensor):
    """Kills the process when it is about to be written."""

    def detach(self) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return self


def _killed(folder: Path, when: str) -> None:
    shards = whole_shards(make_tensors(2))
    if when == "between tensors":
        shards[-1] = replace(shards[-1], tensor=shards[-1].tensor.as_subclass(DeadlyTensor))
    save(folder, 20, shards, Deadly() if when == "between files" else {})


@pytest.mark.parametrize("when", ["between tensors", "between files"])
def test_a_killed_save_is_never_loaded_and_cleaned_up_by_the_next(
    tmp_path: Path, when: str
) -> None:
    save_steps(tmp_path, 10)
    with pytest.raises(AssertionError, match=r"died silently"):
        run_ranks(1, _killed, tmp_path, when)
    (left,) = tmp_path.glob("step-00000020.tmp-*")
    assert (left / "rank-00000.safetensors").exists()
    found, warnings = newest_complete(tmp_path)
    assert found == tmp_path / "step-00000010"
    assert warnings == [f"{left.name} is an interrupted save and is not used"]
    save_steps(tmp_path, 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_save_that_was_never_renamed_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000020.tmp-1234abcd")
    found, warnings = newest_complete(tmp_path)
    assert found == tmp_path / "step-00000010"
    assert len(warnings) == 1


def test_parts_that_do_not_cover_a_tensor_once_are_refused_with_its_name(tmp_path: Path) -> None:
    whole = make_tensors()["weight", "model.norm.weight"]
    parts = [
        shard_of(("weight", "model.norm.weight"), whole, ((0, 4),)),
        shard_of(("weight", "model.norm.weight"), whole, ((3, 6),)),
    ]
    with pytest.raises(CheckpointError, match=r"weight/model.norm.weight.*overlap"):
        save(tmp_path, 10, parts, {})
    with pytest.raises(CheckpointError, match=r"weight/model.norm.weight.*2 of 6 elements"):
        save(tmp_path, 10, parts[:1], {})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not JSON serializable"):
        save(tmp_path, 10, whole_shards(make_tensors()), {"position": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    tensors = make_tensors(9)
    save(tmp_path, 10, whole_shards(make_tensors(1)), {"position": 1})
    save(tmp_path, 10, whole_shards(tensors), {"position": 2})
    ours = wanted(tensors)
    load(tmp_path / "step-00000010", ours)
    assert_same_bytes(ours, tensors)
    assert state(tmp_path / "step-00000010")["position"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ((8, 9, 10, 11), [9, 10, 11]),
        ((98, 99, 100, 101), [99, 100, 101]),
        ((9800, 9900, 10000, 10100), [9900, 10000, 10100]),
        ((99999999, 100000000, 100000001, 100000002), [100000000, 100000001, 100000002]),
    ],
)
def test_rotation_keeps_the_last_by_number(
    tmp_path: Path, steps: tuple[int, ...], kept: list[int]
) -> None:
    save_steps(tmp_path, *steps, keep_last=3)
    assert steps_in(tmp_path) == kept


def test_rotation_never_removes_what_another_run_left_above(tmp_path: Path) -> None:
    save_steps(tmp_path, 5000)
    save_steps(tmp_path, 10, 20, 30, 40, keep_last=3)
    assert steps_in(tmp_path) == [20, 30, 40, 5000]


def test_the_newest_and_the_protected_survive_keep_last_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, keep_last=1, protect=[20])
    assert steps_in(tmp_path) == [20, 40]


def test_rotation_touches_only_complete_folders_of_the_exact_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    for name in ("step-00000005-best", "step-5", "notes", "xstep-00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000004").mkdir()  # no mark in it: not ours to remove
    (tmp_path / "step-00000003").write_text("a file")
    rotate(tmp_path, 30, 1)
    assert steps_in(tmp_path) == [4, 30]
    assert len(list(tmp_path.iterdir())) == 7


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"newest checkpoint is always kept"):
        save_steps(tmp_path, 10, keep_last=0)
