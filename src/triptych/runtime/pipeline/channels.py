"""The ways between stages: a group per direction of travel, so that no two messages wait in turn.

Activations and their gradients have groups of their own, and so have messages to a higher and to
a lower pipeline rank: with several stages a rank both may travel between the same two ranks, and
on NCCL one communicator would put them in one queue. Each queue then carries messages of one kind,
from one rank to another, in the order of the program.

Between stages with the same degrees a message goes to the counterpart. Otherwise it is one batch of
messages to all ranks that answer for a part of what this rank answers for (`plan/transfer.py`). The
ranks of a stage run one row of the program, so all batches of a transfer meet: in every check of
the schedule the transfer is one message. Within a batch peers stand in the order of their ranks, on
both sides, so that not even blocking calls would wait in a circle.

Shapes: b rows and s positions of this rank, T = b x s tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triptych.plan.plan import Plan
from triptych.plan.ranks import coordinates_in, placement, ranks_of
from triptych.plan.transfer import Overlap, Piece, Spread, overlaps, pieces, share
from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.mesh import Mesh
from triptych.runtime.packing import Parts, pack, room, unpack


class _Route(NamedTuple):
    """What a rank exchanges with the ranks of another stage, by global rank, ascending."""

    places: list[tuple[slice, ...]]  # of what this rank answers for, in its own tensor
    sends: dict[int, Parts]
    receives: dict[int, Parts]


class Channels:
    """Sends and receives by stage."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._plan = mesh, mesh.plan
        self._placement = placement(mesh.plan)
        self._forward, self._backward = mesh.forward, mesh.backward
        self._spreads = [Spread.of(mesh.plan, stage) for stage in mesh.plan.stages]
        self._counterparts: dict[int, int] = {}
        self._routes: dict[tuple[int, int, int, int], _Route] = {}

    def send_forward(self, output: torch.Tensor, stage: int) -> Pending:
        """Sends a stage's output to the next stage."""
        return self._send(self._forward, output, stage, stage + 1)

    def receive_forward(self, out: torch.Tensor, stage: int) -> Pending:
        """Receives a stage's input from the stage before."""
        return self._receive(self._forward, out, stage - 1, stage)

    def send_backward(self, gradient: torch.Tensor, stage: int) -> Pending:
        """Sends the gradient of a stage's input to the stage before."""
        return self._send(self._backward, gradient, stage, stage - 1)

    def receive_backward(self, out: torch.Tensor, stage: int) -> Pending:
        """Receives the gradient of a stage's output from the next stage."""
        return self._receive(self._backward, out, stage + 1, stage)

    def _send(
        self, pair: tuple[Communicator, Communicator], tensor: torch.Tensor, stage: int, to: int
    ) -> Pending:
        ways = pair[self._placement[to] < self._placement[stage]]
        if self._spreads[stage] == self._spreads[to]:
            return ways.start_send(tensor, self._counterpart(to))
        route = self._route(stage, to, tensor)
        views = [tensor[place] for place in route.places]
        sends = [(pack(views, parts), ways.ranks.index(p)) for p, parts in route.sends.items()]
        return ways.start_exchange(sends, [], tensor)

    def _receive(
        self, pair: tuple[Communicator, Communicator], out: torch.Tensor, stage: int, at: int
    ) -> Pending:
        ways = pair[self._placement[at] < self._placement[stage]]
        if self._spreads[stage] == self._spreads[at]:
            return ways.start_receive(out, self._counterpart(stage))
        route = self._route(at, stage, out)
        flat_TH = _with_whole_shares(out, self._shares(at))
        whole = flat_TH[: out.shape[0] * out.shape[1]].view(out.shape)
        views = [whole[place] for place in route.places]
        arriving = [(room(views, parts), p, parts) for p, parts in route.receives.items()]

        def put_in_place() -> None:
            for message, _, parts in arriving:
                for place, values in unpack(message, views, parts):
                    place.copy_(values)
            self._gather(flat_TH, self._shares(at))

        receives = [(message, ways.ranks.index(p)) for message, p, _ in arriving]
        return ways.start_exchange([], receives, whole, put_in_place)

    def _counterpart(self, stage: int) -> int:
        """Who of another stage's ranks has this rank's place, by its place in the groups."""
        if stage not in self._counterparts:
            here = ranks_of(self._plan, self._mesh.coordinates.pp).index(self._mesh.rank)
            rank = ranks_of(self._plan, self._placement[stage])[here]
            self._counterparts[stage] = self._forward[0].ranks.index(rank)
        return self._counterparts[stage]

    def _shares(self, stage: int) -> int:
        """Into how many shares tensor ranks divide what all of them hold."""
        spread = self._spreads[stage]
        return 1 if spread.is_split else spread.tensor

    def _gather(self, flat_TH: torch.Tensor, shares: int) -> None:
        """Fills in the shares of the other tensor ranks."""
        if shares > 1:
            each, tensor = flat_TH.shape[0] // shares, self._mesh.tensor
            mine = flat_TH[tensor.index * each : (tensor.index + 1) * each]
            tensor.all_gather(mine, out=flat_TH)

    def _route(self, here: int, there: int, tensor: torch.Tensor) -> _Route:
        """What this rank, with its `tensor` of stage `here`, exchanges with stage `there`."""
        key = (here, there, tensor.shape[0], tensor.shape[1])
        if key not in self._routes:
            shape = self._spreads[here].whole_shape(tensor.shape[0], tensor.shape[1])
            mine = pieces(self._spreads[here], self._mesh.coordinates, *shape)
            self._routes[key] = _route_to(self._plan, self._placement[there], mine, shape)
        return self._routes[key]


def _route_to(plan: Plan, pp_index: int, mine: list[Piece], shape: tuple[int, int]) -> _Route:
    spread = Spread.of(plan, plan.stages[pp_index])
    own = [piece.box for piece in mine]
    sends: dict[int, Parts] = {}
    receives: dict[int, Parts] = {}
    for index, rank in enumerate(ranks_of(plan, pp_index)):
        at = coordinates_in(plan, pp_index, index)
        theirs = [piece.box for piece in pieces(spread, at, *shape)]
        if leaving := overlaps(own, theirs):
            sends[rank] = [(part.source, part.source_slices) for part in leaving]
            receives[rank] = _as_target(overlaps(theirs, own))
    places = [tuple(slice(start, stop) for start, stop in piece.local) for piece in mine]
    return _Route(places, sends, receives)


def _as_target(parts: Sequence[Overlap]) -> Parts:
    return [(part.target, part.target_slices) for part in parts]


def _with_whole_shares(out: torch.Tensor, shares: int) -> torch.Tensor:
    """Tokens of a buffer [b, s, H] as [T, H], T rounded up to a number of whole shares."""
    tokens, hidden = out.shape[0] * out.shape[1], out.shape[2]
    whole = share(tokens, shares) * shares
    return out.view(tokens, hidden) if whole == tokens else out.new_empty(whole, hidden)
