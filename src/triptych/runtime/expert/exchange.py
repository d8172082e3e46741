"""Tokens to the ranks that hold their experts, and back: two all-to-alls a layer and pass.

    rows by expert --all-to-all--> rows by sender --sort--> rows by expert of this rank
    results in the senders' order <--all-to-all-- results by sender <--unsort--

Nothing is dropped: the ranks first tell one another how many rows each expert gets. The host must
know these numbers, since they size buffers and messages: on CUDA it waits for the device once a
layer and pass, for both tables together.

Source: Lepikhin et al. 2020 (GShard), sec. 3.2; domain.md section 3.
Cost: (e-1)/e x T x K x H elements each way if tokens spread evenly over e ranks, and 8 bytes an
expert. Shapes: N rows of this rank's tokens, M rows for its experts, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.runtime.comm import Communicator


class Exchange:
    """The way to the experts of `comm`'s ranks, each of which holds E / ranks consecutive ones."""

    def __init__(self, comm: Communicator, num_experts: int) -> None:
        self._comm = comm
        self._held = num_experts // comm.size

    def routes(self, count_E: torch.Tensor) -> Routes:
        """Where rows go, given how many of this rank's are for each expert; collective."""
        ones = [1] * self._comm.size
        sent_re = count_E.view(self._comm.size, self._held)
        arriving_re = self._comm.all_to_all_rows(sent_re, ones, ones)
        return Routes(self._comm, sent_re, arriving_re)


class Routes:
    """How the rows of one layer and pass travel.

    Made of rows by other rank and expert there, those that it gets and those that it sends. `sent`
    are rows by receiving rank, `counts` rows by expert of this rank, `count_e` the same on the
    device.
    """

    def __init__(
        self, comm: Communicator, sent_re: torch.Tensor, arriving_re: torch.Tensor
    ) -> None:
        sent, arriving = torch.stack((sent_re, arriving_re)).tolist()  # the host waits here
        self._comm = comm
        self.sent = [sum(row) for row in sent]
        self._arriving = [sum(row) for row in arriving]
        self.counts = [sum(column) for column in zip(*arriving, strict=True)]
        self.count_e = arriving_re.sum(0)
        expert_re = torch.arange(len(self.counts), device=sent_re.device).repeat(comm.size)
        expert_M = expert_re.repeat_interleave(
            arriving_re.flatten(), output_size=sum(self._arriving)
        )
        self._by_expert_M = expert_M.argsort(stable=True)
        self._by_sender_M = self._by_expert_M.argsort()

    def dispatch(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """Rows ordered by expert to the ranks of these; those that come, [M, H], by expert."""
        return _travel(rows_NH, self._comm, self.sent, self._arriving)[self._by_expert_M]

    def combine(self, rows_MH: torch.Tensor) -> torch.Tensor:
        """What became of the rows, back in the order in which they were dispatched; [N, H]."""
        by_sender = rows_MH[self._by_sender_M]
        return _travel(by_sender, self._comm, self._arriving, self.sent)


def _travel(
    rows: torch.Tensor, comm: Communicator, sent: list[int], arriving: list[int]
) -> torch.Tensor:
    result: torch.Tensor = _Travel.apply(rows, comm, sent, arriving)  # type: ignore[no-untyped-call]
    return result


class _Travel(torch.autograd.Function):
    """Its backward sends gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, comm: Communicator, sent: list[int], arriving: list[int]
    ) -> torch.Tensor:
        ctx.comm, ctx.sent, ctx.arriving = comm, sent, arriving
        return comm.all_to_all_rows(rows, sent, arriving)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = grads[0].contiguous()
        return ctx.comm.all_to_all_rows(rows, ctx.arriving, ctx.sent), None, None, None
