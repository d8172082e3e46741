"""Weights to start from, without what an optimizer keeps: of a checkpoint, or from the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from triptych.checkpoint import folder as names
from triptych.checkpoint.hf import load_hf
from triptych.checkpoint.read import load
from triptych.runtime.shard import Shard

KINDS = ("weight",)


def load_weights(
    directory: Path, shards: Sequence[Shard], group: dist.ProcessGroup | None = None
) -> None:
    """Every weight and master shard has the values of a checkpoint or a Hugging Face directory.

    Collective over `group`. Of a checkpoint only the files with weights are read. Raises
    CheckpointError as `load` and `load_hf` do.
    """
    if not (directory / names.MARK).is_file():
        load_hf(directory, shards, group)
        return
    wanted = [shard for shard in shards if shard.kind in ("weight", "master")]
    load(directory, wanted, group, kinds=KINDS)
