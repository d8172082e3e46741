"""Saving and loading a sharded state, and what a save costs the training, against torch's own.

State: fp32 weights and both moments of a stack of matrices, cut along their first dimension over
the ranks, `--mib` in all. Peer: `torch.distributed.checkpoint` on the same tensors as DTensors,
with its file writer as it comes (one thread, files synced). Both write to the same folder of the
same disk, in turns; what counts is the wall time of the slowest rank, from a barrier on. Ours
writes and, when it loads, compares checksums; the peer has none. Loading reads what has just been
written, from the cache of the file system; `--cold` empties it before each load (as root).

The stall is the time for which an asynchronous save keeps its caller: ours copies into buffers that
it keeps, the peer is `async_save`; `save_stall.py` sets ours against the steps of a training run.

    python benchmarks/checkpoint_speed.py [--mib 1024] [--ranks 4] [--pairs 3] [--cold] [--json]
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sides.options import read_options
from sides.ranks import on_ranks
from sides.rows import ratio_row, show
from triptych.checkpoint import read, write
from triptych.checkpoint.background import Background
from triptych.checkpoint.snapshot import Snapshots
from triptych.runtime.shard import Shard as OurShard

COLUMNS = 1024
KINDS = ("weight", "exp_avg", "exp_avg_sq")
MATRICES = 24
FILE_NAMES = ("save", "load", "stall")

Tensors = dict[tuple[str, str], torch.Tensor]


class Side:
    """One way to save and load: a state of local slices."""

    def __init__(self, mib: int, ranks: int) -> None:
        self.rank, self.ranks = dist.get_rank(), ranks
        rows = mib * (1 << 20) // (4 * COLUMNS * len(KINDS) * MATRICES * ranks)
        self.rows = rows
        torch.manual_seed(self.rank)
        self.local: Tensors = {
            (kind, f"model.layers.{i}.mlp.weight"): torch.randn(rows, COLUMNS)
            for kind in KINDS
            for i in range(MATRICES)
        }

    def clear(self) -> None:
        """Forgets the values."""
        for tensor in self.local.values():
            tensor.zero_()


class Ours(Side):
    """Triptych's checkpoints."""

    def __init__(self, mib: int, ranks: int) -> None:
        super().__init__(mib, ranks)
        box = ((self.rank * self.rows, (self.rank + 1) * self.rows), (0, COLUMNS))
        shape = (ranks * self.rows, COLUMNS)
        self.shards = [
            OurShard(kind=kind, name=name, shape=shape, box=box, tensor=tensor, saved=True)
            for (kind, name), tensor in self.local.items()
        ]
        self.group = dist.new_group(backend="gloo")
        self.snapshots = Snapshots()
        self.background: Background[Path] = Background("save")

    def save(self, folder: Path) -> None:
        """Saves and waits."""
        write.save(folder, 1, self.shards, {}, keep_last=1)

    def load(self, folder: Path) -> None:
        """Loads in place."""
        read.load(folder / "step-00000001", self.shards)

    def begin(self, folder: Path) -> None:
        """Begins a save beside the caller."""
        shards = self.snapshots.take(self.shards).shards
        self.background.start(partial(write.save, folder, 1, shards, {}, self.group))

    def finish(self) -> None:
        """Waits for it."""
        self.background.outcome()


class Theirs(Side):
    """torch.distributed.checkpoint."""

    def __init__(self, mib: int, ranks: int) -> None:
        super().__init__(mib, ranks)
        mesh = init_device_mesh("cpu", (ranks,))
        self.state: dict[str, Any] = {
            f"{kind}.{name}": DTensor.from_local(tensor, mesh, [Shard(0)])
            for (kind, name), tensor in self.local.items()
        }
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def save(self, folder: Path) -> None:
        """Saves and waits."""
        dcp.save(self.state, checkpoint_id=folder / "dcp")

    def load(self, folder: Path) -> None:
        """Loads in place."""
        dcp.load(self.state, checkpoint_id=folder / "dcp")

    def begin(self, folder: Path) -> None:
        """Begins a save beside the caller."""
        self.future = dcp.async_save(
            self.state, checkpoint_id=folder / "dcp", process_group=self.group
        )

    def finish(self) -> None:
        """Waits for it."""
        self.future.result()


def slowest_s(work: Callable[[], None]) -> float:
    """Wall seconds of the slowest rank from a barrier on."""
    dist.barrier()
    begun_s = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - begun_s)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def measure(side: Side, folder: Path, cold: bool) -> dict[str, float]:
    """Seconds of a save, a load and the stall of an asynchronous save, checked."""
    before = {key: tensor.clone() for key, tensor in side.local.items()}
    found = {"save": slowest_s(partial(side.save, folder))}
    side.clear()
    if cold and side.rank == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    found["load"] = slowest_s(partial(side.load, folder))
    assert all(tensor.equal(before[key]) for key, tensor in side.local.items())
    found["stall"] = slowest_s(partial(side.begin, folder / "beside"))
    side.finish()
    dist.barrier()
    if side.rank == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return found


def on_rank(folder: Path, mib: int, ranks: int, pairs: int, cold: bool) -> list[Any]:
    """Pairs of measurements, each side first in turn; the first pair warms up and is dropped."""
    warnings.simplefilter("ignore")  # the peer's
    sides: list[Side] = [Ours(mib, ranks), Theirs(mib, ranks)]
    found = []
    for pair in range(pairs + 1):
        order = sides[:: -1 if pair % 2 else 1]
        by_side = {type(side): measure(side, folder / str(pair), cold) for side in order}
        found.append((by_side[Ours], by_side[Theirs]))
    return found[1:]


def main() -> None:
    options = read_options(__doc__, ["cold"], mib=1024, ranks=4, pairs=3)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        work = partial(
            on_rank, Path(folder), options.mib, options.ranks, options.pairs, options.cold
        )
        found = on_ranks(options.ranks, work)[0]
    rows = []
    for what in FILE_NAMES:
        pairs = [(ours[what], theirs[what]) for ours, theirs in found]
        peer = "async_save" if what == "stall" else f"torch.distributed.checkpoint {what}"
        rows.append(ratio_row(f"{what} of {options.mib} MiB", peer, "wall s", pairs))
    show(rows, options.json)


if __name__ == "__main__":
    main()
