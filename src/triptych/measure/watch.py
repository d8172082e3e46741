"""Timing on all ranks at once: what shares cores, memory or links is measured while shared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 3
"""Times that every point is measured, with all other points of its figure in between."""

LEAST_S = 0.03
"""Seconds of calls for one point in one round; a longer call is timed once."""

POOL_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Operands rotate through so much memory: in a training step they come from there, not a cache."""

MOST_COPIES = 64

Row = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank in the launch: ranks of a node are consecutive."""

    rank: int
    world: int
    per_node: int
    device: torch.device

    @property
    def nodes(self) -> int:
        """Nodes of the launch."""
        return self.world // self.per_node


class Watch:
    """Measures calls on the ranks of a launch, in step."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.device = place.device

    def now_s(self) -> float:
        """The time when everything that was issued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def together(self) -> None:
        """Returns when all ranks are here."""
        if self.place.world > 1:
            dist.barrier()

    def seconds(
        self,
        call: Callable[[], object],
        count: int = 0,
        before: Callable[[], object] = lambda: None,
    ) -> float:
        """Mean seconds of `count` calls; of as many as take `LEAST_S` without one.

        A step is a sum of calls, those that the machine holds up included: so it is their mean that
        counts. `before` runs before each call and is not counted.
        """
        call()
        self.together()
        found: list[float] = []
        while len(found) < count or (not count and sum(found) < LEAST_S):
            before()
            start_s = self.now_s()
            call()
            found.append(self.now_s() - start_s)
        return statistics.fmean(found)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        found: list[float] = self._gathered(value)
        return max(found)

    def of_all(self, rows: Sequence[Row], merge: Callable[[Sequence[float]], float]) -> list[Row]:
        """Rows whose numbers are merged over the ranks; collective."""
        ranks = self._gathered([list(row) for row in rows])
        return [
            [merge(numbers) for numbers in zip(*same, strict=True)]
            for same in zip(*ranks, strict=True)
        ]

    def _gathered(self, value: Any) -> list[Any]:
        if self.place.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.place.world
        dist.all_gather_object(gathered, value)
        return gathered

    def copies(self, size_bytes: float) -> int:
        """Sets of operands of so many bytes that fill the pool."""
        wanted = POOL_BYTES[self.device.type] / max(1.0, size_bytes)
        return min(MOST_COPIES, max(1, round(wanted)))


class Pool:
    """Views into one large tensor, one behind the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device, elements: int) -> None:
        self._flat = torch.empty(elements, dtype=dtype, device=device)
        self._flat.uniform_(-1.0, 1.0)
        self._next = 0

    def take(self, *shape: int) -> torch.Tensor:
        """The next view of this shape; they begin anew at the end."""
        count = torch.Size(shape).numel()
        if self._next + count > self._flat.numel():
            self._next = 0
        view = self._flat[self._next : self._next + count].view(shape)
        self._next += count
        return view


def forth_and_back(
    watch: Watch,
    operator: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    inputs: Sequence[tuple[torch.Tensor, ...]],
) -> tuple[float, float]:
    """Seconds of an operator and of its backward, as one of a row of them in a model."""
    leaves = [[x.detach().requires_grad_(x.is_floating_point()) for x in one] for one in inputs]
    watch.together()
    start_s = watch.now_s()
    results = [operator(*one) for one in leaves]
    middle_s = watch.now_s()
    outputs = [y for one in results for y in ((one,) if isinstance(one, torch.Tensor) else one)]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    end_s = watch.now_s()
    return (middle_s - start_s) / len(inputs), (end_s - middle_s) / len(inputs)


def in_rounds(points: Sequence[Row], measured: Callable[[Row], Row]) -> tuple[list[Row], float]:
    """Each point with the median of what was measured of it, and the typical relative spread."""
    rounds = [[measured(point) for point in points] for _ in range(ROUNDS)]
    rows, spreads = [], []
    for point, found in zip(points, zip(*rounds, strict=True), strict=True):
        medians = [statistics.median(values) for values in zip(*found, strict=True)]
        rows.append([*point, *medians])
        spreads += list(_spreads(found, medians))
    return rows, statistics.median(spreads)


def _spreads(found: Sequence[Row], medians: Row) -> Iterator[float]:
    for values, median in zip(zip(*found, strict=True), medians, strict=True):
        yield (max(values) - min(values)) / 2.0 / median if median else 0.0
