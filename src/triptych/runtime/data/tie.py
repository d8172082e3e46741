"""The sum of a tied table's gradients over two stages that divide the table differently.

Each rank holds, when its data axis has been reduced, its shard of its range of the vocabulary. It
needs the other end's sum for the same elements and asks the ranks that hold parts of them; among
replicas the asking ranks are spread evenly. Both ends thus add the same two numbers, and their
copies stay equal.

Cost: every rank receives each element that it holds once, as in an all-reduce over two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triptych.model.model import Model
from triptych.plan.layout import Box, box_elements, box_shape, flat_range_to_boxes, local_box, shift
from triptych.plan.plan import Plan
from triptych.plan.ranks import coordinates_in, placement, ranks_of
from triptych.plan.transfer import overlaps
from triptych.runtime.data.bucket import padded
from triptych.runtime.mesh import Mesh
from triptych.runtime.packing import Parts, pack, room, unpack


class _Held(NamedTuple):
    """What a rank of an end holds: boxes of its shard in memory order, and which copy of them."""

    rank: int
    boxes: list[Box]
    replica: int


def held_by(
    plan: Plan, pp_index: int, name: str, shape: Sequence[int], model: Model
) -> list[_Held]:
    """The shards of a table that the ranks of a pipeline rank hold, alone in a bucket."""
    stage, found = plan.stages[pp_index], []
    shards = plan.shards_of(stage)
    for index, rank in enumerate(ranks_of(plan, pp_index)):
        at = coordinates_in(plan, pp_index, index)
        replica, place = divmod(at.dp * stage.context + at.cp, shards)
        box = local_box(name, shape, model, stage.tensor, at.tp)
        size = padded(box_elements(box), shards) // shards
        stop = min((place + 1) * size, box_elements(box))
        boxes = flat_range_to_boxes(box_shape(box), place * size, stop)
        found.append(_Held(rank, [shift(part, box) for part in boxes], replica))
    return found


class Tie:
    """Adds the other end's gradients of a table to this rank's shard of them."""

    def __init__(self, name: str, shape: Sequence[int], model: Model, mesh: Mesh) -> None:
        self._tie = mesh.tie
        plan, here = mesh.plan, mesh.coordinates.pp
        first, last = placement(plan)[0], placement(plan)[-1]
        ours = held_by(plan, here, name, shape, model)
        theirs = held_by(plan, last if here == first else first, name, shape, model)
        place, mine = next((i, held) for i, held in enumerate(ours) if held.rank == mesh.rank)
        self._boxes = mine.boxes
        asked = place % _replicas(theirs)
        self._receives = {
            self._tie.ranks.index(other.rank): [(part.target, part.target_slices) for part in parts]
            for other in theirs
            if other.replica == asked and (parts := overlaps(other.boxes, mine.boxes))
        }
        self._sends = {
            self._tie.ranks.index(other.rank): [(part.source, part.source_slices) for part in parts]
            for i, other in enumerate(theirs)
            if i % _replicas(ours) == mine.replica and (parts := overlaps(mine.boxes, other.boxes))
        }

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds, in place, to this rank's shard [elements of its bucket / shards]."""
        views, start = [], 0
        for box in self._boxes:
            views.append(tensor[start : start + box_elements(box)].view(box_shape(box)))
            start += box_elements(box)
        arriving: list[tuple[torch.Tensor, int, Parts]] = [
            (room(views, parts), peer, parts) for peer, parts in self._receives.items()
        ]

        def add_up() -> None:
            for message, _, parts in arriving:
                for place, values in unpack(message, views, parts):
                    place.add_(values)

        return self._tie.start_exchange(
            [(pack(views, parts), peer) for peer, parts in self._sends.items()],
            [(message, peer) for message, peer, _ in arriving],
            tensor,
            add_up,
        ).wait()


def _replicas(held: Sequence[_Held]) -> int:
    return 1 + max(rank.replica for rank in held)
