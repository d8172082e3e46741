"""Strict communication: what NCCL would not forgive, made visible on CPU.

gloo buffers sends and finishes work by the wait; NCCL does neither. Under this communicator

* an output is NaN until its `wait`, and an input that is written before the wait is an error;
* buffers that the layer gives back are filled with NaN;
* a send ends only with its receive (the receiver acknowledges);
* the ranks of a group compare the order of their calls: operation, shape and dtype.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from triptych.errors import RunError
from triptych.runtime.comm import Communicator

_ACK = 1
"""Tag of acknowledgements, apart from the data that may travel the other way."""


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with NaN (with the smallest number if it has none)."""
    with torch.no_grad():
        worst = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        tensor.fill_(worst)


class _Call:
    """One strict call: waits for the works, then checks its input and reveals its output."""

    def __init__(
        self,
        works: list[Any],
        source: torch.Tensor | None,
        private: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._works, self._source, self._private, self._out = works, source, private, out
        self._before = None if source is None else source.clone()

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._source is not None and self._before is not None:
            same = torch.equal(_bits(self._source), _bits(self._before))
            if not same:
                raise RunError("a communication buffer was written before its wait")
        if self._out is not None and self._private is not None:
            with torch.no_grad():
                self._out.copy_(self._private)
            poison(self._private)


class _Receive(_Call):
    """A receive that tells the sender when its data has been taken."""

    def __init__(self, work: Any, private: torch.Tensor, out: torch.Tensor, ack: Any) -> None:
        super().__init__([work], None, private, out)
        self._ack = ack

    def wait(self) -> None:
        super().wait()
        self._ack()


def _if_on(strict: Callable[..., Any]) -> Callable[..., Any]:
    """The plain launch of the same name while strictness is off."""
    plain = getattr(Communicator, strict.__name__)

    @functools.wraps(strict)
    def launch(self: StrictCommunicator, *args: Any) -> Any:
        return (strict if self.is_on else plain)(self, *args)

    return launch


class StrictCommunicator(Communicator):
    """A communicator that behaves as badly as NCCL may. For tests: it is slow.

    `is_on` may change between steps, on all ranks of a process group alike.
    """

    is_on: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._acks: deque[Any] = deque(maxlen=256)  # a send that is forgotten may never leave

    @_if_on
    def _launch_all_reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        self._compare("all_reduce", tensor)
        private = tensor.clone()
        poison(tensor)
        return _Call([super()._launch_all_reduce(private, op)], None, private, tensor)

    @_if_on
    def _launch_all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        self._compare("all_gather", tensor)
        source, private = tensor.clone(), torch.empty_like(out)
        overlaps = _overlap(out, tensor)
        poison(out)
        work = super()._launch_all_gather(private, source)
        return _Call([work], None if overlaps else tensor, private, out)

    @_if_on
    def _launch_all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        self._compare("all_to_all", tensor)
        source, private = tensor.clone(), torch.empty_like(out)
        poison(out)
        return _Call([super()._launch_all_to_all(private, source)], tensor, private, out)

    @_if_on
    def _launch_uneven_all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, arriving: list[int], sent: list[int]
    ) -> Any:
        self._compare("all_to_all", tensor[:0])
        self._compare_sizes(sent, arriving)
        source, private = tensor.clone(), torch.empty_like(out)
        poison(out)
        work = super()._launch_uneven_all_to_all(private, source, arriving, sent)
        return _Call([work], tensor, private, out)

    @_if_on
    def _launch_send(self, tensor: torch.Tensor, rank: int) -> Any:
        ack = dist.irecv(torch.zeros(1), rank, group=self._group, tag=_ACK)
        return _Call([super()._launch_send(tensor.clone(), rank), ack], tensor)

    @_if_on
    def _launch_receive(self, out: torch.Tensor, rank: int) -> Any:
        private = torch.empty_like(out)
        poison(out)
        work = super()._launch_receive(private, rank)

        def acknowledge() -> None:
            self._acks.append(dist.isend(torch.ones(1), rank, group=self._group, tag=_ACK))

        return _Receive(work, private, out, acknowledge)

    @_if_on
    def _launch_batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> list[Any]:
        works = [self._launch_receive(out, rank) for out, rank in receives]
        return works + [self._launch_send(tensor, rank) for tensor, rank in sends]

    def _compare(self, operation: str, tensor: torch.Tensor) -> None:
        """Raises RunError unless every rank of the group makes this very call now."""
        text = f"{operation} {tuple(tensor.shape)} {tensor.dtype}"
        mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64)
        seen = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(seen, mine, group=self._group)
        others = [rank for rank, code in zip(self.ranks, seen, strict=True) if code != mine]
        if others:
            raise RunError(
                f"{self.axis} axis: rank {self.ranks[self.index]} calls {text}, "
                f"ranks {others} call something else at this point"
            )

    def _compare_sizes(self, sent: list[int], arriving: list[int]) -> None:
        """Raises RunError unless every rank expects what the others send it."""
        seen = [torch.empty(self.size, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(seen, torch.tensor(sent), group=self._group)
        coming = [int(row[self.index]) for row in seen]
        if coming != arriving:
            raise RunError(
                f"{self.axis} axis: rank {self.ranks[self.index]} expects {arriving} rows from "
                f"ranks {list(self.ranks)}, which send {coming}"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
