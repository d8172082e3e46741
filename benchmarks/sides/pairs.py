"""Our plans, each beside the peer that does the same work.

Sharded modes stand beside the mode of FSDP2 with the same traffic: ZeRO-2 and FSDP2 that keeps
parameters from forward to backward, ZeRO-3 and FSDP2 that does not; gradients scattered in each
micro-batch, or whole until the last one (`reduce_last`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from sides.deep_speed import VERSION, deep_speed
from sides.ours import ours
from sides.replicas import ddp, fsdp2, zero_redundancy
from sides.setting import Setting, Trainer
from sides.stages import pipelining
from sides.tensors import dtensor

Make = Callable[..., Trainer]


class Pair(NamedTuple):
    """Two ways to do the same steps."""

    name: str
    ours: Make
    peer: str
    theirs: Make

    @property
    def is_pipeline(self) -> bool:
        """True if ranks hold other layers, and every rank sees every sequence."""
        return self.peer.startswith("pipelining")

    @property
    def needs_deep_speed(self) -> bool:
        """True if it runs in an environment of its own."""
        return self.peer.startswith("DeepSpeed")

    @property
    def peer_version(self) -> str:
        """The peer as it stands in the table."""
        version = VERSION if self.needs_deep_speed else f"torch {torch.__version__}"
        return f"{self.peer} ({version})"

    def setting(self, ranks: int, **changes: Any) -> Setting:
        """Two micro-batches a replica; eight for a pipeline, four under tensor parallelism."""
        if self.is_pipeline:
            return Setting(ranks=ranks, sequences=8, microbatch=1, **changes)
        sequences = 8 if self.peer.startswith("DTensor") else 4 * ranks
        return Setting(ranks=ranks, sequences=sequences, microbatch=2, **changes)


def _ours(**plan: Any) -> Make:
    return partial(ours, **plan)


def _fsdp2(reshard: bool, each: bool) -> Make:
    return partial(fsdp2, reshard=reshard, each=each)


def _tensor(setting: Setting, **plan: Any) -> Trainer:
    return ours(setting, tp=setting.ranks, sequence_parallel=True, **plan)


def _staged(setting: Setting, schedule: str, chunks: int, **plan: Any) -> Trainer:
    return ours(setting, pp=setting.ranks, schedule=schedule, chunks=chunks, **plan)


def _pipeline(schedule: str, chunks: int) -> Pair:
    make = partial(_staged, schedule=schedule, chunks=chunks)
    peer = f"pipelining {schedule}"
    return Pair(f"PP {schedule}", make, peer, partial(pipelining, schedule=schedule))


LAST = "reduce_last"

PAIRS: tuple[Pair, ...] = (
    Pair("ZeRO-0", _ours(zero=0), "DDP", ddp),
    Pair("ZeRO-1", _ours(zero=1), "DDP", ddp),
    Pair("ZeRO-1", _ours(zero=1), "DDP + ZeroRedundancyOptimizer", zero_redundancy),
    Pair("ZeRO-2", _ours(zero=2), "FSDP2, kept after forward", _fsdp2(False, True)),
    Pair(
        "ZeRO-2 reduce_last",
        _ours(zero=2, accumulation=LAST),
        "FSDP2, kept, no_sync",
        _fsdp2(False, False),
    ),
    Pair("ZeRO-3", _ours(zero=3), "FSDP2, resharded", _fsdp2(True, True)),
    Pair(
        "ZeRO-3 reduce_last",
        _ours(zero=3, accumulation=LAST),
        "FSDP2, resharded, no_sync",
        _fsdp2(True, False),
    ),
    Pair("TP + SP", _tensor, "DTensor TP + SP + loss-parallel", dtensor),
    _pipeline("1f1b", 1),
    _pipeline("interleaved", 2),
    _pipeline("zb-v", 2),
    *(
        Pair(
            f"ZeRO-{stage}",
            _ours(zero=stage),
            f"DeepSpeed stage {stage}",
            partial(deep_speed, stage=stage),
        )
        for stage in (1, 2, 3)
    ),
)
"""Ours, and the peer that does the same work."""


def compiled_pairs(only: str) -> list[Pair]:
    """The same with our layers compiled: beside the peer whose layers are compiled too, where it
    can do that, and beside the peer as it is.
    """
    pairs = []
    for pair in chosen(only):
        ours = partial(pair.ours, compile=True)
        name = f"{pair.name} compiled"
        if pair.peer.startswith(_COMPILES):
            theirs = partial(pair.theirs, compiled=True)
            pairs.append(Pair(name, ours, f"{pair.peer}, compiled", theirs))
        pairs.append(Pair(name, ours, f"{pair.peer}, not compiled", pair.theirs))
    return pairs


_COMPILES = ("FSDP2", "pipelining 1f1b", "pipelining interleaved")
"""The split backward of `pipelining zb-v` takes graphs of autograd apart: compiled ones have none.
"""


def chosen(only: str) -> list[Pair]:
    """The pairs with `only` in their name or their peer's."""
    return [pair for pair in PAIRS if only in f"{pair.name} / {pair.peer}"]
