"""The one layer between Triptych and `torch.distributed`: a communicator per mesh axis.

It knows its axis, counts calls, bytes and seconds, holds every buffer until its wait, and hides
what differs between back ends and torch releases:

* gloo's reduce-scatter moves all-reduce bytes: an all-to-all and a local sum move half of them. For
  large messages plain sends and receives, into place where that is possible, cost half the
  processor time of gloo's all-to-all and all-gather. NCCL uses its own collectives.
* torch 2.13 renames `reduce_scatter_tensor` and `all_gather_into_tensor`.

A group carries CUDA tensors over NCCL and CPU tensors over gloo, so small numbers that the host
needs (token counts) never wait for the device.

`wait()` means "the result may be used by what is issued next", never "the host may go on as if it
were done": that is all that NCCL promises. Under strict mode (`strict.py`) the tests see that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


def _either(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed under its new name, or its old one before torch 2.13."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


_all_gather = _either("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")

_DIRECT_BYTES = 1 << 20
"""On gloo, reduce-scatters and all-gathers from this size on go rank to rank."""


@dataclass(slots=True)
class Count:
    """What this rank has sent along one axis since the last reset, and how long it waited."""

    calls: int = 0
    bytes_sent: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class Counters:
    """Calls, bytes and seconds by mesh axis."""

    by_axis: dict[str, Count] = field(default_factory=dict)

    def axis(self, name: str) -> Count:
        """The count of one axis, made on first use."""
        return self.by_axis.setdefault(name, Count())

    def reset(self) -> None:
        """Starts counting anew (once a step)."""
        for count in self.by_axis.values():
            count.calls, count.bytes_sent, count.wait_s = 0, 0, 0.0


class Pending:
    """A communication under way. Buffers stay referenced until `wait`, which returns the result."""

    __slots__ = ("_buffers", "_count", "_finish", "_result", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        result: torch.Tensor,
        count: Count,
        finish: Callable[[], object] | None = None,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        self._works: Sequence[Any] | None = works
        self._result = result
        self._count = count
        self._finish = finish
        self._buffers: Sequence[torch.Tensor] = buffers

    def wait(self) -> torch.Tensor:
        """Orders what follows after the communication and returns its result."""
        if self._works is not None:
            began_s = time.perf_counter()
            for work in self._works:
                if work is not None:
                    work.wait()
            self._works = None
            if self._finish is not None:
                self._finish()
            self._buffers = ()
            self._count.wait_s += time.perf_counter() - began_s
        return self._result


class _Scratch:
    """Flat buffers that are used again: fresh large ones cost page faults at every call.

    There are never more than were in use at one time.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        """At least so many elements, with the type and device of `like` and arbitrary content."""
        free = self._free.setdefault(like.dtype, [])
        free.sort(key=torch.Tensor.numel)
        for place, buffer in enumerate(free):
            if buffer.numel() >= elements:
                return free.pop(place)
        if free:
            free.pop()  # a larger one comes in its place
        return like.new_empty(elements)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back."""
        self._free[buffer.dtype].append(buffer)


class Communicator:
    """The collectives of one process group along one mesh axis. A group of one moves nothing.

    Args:
        axis: name under which bytes are counted (tensor, data, pipeline, ...).
        ranks: global ranks of the group, in axis order.
        index: this rank's place among them.
        group: the process group; None only for a group of one.

    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        index: int,
        group: dist.ProcessGroup | None,
        counters: Counters,
    ) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.index = index
        self.size = len(self.ranks)
        self._group = group
        self._count = counters.axis(axis)
        self._scratch = _Scratch()
        self._exchanges: list[Pending] = []
        self._is_gloo = group is None or dist.get_backend(group) == "gloo"
        self.number = -1  # what compiled code calls it, if it does

    # ---- collectives -------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        """Sums (or takes the maximum of) `tensor` over the group, in place.

        Cost: 2 (n-1)/n of its bytes sent per rank.
        """
        return self.start_all_reduce(tensor, maximum).wait()

    def start_all_reduce(
        self,
        tensor: torch.Tensor,
        maximum: bool = False,
        finish: Callable[[], object] | None = None,
    ) -> Pending:
        """As `all_reduce`, under way until `wait`, which ends with `finish`."""
        if self.size == 1:
            return Pending((), tensor, self._count, finish)
        self._counted(2 * (self.size - 1) / self.size * tensor.nbytes)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._pending([self._launch_all_reduce(tensor, op)], tensor, finish)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's 1/n of the sum of `tensor` over the group (along dimension 0).

        Cost: (n-1)/n of its bytes sent per rank.
        """
        return self.start_reduce_scatter(tensor).wait()

    def start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None
    ) -> Pending:
        """As `reduce_scatter`, under way until `wait`; into `out` if given (it may be a view
        of this rank's own part of `tensor`).
        """
        if self.size == 1:
            return self._done(tensor)
        self._counted((self.size - 1) / self.size * tensor.nbytes)
        parts = tensor.view(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])
        result = torch.empty_like(parts[self.index]) if out is None else out
        if self._is_native(tensor):
            work = self._launch_reduce_scatter(result, tensor)
            return self._pending([work], result, buffers=[tensor])
        while len(self._exchanges) > 1:  # at most two receive buffers are in use
            self._exchanges.pop(0).wait()
        pending = self._start_exchange(parts, result)
        self._exchanges.append(pending)
        return pending

    def _start_exchange(self, parts: torch.Tensor, result: torch.Tensor) -> Pending:
        """Reduce-scatter by exchange: the others' parts arrive beside ours and are added here."""
        own, is_direct = parts[self.index], parts.nbytes >= _DIRECT_BYTES
        room = self._scratch.take(parts.numel() - is_direct * own.numel(), parts)
        if is_direct:
            received = list(room[: parts.numel() - own.numel()].view(-1, *own.shape))
            received.insert(self.index, own)
            works = self._launch_exchange(received, parts)
        else:
            whole = room[: parts.numel()].view_as(parts)
            works, received = [self._launch_all_to_all(whole, parts)], list(whole)

        def add_up() -> None:
            first, *others = [received[j] for j in range(self.size) if j != self.index]
            torch.add(own, first, out=result)
            for other in others:
                result.add_(other)
            self._scratch.give(room)

        return self._pending(works, result, add_up, [room, parts])

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The group's tensors, one after the other along dimension 0.

        Cost: (n-1)/n of the result's bytes sent per rank.
        """
        return self.start_all_gather(tensor, out).wait()

    def start_all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> Pending:
        """As `all_gather`, under way until `wait`; `out` may contain `tensor` at its place."""
        if self.size == 1:
            return self._done(tensor)
        if out is None:
            out = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._counted((self.size - 1) / self.size * out.nbytes)
        if self._is_native(tensor) or out.nbytes < _DIRECT_BYTES:
            return self._pending([self._launch_all_gather(out, tensor)], out, buffers=[tensor])
        parts = out.view(self.size, *tensor.shape)
        if parts[self.index].data_ptr() != tensor.data_ptr():
            parts[self.index].copy_(tensor)
        works = self._launch_exchange(parts, [tensor] * self.size)
        return self._pending(works, out, buffers=[tensor])

    def all_to_all_rows(
        self, tensor: torch.Tensor, sent: Sequence[int], arriving: Sequence[int]
    ) -> torch.Tensor:
        """Rows for each rank of the group, `sent` of them, against its `arriving` rows for this.

        Both lists go by rank and add up along dimension 0. Cost: the bytes of the rows for others.
        """
        if self.size == 1:
            return tensor
        rows = len(tensor) - sent[self.index]
        self._counted(rows * math.prod(tensor.shape[1:]) * tensor.itemsize)
        out = tensor.new_empty((sum(arriving), *tensor.shape[1:]))
        work = self._launch_uneven_all_to_all(out, tensor, list(arriving), list(sent))
        return self._pending([work], out, buffers=[tensor]).wait()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Part j of dimension 0 (n long) goes to rank j; part i of the result comes from rank i.

        Cost: (n-1)/n of its bytes sent per rank.
        """
        return self.start_all_to_all(tensor).wait()

    def start_all_to_all(self, tensor: torch.Tensor) -> Pending:
        """As `all_to_all`, under way until `wait`."""
        if self.size == 1:
            return self._done(tensor)
        self._counted((self.size - 1) / self.size * tensor.nbytes)
        out = torch.empty_like(tensor)
        if self._is_native(tensor) or tensor.nbytes < _DIRECT_BYTES:
            works = [self._launch_all_to_all(out, tensor)]
        else:
            out[self.index].copy_(tensor[self.index])
            works = self._launch_exchange(out, tensor)
        return self._pending(works, out, buffers=[tensor])

    # ---- point to point ----------------------------------------------------------------------

    def start_send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Sends to the group member with index `to`; `tensor` must not change until the wait."""
        self._counted(tensor.nbytes)
        return self._pending([self._launch_send(tensor, self.ranks[to])], tensor)

    def start_receive(self, out: torch.Tensor, source: int) -> Pending:
        """Receives into `out` from the group member with index `source`."""
        return self._pending([self._launch_receive(out, self.ranks[source])], out)

    def start_shift(self, tensor: torch.Tensor, out: torch.Tensor, by: int = 1) -> Pending:
        """Sends to the rank `by` further in the ring, receives from `by` before: one batch."""
        if self.size == 1:
            return self._done(tensor)
        self._counted(tensor.nbytes)
        following, previous = (self.ranks[(self.index + step) % self.size] for step in (by, -by))
        works = self._launch_shift(tensor, following, out, previous)
        return self._pending(works, out, buffers=[tensor])

    def start_exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        result: torch.Tensor,
        finish: Callable[[], object] | None = None,
    ) -> Pending:
        """Messages to and from several members, one each at most, as one batch.

        Peers may batch theirs otherwise, as long as each pair agrees. After the wait `finish` has
        made `result` of what was received.
        """
        if sends:
            self._counted(sum(tensor.nbytes for tensor, _ in sends))
        works = self._launch_batch(
            [(tensor, self.ranks[to]) for tensor, to in sends],
            [(out, self.ranks[source]) for out, source in receives],
        )
        buffers = [tensor for tensor, _ in (*sends, *receives)]
        return self._pending(works, result, finish, buffers)

    # ---- what strict mode replaces -----------------------------------------------------------

    def _launch_all_reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        return dist.all_reduce(tensor, op=op, group=self._group, async_op=True)

    def _launch_all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return _all_gather(out, tensor, group=self._group, async_op=True)

    def _launch_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return _reduce_scatter(out, tensor, group=self._group, async_op=True)

    def _launch_all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return dist.all_to_all_single(out, tensor, group=self._group, async_op=True)

    def _launch_uneven_all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, arriving: list[int], sent: list[int]
    ) -> Any:
        return dist.all_to_all_single(out, tensor, arriving, sent, group=self._group, async_op=True)

    def _launch_send(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, rank, group=self._group)

    def _launch_receive(self, out: torch.Tensor, rank: int) -> Any:
        return dist.irecv(out, rank, group=self._group)

    def _launch_shift(
        self, tensor: torch.Tensor, to: int, out: torch.Tensor, source: int
    ) -> list[Any]:
        return self._launch_batch([(tensor, to)], [(out, source)])

    def _launch_batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> list[Any]:
        operations = [dist.P2POp(dist.irecv, out, rank, self._group) for out, rank in receives]
        operations += [dist.P2POp(dist.isend, tensor, rank, self._group) for tensor, rank in sends]
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return works

    # ---- helpers -----------------------------------------------------------------------------

    def _is_native(self, tensor: torch.Tensor) -> bool:
        """True if the back end's own collectives are good: on NCCL, and on torch's fake one."""
        return tensor.is_cuda or not self._is_gloo

    def _launch_exchange(
        self,
        out: Sequence[torch.Tensor] | torch.Tensor,
        tensors: Sequence[torch.Tensor] | torch.Tensor,
    ) -> list[Any]:
        """Sends `tensors[j]` to rank j and receives rank j's into `out[j]`, for all others j."""
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        receives = [self._launch_receive(out[j], self.ranks[j]) for j in others]
        sends = [self._launch_send(tensors[j], self.ranks[j]) for j in others]
        return receives + sends

    def _counted(self, sent_bytes: float) -> None:
        self._count.calls += 1
        self._count.bytes_sent += round(sent_bytes)

    def _pending(
        self,
        works: Sequence[Any],
        result: torch.Tensor,
        finish: Callable[[], object] | None = None,
        buffers: Sequence[torch.Tensor] = (),
    ) -> Pending:
        return Pending(works, result, self._count, finish, buffers)

    def _done(self, tensor: torch.Tensor) -> Pending:
        return Pending((), tensor, self._count)
