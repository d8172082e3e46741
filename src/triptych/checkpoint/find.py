"""Which checkpoint to read: the newest one that is all there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch.distributed as dist

from triptych.checkpoint import folder as names
from triptych.checkpoint.together import Ranks
from triptych.errors import CheckpointError, Problem

RUN_SUBFOLDER = "checkpoints"


def newest_complete(
    folder: Path, kinds: Collection[str] | None = None
) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run folder (or of its folder of checkpoints).

    Returns None if no checkpoint was ever completed, and one warning for each newer one that was
    skipped, naming the file at fault. Sizes are compared and small files read, tensors are not
    (`newest_intact` does). Files that hold no tensor of `kinds`, if given, may be missing.

    Raises CheckpointError if there are checkpoints but none is complete.
    """
    return _search(*_candidates(folder), partial(_incomplete, kinds=kinds))


def newest_intact(
    folder: Path,
    group: dist.ProcessGroup | None = None,
    kinds: Collection[str] | None = None,
) -> tuple[Path | None, list[str]]:
    """As `newest_complete`, but a checkpoint with a wrong checksum is skipped too: for resuming.

    Collective over `group`: the ranks share the reading of the files, and agree on the result.
    Files that hold no tensor of `kinds`, if given, may be missing or damaged.
    """
    ranks = Ranks(group)
    paths, warnings = ranks.on_first(lambda: _candidates(folder))
    return _search(paths, warnings, partial(_damaged, ranks=ranks, kinds=kinds))


def resolve(path: Path) -> tuple[Path, list[str]]:
    """The complete checkpoint that a path means, and what must be said aloud about the choice.

    A path is a checkpoint, or a run folder (its newest complete one is used). Raises
    CheckpointError if there is none, naming the file at fault.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if (path / names.MARK).is_file() or (path / names.INDEX).is_file():
        fault = names.fault(path)
        if fault is not None:
            raise CheckpointError(Problem(fault, "a checkpoint is used only if it is complete"))
        return path, []
    found, notes = newest_complete(path)
    if found is None:
        works = "a folder step-NNNNNNNN, or the run folder that holds checkpoints/"
        raise CheckpointError(Problem(f"{path} holds no checkpoint", works=works))
    return found, [*notes, f"using {found}, the newest complete checkpoint of {path}"]


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints by name, newest first; a warning for each interrupted save."""
    inner = folder / RUN_SUBFOLDER
    folder = inner if inner.is_dir() else folder
    if not folder.is_dir():
        return [], []
    paths = [path for _, path in names.checkpoints(folder)]
    left = [path.name for path in names.unfinished(folder)]
    return paths, [f"{name} is an interrupted save and is not used" for name in left]


def _search(
    paths: list[Path], warnings: list[str], faults_of: Callable[[Path], list[str]]
) -> tuple[Path | None, list[str]]:
    skipped: list[str] = []
    for path in paths:
        faults = faults_of(path)
        if not faults:
            return path, warnings + skipped
        skipped.append(f"checkpoint {path.name} is skipped: {'; '.join(faults)}")
    if skipped:
        works = "restore the named files, or start anew in another run folder"
        rule = "none of the checkpoints is complete, and a run never silently starts from zero"
        problems = [Problem(text) for text in skipped[:-1]] + [Problem(skipped[-1], rule, works)]
        raise CheckpointError(problems)
    return None, warnings


def _incomplete(path: Path, kinds: Collection[str] | None = None) -> list[str]:
    fault = names.fault(path, kinds)
    return [] if fault is None else [fault]


def _damaged(path: Path, ranks: Ranks, kinds: Collection[str] | None) -> list[str]:
    faults = ranks.on_first(lambda: _incomplete(path, kinds))
    if faults:
        return faults
    index = names.read_index(path, kinds)
    found = ranks.everywhere(lambda: names.damaged_files(path, index, ranks.rank, ranks.size))
    return ranks.on_first(lambda: [fault for faults in found for fault in faults])
