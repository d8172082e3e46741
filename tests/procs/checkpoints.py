"""Checkpoints of runs taken apart for tests: what is in them, and damaged ones that look whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from triptych.checkpoint.folder import INDEX, MARK, STATE, step_name
from triptych.checkpoint.index import parse_index
from triptych.checkpoint.read import load
from triptych.checkpoint.safe import TORCH_DTYPES
from triptych.checkpoint.write import save
from triptych.runtime.shard import Shard

Tensors = Mapping[tuple[str, str], torch.Tensor]


def step_folder(run: Path, step: int) -> Path:
    """The checkpoint of a step in a run folder."""
    return run / "checkpoints" / step_name(step)


def keep_only(run: Path, step: int) -> None:
    """The run looks as if it had stopped soon after a step."""
    for path in (run / "checkpoints").iterdir():
        if path != step_folder(run, step):
            shutil.rmtree(path)


def whole_tensors(checkpoint: Path) -> Tensors:
    """All logical tensors of a checkpoint, by kind and name."""
    index = parse_index((checkpoint / INDEX).read_text(), str(checkpoint))
    shards = [
        _shard(kind, name, torch.empty(found.shape, dtype=TORCH_DTYPES[found.dtype]))
        for (kind, name), found in index.tensors.items()
    ]
    load(checkpoint, shards)
    return {(shard.kind, shard.name): shard.tensor for shard in shards}


def rewrite(checkpoint: Path, tensors: Tensors) -> None:
    """The checkpoint is complete and has these tensors instead of its own."""
    ours = {INDEX, MARK, STATE}
    files = {
        path.name: path.read_bytes()
        for path in checkpoint.iterdir()
        if path.name not in ours and path.suffix != ".safetensors"
    }
    state = json.loads((checkpoint / STATE).read_text())
    shards = [_shard(kind, name, tensor) for (kind, name), tensor in tensors.items()]
    save(checkpoint.parent, state["step"], shards, state, files=files)


def _shard(kind: str, name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    box = tuple((0, size) for size in shape)
    return Shard(kind=kind, name=name, shape=shape, box=box, tensor=tensor, saved=True)
