"""Saving: every rank writes its shards, all or nothing, and old checkpoints rotate out."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triptych.checkpoint import folder as names
from triptych.checkpoint.attempts import Attempts, not_written
from triptych.checkpoint.files import sync_folder, write_bytes
from triptych.checkpoint.index import (
    SCHEMA_VERSION,
    FileInfo,
    Logical,
    Part,
    Stored,
    merge,
    part_key,
    plain_name,
)
from triptych.checkpoint.safe import Entry, dtype_word, write_safetensors
from triptych.checkpoint.together import Ranks
from triptych.errors import RunError
from triptych.runtime.shard import Shard

_log = logging.getLogger(__name__)


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    files: Mapping[str, bytes] | None = None,
    keep_last: int | None = None,
    protect: Collection[int] = (),
    retries: int = 0,
) -> Path:
    """A complete checkpoint of `step` is in `folder`, durable, under the returned path.

    Collective over `group` (all ranks if None; one process without torch.distributed). `folder`
    is on a file system that all ranks share. A checkpoint of the same step is replaced.

    Args:
        folder: the folder of checkpoints, `<run>/checkpoints`; made if missing.
        step: optimizer steps that the state is after; it gives the folder its name.
        shards: what this rank holds; those with `saved` are written.
        state: the training state as JSON values (data position, step, ...); that of rank 0 counts.
        group: the ranks that save together.
        files: more files by name, from rank 0: the model's config.json, tokenizer files.
        keep_last: older checkpoints beyond this many are removed; None keeps all.
        protect: steps that are never removed (the best one).
        retries: how often more than once work is tried that the file system failed.

    Raises:
        StorageError: a file could not be written (with needed and free bytes); on all ranks alike,
            nothing is left behind and older checkpoints are as they were.
        CheckpointError: the saved shards do not cover each tensor exactly once.
        RunError: anything else that failed on a rank; on all ranks alike.

    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint is always kept")
    ranks = Ranks(group)
    needed_bytes = total_bytes(shards, ranks) + sum(map(len, (files or {}).values()))
    tried = Attempts(folder=folder, needed_bytes=needed_bytes, retries=retries)
    temporary = ranks.on_first(lambda: tried(lambda: _begin(folder, step, needed_bytes)))
    try:
        written = ranks.everywhere(
            lambda: tried(lambda: write_shards(temporary, ranks.rank, shards))
        )
        stored = list(chain.from_iterable(written))
        ranks.on_first(lambda: tried(lambda: finish(temporary, step, stored, state, files or {})))
        final = ranks.on_first(lambda: tried(lambda: publish(temporary, step)))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if ranks.rank == 0 and keep_last is not None:
        rotate(folder, step, keep_last, protect)
    return final


def total_bytes(shards: Sequence[Shard], ranks: Ranks) -> int:
    """Bytes of the tensors that all ranks save together; collective."""
    of_ranks = ranks.everywhere(lambda: sum(s.tensor.nbytes for s in shards if s.saved))
    return ranks.on_first(lambda: sum(of_ranks))


def _begin(folder: Path, step: int, needed_bytes: int) -> Path:
    """A new temporary folder, if there is room; removes those of interrupted saves."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in names.unfinished(folder):
        _log.warning("removing %s, left by an interrupted save", path)
        shutil.rmtree(path, ignore_errors=True)
    if needed_bytes > shutil.disk_usage(folder).free:
        raise not_written(folder, needed_bytes, "it does not fit on the disk")
    temporary = folder / f"{names.step_name(step)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def write_shards(temporary: Path, rank: int, shards: Sequence[Shard]) -> list[Stored]:
    """Writes the files of one rank, weights apart from what optimizers keep; what is in them."""
    temporary.mkdir(exist_ok=True)  # a shared file system may show rank 0's folder late
    by_file: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.saved:
            by_file.setdefault(names.rank_file(rank, shard.kind), []).append(shard)
    return [_write_file(temporary / file, found) for file, found in by_file.items()]


def _write_file(path: Path, shards: Sequence[Shard]) -> Stored:
    tensors, parts, entries = {}, [], []
    for shard in shards:
        dtype = dtype_word(shard.tensor.dtype)
        key = part_key(shard.kind, shard.name, shard.box)
        tensors[shard.kind, shard.name] = Logical(tuple(shard.shape), dtype)
        parts.append(Part(path.name, key, shard.kind, shard.name, shard.box))
        entries.append(Entry(key, tuple(shard.tensor.shape), dtype, partial(_live, shard)))
    info = write_safetensors(path, entries, {"format": "pt"})
    return Stored(path.name, info, tensors, parts)


def _live(shard: Shard) -> torch.Tensor:
    return shard.tensor


def finish(
    temporary: Path,
    step: int,
    stored: Sequence[Stored],
    state: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> None:
    """Checks that all is there, then writes state, index and, last of all, the mark."""
    content = {**state, "schema_version": SCHEMA_VERSION, "step": step}
    text = json.dumps(content, indent=1)
    written = {
        plain_name(name): write_bytes(temporary / name, data)
        for name, data in {**files, names.STATE: text.encode()}.items()
    }
    index = merge(step, stored, written)
    for file in stored:
        _require_visible(temporary / file.file, file.info)
    info = write_bytes(temporary / names.INDEX, json.dumps(index.to_json()).encode())
    sync_folder(temporary)
    write_bytes(temporary / names.MARK, names.mark_text(step, info).encode())
    sync_folder(temporary)


def _require_visible(path: Path, info: FileInfo) -> None:
    if not path.is_file() or path.stat().st_size != info.bytes:
        raise RunError(
            f"{path} was written by its rank, but rank 0 does not see it: checkpoints must be in a "
            "folder on a file system that all nodes share"
        )


def publish(temporary: Path, step: int) -> Path:
    """Gives the folder its name. May be called again if it failed.

    A former checkpoint of this step makes way and is removed when the new one is there. A crash
    between the two renames leaves the older steps, never a mixture.
    """
    final = temporary.with_name(names.step_name(step))
    former = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    if temporary.exists():
        replaces = final.exists()
        if replaces:
            final.rename(former)
        try:
            temporary.rename(final)
        except OSError:
            if replaces:
                former.rename(final)
            raise
    sync_folder(final.parent)
    shutil.rmtree(former, ignore_errors=True)
    return final


def rotate(folder: Path, newest: int, keep_last: int, protect: Collection[int] = ()) -> list[Path]:
    """Removes what is older than the last `keep_last` checkpoints up to step `newest`.

    Touches only folders of the exact name that carry our mark. Steps above `newest` belong to
    another run: they are neither removed nor counted. A failure is logged, never raised.
    """
    own = [
        (step, path)
        for step, path in names.checkpoints(folder)
        if step <= newest and (path / names.MARK).is_file()
    ]
    removed = []
    for step, path in own[keep_last:]:
        if step not in protect and _remove(path):
            removed.append(path)
    return removed


def _remove(checkpoint: Path) -> bool:
    """Removes a checkpoint; half removed, it no longer has the name of one."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.tmp-{secrets.token_hex(4)}")
    try:
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("could not remove the old checkpoint %s: %s", checkpoint, error)
        return False
    return True
