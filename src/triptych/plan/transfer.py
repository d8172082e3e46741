"""From the layout of one stage to that of the next: what each rank sends to which.

The hidden states [rows, positions, hidden] of a micro-batch lie over the ranks of a stage: its rows
over the data ranks, its positions over the context ranks (and over the tensor ranks under sequence
parallelism). Every rank answers for a part of them; the parts of a stage's ranks are disjoint and
cover the micro-batch. Where tensor ranks hold the same rows and positions, each answers for an
equal share of these tokens.

Between stages with the same layout each rank sends what it holds to its counterpart. Otherwise
each rank sends, of its own part, what is another rank's part: every slice travels once. Tensor
ranks that need the whole gather their shares afterwards, over their own links (Zheng et al. 2022,
"Alpa", sec. 6; Zhuang et al. 2023, "On optimizing the communication of model parallelism", sec. 3).

    TP2 | DP2, 4 rows        sender rank 0: rows 0-1 -> rank 2
                             sender rank 1: rows 2-3 -> rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.errors import PlanError, Problem
from triptych.plan.context import pieces as context_pieces
from triptych.plan.context import stage_unit
from triptych.plan.layout import Box, flat_range_to_boxes, shift
from triptych.plan.plan import Plan, Stage
from triptych.plan.ranks import Coordinates, axis_groups, placement, ranks_of
from triptych.plan.reshard import intersect, slices


class Spread(NamedTuple):
    """How hidden states lie over the ranks of a stage."""

    data: int
    context: int
    tensor: int
    is_split: bool  # over the tensor ranks too: sequence parallelism
    method: str = "ring"  # of context parallelism: which positions a rank has

    @classmethod
    def of(cls, plan: Plan, stage: Stage) -> Spread:
        """The spread of a stage."""
        is_split = plan.sequence_parallel and stage.tensor > 1
        method = plan.context_method if stage.context > 1 else "ring"
        return cls(stage.data, stage.context, stage.tensor, is_split, method)

    @property
    def rounding(self) -> int:
        """What a number of positions must be a multiple of."""
        return stage_unit(self.context, self.tensor if self.is_split else 1, self.method)

    def local_shape(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and positions of a rank's own tensor."""
        parts = self.context * (self.tensor if self.is_split else 1)
        if rows % self.data or length % self.rounding:
            what = f"a micro-batch of {rows} sequences of {length} tokens"
            rule = f"a stage with data={self.data} and context={self.context} divides it evenly"
            works = f"multiples of {self.data} sequences and of {self.rounding} tokens"
            raise PlanError(Problem(what, rule, works))
        return rows // self.data, length // parts

    def whole_shape(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and positions of the micro-batch, from those of a rank's own tensor."""
        return rows * self.data, length * self.context * (self.tensor if self.is_split else 1)


class Piece(NamedTuple):
    """A rectangle of rows x positions: where it is in the micro-batch and in a rank's tensor."""

    box: Box
    local: Box


class Overlap(NamedTuple):
    """What two ranks share: parts of one of the sender's boxes and of one of the receiver's."""

    source: int
    source_slices: tuple[slice, ...]
    target: int
    target_slices: tuple[slice, ...]


def overlaps(sources: Sequence[Box], targets: Sequence[Box]) -> list[Overlap]:
    """The common parts of two ranks' disjoint boxes, in the order in which both pack them."""
    return [
        Overlap(i, slices(common, source), j, slices(common, target))
        for i, source in enumerate(sources)
        for j, target in enumerate(targets)
        if (common := intersect(source, target)) is not None
    ]


def share(tokens: int, tensor: int) -> int:
    """Tokens of the largest share when tensor ranks divide what all of them hold."""
    return -(-tokens // tensor)


def pieces(spread: Spread, at: Coordinates, rows: int, length: int) -> list[Piece]:
    """What a rank answers for of a micro-batch of `rows` x `length`; empty if it is too small."""
    b, s = spread.local_shape(rows, length)
    first = at.tp * s if spread.is_split else 0
    found = []
    for run in context_pieces(length, spread.context, at.cp, spread.method):
        start = run.at - first
        window = ((0, b), (start, start + run.stop - run.start))
        origin = (at.dp * b, run.start - start)
        for box in _answered(spread, at.tp, b, s):
            common = intersect(box, window)
            if common is not None:
                found.append(Piece(shift(common, tuple((o, o) for o in origin)), common))
    return found


def _answered(spread: Spread, tp_index: int, rows: int, length: int) -> list[Box]:
    """Of a rank's own tensor: all of it, or a share if other tensor ranks hold the same."""
    if spread.is_split:
        return [((0, rows), (0, length))]
    each = share(rows * length, spread.tensor)
    stop = min((tp_index + 1) * each, rows * length)
    return flat_range_to_boxes((rows, length), tp_index * each, stop)


def has_one_spread(plan: Plan) -> bool:
    """True if all messages go between counterparts."""
    return len({Spread.of(plan, stage) for stage in plan.stages}) == 1


def pipeline_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks that messages along the pipeline connect: columns, or all where spreads differ."""
    if has_one_spread(plan):
        return axis_groups(plan, "pp")
    return [tuple(range(plan.world_size))]


def tie_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks that add up a tied table's gradients: counterparts of first and last stage, or all
    ranks of both if these divide it differently; none if the same ranks run both.
    """
    first, last = placement(plan)[0], placement(plan)[-1]
    if first == last:
        return []
    ends = ranks_of(plan, first), ranks_of(plan, last)
    if Spread.of(plan, plan.stages[first]) == Spread.of(plan, plan.stages[last]):
        return list(zip(*ends, strict=True))
    return [(*ends[0], *ends[1])]
