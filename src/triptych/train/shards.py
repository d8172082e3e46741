"""A data set that becomes tokens file by file, as training comes to it.

Training starts once its first file is there; the next one is made while a file is trained on, on
one rank, the others wait for it. Each epoch goes through the files in an order of its own and
through the samples of a file in another: functions of the seed and the position alone, like the
order of a whole data set. What was made stays in the token cache, so a resumed run finds its place
by counts.

    epoch 0   | file 2: 3 0 1 2 | file 0: 1 0 | file 1: 2 1 0 | epoch 1  | file 1: ...
    position    0 1 2 3           4 5           6 7 8
"""

from __future__ import annotations

import fcntl
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from triptych.errors import DataError, Problem
from triptych.train.corpus import Corpus
from triptych.train.encode import Encoder
from triptych.train.files import DataFile, kind_of
from triptych.train.order import SampleOrder, mix
from triptych.train.samples import Row, Samples
from triptych.train.tokens import Tokens, build_tokens

_OPEN_SHARDS = 4

MakeShard = Callable[[int], Samples]


class ShardedSamples:
    """Rows of files that are made when they are needed; `ahead` also makes the next one."""

    num_whole: int | None = None
    """Not known before all files were read."""

    def __init__(self, make: MakeShard, num_shards: int, seed: int, *, ahead: bool) -> None:
        self._make, self._num_shards = make, num_shards
        self._seed, self._ahead = seed, ahead
        self._order = SampleOrder(num_shards, mix(seed ^ 0x5348))
        self._starts = [0]  # the position at which each visit of a shard begins
        self._open: OrderedDict[int, Samples] = OrderedDict()

    def row(self, index: int) -> Row:
        """The sample at a position, in the order of training."""
        while index >= self._starts[-1]:
            self._visit_next()
        visit = bisect_right(self._starts, index) - 1
        samples = self._shard(self._order.at(visit))
        size = self._starts[visit + 1] - self._starts[visit]
        inner = SampleOrder(size, mix(self._seed ^ mix(visit)))
        return samples.row(inner.at(index - self._starts[visit]))

    def _visit_next(self) -> None:
        """Learns how many samples the next shard has."""
        visit = len(self._starts) - 1
        samples = self._shard(self._order.at(visit))
        self._starts.append(self._starts[-1] + samples.num_whole)
        if visit + 1 >= self._num_shards and self._starts[-1] == 0:
            what = f"none of {self._num_shards} files has a whole sample"
            raise DataError(Problem(what, "training needs a sample", "a shorter sequence_length"))
        if self._ahead:
            following = self._order.at(visit + 1)
            threading.Thread(target=self._make_ahead, args=(following,), daemon=True).start()

    def _make_ahead(self, shard: int) -> None:
        with suppress(DataError, OSError):  # training will meet it when it comes there
            self._make(shard)

    def _shard(self, shard: int) -> Samples:
        if shard not in self._open:
            self._open[shard] = self._make(shard)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]


def first_shard(num_shards: int, seed: int) -> int:
    """The shard that training begins with."""
    return SampleOrder(num_shards, mix(seed ^ 0x5348)).at(0)


def shard_of(path: Path) -> DataFile:
    """A file known by its name, size and time: its content is read once, when it becomes tokens."""
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [part.stat() for part in parts]
    marks = [f"{part} {s.st_size} {s.st_mtime_ns}" for part, s in zip(parts, stats, strict=True)]
    size_bytes = sum(s.st_size for s in stats)
    return DataFile(path=path, kind=kind_of(path), size_bytes=size_bytes, digest=" ".join(marks))


def shard_tokens(folder: Path, corpus: Corpus, encoder: Encoder) -> Tokens:
    """The tokens of one file, made by whoever comes first; the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{corpus.digest[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return build_tokens(folder, corpus, encoder)
        except UnicodeDecodeError:
            raise DataError(f"{corpus.files[0].path} is not UTF-8 text") from None


def digest_of(files: Sequence[Path]) -> str:
    """What identifies the files of a data set."""
    return "\n".join(shard_of(path).digest for path in files)
