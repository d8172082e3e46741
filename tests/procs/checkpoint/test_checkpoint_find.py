"""Resuming takes the newest checkpoint that is all there, and says aloud what it skips."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_samples import (
    assert_same_bytes,
    layout,
    make_tensors,
    save_steps,
    wanted,
    write_as_ranks,
)
from ranks import run_ranks

from triptych.checkpoint.find import newest_complete, newest_intact, resolve
from triptych.checkpoint.index import SCHEMA_VERSION
from triptych.checkpoint.read import load, state
from triptych.errors import CheckpointError

FILES = (
    "complete.json",
    "config.json",
    "index.json",
    "rank-00000.optimizer.safetensors",
    "rank-00000.safetensors",
    "rank-00001.optimizer.safetensors",
    "rank-00001.safetensors",
    "state.json",
)


def three_checkpoints(run: Path) -> Path:
    """A run folder with checkpoints of two ranks at steps 10, 20 and 30."""
    folder = run / "checkpoints"
    for step in (10, 20, 30):
        held = layout(make_tensors(step), step, 2)
        write_as_ranks(folder, step, held, position=step * 7)
    assert {path.name for path in (folder / "step-00000030").iterdir()} == set(FILES)
    return folder


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_that_lacks_a_file_is_skipped_and_the_file_named(
    tmp_path: Path, file: str
) -> None:
    """User case pub_049."""
    folder = three_checkpoints(tmp_path)
    (folder / "step-00000030" / file).unlink()
    found, warnings = newest_complete(tmp_path)
    assert found == folder / "step-00000020"
    assert len(warnings) == 1
    assert "step-00000030" in warnings[0] and file in warnings[0] and "missing" in warnings[0]
    assert state(found)["position"] == 140
    ours = wanted(make_tensors(20))
    load(found, ours)
    assert_same_bytes(ours, make_tensors(20))


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_with_a_shortened_file_is_skipped_and_the_file_named(
    tmp_path: Path, file: str
) -> None:
    folder = three_checkpoints(tmp_path)
    path = folder / "step-00000030" / file
    path.write_bytes(path.read_bytes()[:-1])
    found, warnings = newest_complete(folder)
    assert found == folder / "step-00000020"
    assert file in warnings[0]


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_with_a_changed_byte_is_skipped_on_all_ranks_and_the_file_named(
    tmp_path: Path, file: str
) -> None:
    folder = three_checkpoints(tmp_path)
    flip(folder / "step-00000030" / file)
    found, warnings = newest_intact(tmp_path)
    assert found == folder / "step-00000020"
    assert len(warnings) == 1 and file in warnings[0]


def test_all_ranks_agree_on_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    flip(folder / "step-00000030" / "rank-00001.safetensors")
    answers = run_ranks(3, newest_intact, tmp_path)
    assert answers[0][0] == folder / "step-00000020"
    assert answers == answers[:1] * 3


def _loads(checkpoint: Path) -> str:
    ours = wanted(make_tensors(30)) if dist.get_rank() == 0 else []
    try:
        load(checkpoint, ours)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_changed_byte_is_the_same_error_on_every_rank_that_loads(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    flip(folder / "step-00000030" / "rank-00001.safetensors")
    answers = run_ranks(2, _loads, folder / "step-00000030")
    assert answers == answers[:1] * 2
    assert "rank-00001.safetensors is damaged" in answers[0]


def test_checksums_can_be_left_out(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    flip(folder / "step-00000030" / "rank-00001.safetensors")
    load(folder / "step-00000030", wanted(make_tensors(30)), verify=False)


def test_no_complete_checkpoint_is_an_error_that_lists_them_all(tmp_path: Path) -> None:
    """User case pub_049."""
    folder = three_checkpoints(tmp_path)
    for step, file in ((10, FILES[0]), (20, FILES[3]), (30, FILES[5])):
        (folder / f"step-{step:08d}" / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_complete(tmp_path)
    text = str(caught.value)
    assert all(f"step-{step:08d}" in text for step in (10, 20, 30))
    assert all(file in text for file in (FILES[0], FILES[3], FILES[5]))
    assert "never silently starts from zero" in text
    with pytest.raises(CheckpointError):
        newest_intact(tmp_path)


def test_a_run_that_never_saved_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == (None, [])
    assert newest_complete(tmp_path / "nothing here") == (None, [])
    (tmp_path / "checkpoints" / "step-00000010.tmp-00ff").mkdir(parents=True)
    found, warnings = newest_complete(tmp_path)
    assert found is None
    assert warnings == ["step-00000010.tmp-00ff is an interrupted save and is not used"]


def test_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 99999999, 100000000, 9)
    assert newest_complete(tmp_path)[0] == tmp_path / "step-100000000"


def test_a_checkpoint_of_a_later_format_is_refused_by_its_version(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    mark = folder / "step-00000030" / "complete.json"
    later = SCHEMA_VERSION + 1
    mark.write_text(
        mark.read_text().replace(
            f'"schema_version": {SCHEMA_VERSION}', f'"schema_version": {later}'
        )
    )
    found, warnings = newest_complete(tmp_path)
    assert found == folder / "step-00000020"
    assert f"schema_version {later}" in warnings[0]


def test_a_path_may_be_a_checkpoint_or_a_run_folder(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    assert resolve(folder / "step-00000010") == (folder / "step-00000010", [])
    found, said = resolve(tmp_path)
    assert found == folder / "step-00000030"
    assert "step-00000030" in said[0]
    copied = tmp_path / "copied elsewhere"
    shutil.copytree(folder / "step-00000020", copied)
    assert resolve(copied)[0] == copied


def test_a_named_checkpoint_that_is_incomplete_is_refused_with_the_file(tmp_path: Path) -> None:
    folder = three_checkpoints(tmp_path)
    (folder / "step-00000020" / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is missing"):
        resolve(folder / "step-00000020")


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no folder"):
        resolve(tmp_path / "absent")
