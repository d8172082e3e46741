"""Loading: fills every shard of this rank's layout from whatever layout was saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triptych.checkpoint import folder as names
from triptych.checkpoint.index import Id, Index
from triptych.checkpoint.match import require_match
from triptych.checkpoint.safe import Reader, dtype_word
from triptych.checkpoint.together import Ranks
from triptych.errors import CheckpointError, Problem
from triptych.plan.fused import Place
from triptych.plan.reshard import copies
from triptych.runtime.shard import Shard


class _Read(NamedTuple):
    """One slice to read, and where it goes."""

    file: str
    key: str
    at: tuple[slice, ...]
    into: torch.Tensor
    place: Place | None = None


def load(
    checkpoint: Path,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None = None,
    *,
    verify: bool = True,
    kinds: Collection[str] | None = None,
) -> None:
    """Every shard's tensor has the stored values, converted to its dtype.

    Collective over `group`, as `save`. Reads only the slices that this rank holds. `master` comes
    from `weight` if no master was stored, and `weight` from `master` if that is more exact.

    Args:
        checkpoint: the folder of one checkpoint.
        shards: all that this rank wants (weights alone for inference).
        group: the ranks that load together.
        verify: compare the checksums of the files first; the ranks share the reading.
        kinds: read tensors of these kinds only, from the files that hold them; the others may be
            gone. None: of all kinds.

    Raises:
        CheckpointError: files missing or damaged; tensors missing, unknown or of another shape, all
            named; then no tensor has changed. The same on all ranks.

    """
    ranks = Ranks(group)
    index = ranks.on_first(lambda: complete_index(checkpoint, kinds))
    if verify:
        found = ranks.everywhere(
            lambda: names.damaged_files(checkpoint, index, ranks.rank, ranks.size)
        )
        ranks.on_first(lambda: require_undamaged([text for faults in found for text in faults]))
    fill(checkpoint, index, shards, ranks)


def state(checkpoint: Path) -> dict[str, Any]:
    """The training state of a checkpoint, as it was given to `save`, and its `step`."""
    return names.read_json(checkpoint / names.STATE)


def complete_index(checkpoint: Path, kinds: Collection[str] | None = None) -> Index:
    """The index of a checkpoint that is complete, as far as it holds `kinds`.

    Raises CheckpointError naming the file at fault.
    """
    fault = names.fault(checkpoint, kinds)
    if fault is not None:
        raise CheckpointError(fault)
    return names.read_index(checkpoint, kinds)


def require_undamaged(faults: Sequence[str]) -> None:
    """Raises CheckpointError with what is wrong with the files, if anything is."""
    if faults:
        raise CheckpointError([Problem(text) for text in faults])


def fill(
    folder: Path,
    index: Index,
    shards: Sequence[Shard],
    ranks: Ranks,
    optional: Collection[Id] = (),
) -> None:
    """Checks that model and index have the same tensors, then reads this rank's slices."""
    wanted = {(shard.kind, shard.name): tuple(shard.shape) for shard in shards}
    gathered = ranks.everywhere(lambda: wanted)
    ranks.on_first(
        lambda: require_match(
            str(folder), index, {k: v for rank in gathered for k, v in rank.items()}, optional
        )
    )
    ranks.everywhere(lambda: copy_into(folder, index, shards))


def copy_into(folder: Path, index: Index, shards: Sequence[Shard]) -> None:
    """Reads the slices of `shards`, file by file; first makes sure that all of them are stored."""
    with Reader(folder) as reader:
        read_into(reader, index, shards)


def read_into(reader: Reader, index: Index, shards: Sequence[Shard]) -> None:
    """As `copy_into`, through files that are already open."""
    reads = [read for shard in shards for read in _reads(index, shard)]
    with torch.no_grad():
        for read in sorted(reads, key=lambda read: read.file):
            if read.place is None:
                reader.read_into(read.file, read.key, read.at, read.into)
            else:
                found = reader.read(read.file, read.key, read.at)
                read.into.copy_(read.place.logical(found))


def _reads(index: Index, shard: Shard) -> list[_Read]:
    kind = source_kind(index, shard.kind, shard.name, shard.tensor.dtype)
    stored = [((part.file, part.key), part.box) for part in index.parts.get((kind, shard.name), ())]
    try:
        found = copies(stored, shard.box)
    except LookupError as error:
        raise CheckpointError(f"{kind}/{shard.name}: {error}") from error
    place = index.places.get((kind, shard.name))
    return [
        _Read(
            *c.source,
            c.source_slices if place is None else place.slices(c.source_slices),
            shard.tensor[c.target_slices],
            place,
        )
        for c in found
    ]


def source_kind(index: Index, kind: str, name: str, dtype: torch.dtype) -> str:
    """The stored kind that a wanted kind is read from.

    A weight comes from the master copy unless it is stored in the wanted dtype itself.
    """
    weight, master = index.tensors.get(("weight", name)), index.tensors.get(("master", name))
    if kind == "master" and master is None:
        return "weight"
    if kind == "weight" and master is not None:
        exact = weight is not None and weight.dtype == dtype_word(dtype)
        return "weight" if exact else "master"
    return kind
