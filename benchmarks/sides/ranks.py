"""Ranks of a benchmark, forked from this process, which has imported torch once."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TIMEOUT = datetime.timedelta(minutes=20)
"""A peer may compile first."""


def on_ranks(world: int, function: Callable[[], Any]) -> list[Any]:
    """The result of `function` on each of `world` gloo ranks."""

    def join(rank: int, folder: Path) -> None:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)

    return fork(range(world), join, function)


def on_fake_rank(world: int, rank: int, function: Callable[[], Any]) -> Any:
    """The result of `function` on one of `world` ranks whose collectives do nothing at all.

    Nothing travels, so what is received is arbitrary, and so are losses. Plain receives give ones:
    `pipelining` votes with them, once, whether all shapes are known.
    """

    def join(rank: int, folder: Path) -> None:
        torch.set_flush_denormal(True)  # arbitrary numbers must not slow one side down
        setattr(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1))  # noqa: B010
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    return fork([rank], join, function)[0]


def fork(ranks: Any, join: Callable[[int, Path], None], function: Callable[[], Any]) -> list[Any]:
    """The result of `function` on processes that first `join`, by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = {}
        for rank in ranks:
            child = os.fork()
            if child == 0:
                _be(rank, folder, join, function)
            children[rank] = child
        ends = {rank: os.waitpid(child, 0)[1] for rank, child in children.items()}
        if any(ends.values()):
            raise RuntimeError(f"ranks ended with {ends}; see above")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in ranks]


def _be(
    rank: int, folder: Path, join: Callable[[int, Path], None], function: Callable[[], Any]
) -> None:
    """The life of a rank. What peers print goes to stderr: stdout is for the answer."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    try:
        join(rank, folder)
        (folder / str(rank)).write_bytes(pickle.dumps(function()))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
