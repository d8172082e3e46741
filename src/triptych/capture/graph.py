"""A layer's calls brought together: products that read one tensor, chains of cheap functions.

A group is what one kernel could do. Functions that memory bounds are one group if one follows the
other with no product, norm or attention between them, on any way; queries, keys and values are one
product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Literal, NamedTuple

from triptych.capture.trace import Call, Read, Trace
from triptych.errors import ModelError

Kind = Literal["product", "attention", "norm", "dropout", "memory"]

PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"})
MIXES_TOKENS = frozenset(
    [
        "conv1d",
        "conv2d",
        "cumsum",
        "cumprod",
        "roll",
        "fft",
        "rfft",
        "irfft",
        "ifft",
        "flip",
        "scan",
        "associative_scan",
    ]
)
"""Functions that see several tokens at once and are no attention."""

SUMS = frozenset({"add", "radd", "iadd"})

ENTRY = -1
"""Stands for everything that comes from outside of the layer."""


@dataclass(eq=False)
class Group:
    """Calls of one kernel, with the groups that it reads (`ENTRY`: what is outside) and writes to.

    `reads` are elements per token of each group that is read, `elements` those that are written.
    """

    kind: Kind
    first: int  # place of its first call: its place in the layer
    calls: list[Call]
    level: int
    weights: dict[str, tuple[int, ...]]
    reads: dict[int, float] = field(default_factory=dict)
    elements: float = 0.0
    chosen_by: int | None = None  # the group that says which weights

    @property
    def functions(self) -> set[str]:
        """Names of what is called."""
        return {call.function for call in self.calls}

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(map(prod, self.weights.values()))

    @property
    def parent(self) -> str:
        """The module that its (first) module is a part of."""
        return self.calls[0].module.rpartition(".")[0]


class Grouped:
    """The groups of one layer by number; what they are merged into has the first one's number."""

    def __init__(self, trace: Trace, layer: int, taken: set[str]) -> None:
        """`taken` are weights that are counted elsewhere; those of the layer are added."""
        self.trace, self._taken = trace, taken
        self._group_of: dict[int, int] = {}  # by place of the call
        self.groups: dict[int, Group] = {}
        for place, call in enumerate(trace.calls):
            if call.layer == layer:
                self._add(place, call)
        self.result = max(self._group_of.values(), default=ENTRY)
        self._merge_alike()
        self._measure()

    # --- groups ----------------------------------------------------------------------------------

    def _add(self, place: int, call: Call) -> None:
        kind = _kind(call)
        sources = [self._group_of.get(read.source, ENTRY) for read in call.reads]
        if kind == "product" and len(set(call.reads)) > 1 and not call.weights:
            raise ModelError(f"{call.module} multiplies tokens with tokens ({call.function})")
        if call.function in MIXES_TOKENS:
            raise ModelError(f"{call.module} sees several tokens at once ({call.function})")
        joined = self._joins(kind, call, sources)
        level = max([self._level(source) for source in sources], default=0)
        if joined:
            self._join(joined, place, call)
            return
        chosen = None if call.chosen_by is None else self._group_of.get(call.chosen_by)
        self.groups[place] = Group(kind, place, [call], level, {}, chosen_by=chosen)
        self.groups[place].level += kind != "memory"
        self._own(place, place, call)

    def _joins(self, kind: Kind, call: Call, sources: Sequence[int]) -> list[int]:
        """The groups that a call becomes a part of."""
        known = [source for source in dict.fromkeys(sources) if source != ENTRY]
        if kind == "norm":
            return [s for s in known if self.groups[s].calls[0].norm == call.norm][:1]
        if kind != "memory":
            return []
        if call.weights and call.function.strip("_") == "add" and len(sources) == len(known) == 1:
            return known if self.groups[known[0]].kind == "product" else self._chained(sources)
        chained = self._chained(sources)
        is_sum = call.function.strip("_") in SUMS
        beside = {*chained, *(self.source_of(read) for c in chained for read in self._all_reads(c))}
        return [] if is_sum and not set(sources) <= beside else chained  # where two ways meet

    def _chained(self, sources: Sequence[int]) -> list[int]:
        """The memory-bound groups that a call goes on with."""
        level = max(map(self._level, sources), default=0)
        return [source for source in set(sources) if self._is_chained(source, level)]

    def _is_chained(self, number: int, level: int) -> bool:
        if number == ENTRY:
            return False
        group = self.groups[number]
        return group.kind == "memory" and group.level == level

    def _join(self, joined: Sequence[int], place: int, call: Call) -> None:
        target = min(joined)
        for other in sorted(set(joined) - {target}):
            self._absorb(target, other)
        self.groups[target].calls.append(call)
        self._own(target, place, call)

    def _own(self, number: int, place: int, call: Call) -> None:
        self._group_of[place] = number
        for name in call.weights:
            if name not in self._taken:
                self._taken.add(name)
                self.groups[number].weights[name] = self.trace.shapes[name]

    def _absorb(self, target: int, other: int) -> None:
        gone, kept = self.groups.pop(other), self.groups[target]
        kept.calls += gone.calls
        kept.weights |= gone.weights
        if kept.chosen_by is None:
            kept.chosen_by = gone.chosen_by
        for place, number in self._group_of.items():
            if number == other:
                self._group_of[place] = target
        for group in self.groups.values():
            if group.chosen_by == other:
                group.chosen_by = target

    def _level(self, number: int) -> int:
        return 0 if number == ENTRY else self.groups[number].level

    def source_of(self, read: Read) -> int:
        """The group that wrote what is read."""
        return self._group_of.get(read.source, ENTRY)

    # --- merging ---------------------------------------------------------------------------------

    def _merge_alike(self) -> None:
        """Makes one of groups that read the same and whose results meet first in the same place."""
        goals = {number: self.goals(number) for number in self.groups}
        seen: dict[object, int] = {}
        for number in sorted(self.groups):
            group = self.groups[number]
            parent = group.parent if group.kind in ("product", "dropout") else ""
            reads = frozenset(self.sources(number))
            key = (group.kind, parent, reads, goals[number], group.chosen_by)
            is_alike = group.kind in ("product", "norm", "memory") and goals[number]
            if is_alike and key in seen:
                self._absorb(seen[key], number)
            else:
                seen[key] = number

    def sources(self, number: int) -> list[int]:
        """The groups that one reads, itself left out."""
        found = (self._group_of.get(r.source, ENTRY) for r in self._all_reads(number))
        return [source for source in dict.fromkeys(found) if source != number]

    def readers(self, number: int) -> list[int]:
        """The groups that read one."""
        return [other for other in self.groups if number in self.sources(other)]

    def goals(self, number: int) -> frozenset[int]:
        """The products and attentions that a group's result comes to first."""
        found: set[int] = set()
        queue = self.readers(number)
        while queue:
            other = queue.pop()
            if self.groups[other].kind in ("product", "attention"):
                found.add(other)
            else:
                queue += self.readers(other)
        return frozenset(found)

    def origins(self, number: int) -> frozenset[int]:
        """The products and attentions, or `ENTRY`, that what a group reads was last made by."""
        found: set[int] = set()
        queue = self.sources(number)
        while queue:
            other = queue.pop()
            if other == ENTRY or self.groups[other].kind in ("product", "attention"):
                found.add(other)
            else:
                queue += self.sources(other)
        return frozenset(found)

    def between(self, number: int) -> Iterator[Group]:
        """The groups on the way from the last products or attentions to one."""
        queue = self.sources(number)
        while queue:
            other = queue.pop()
            if other != ENTRY and self.groups[other].kind not in ("product", "attention"):
                yield self.groups[other]
                queue += self.sources(other)

    def _all_reads(self, number: int) -> Iterator[Read]:
        for call in self.groups[number].calls:
            yield from call.reads

    def fold_behind(self, router: int) -> None:
        """Makes what only follows a router a part of it: softmax, choice, sorting."""
        while True:
            found = [
                number
                for number, group in self.groups.items()
                if group.kind == "memory" and self.sources(number) == [router]
            ]
            if not found:
                break
            for number in found:
                self._absorb(router, number)
        self._measure()

    # --- sizes -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """What groups read and write, once they are all there."""
        self.result = self._group_of[max(self._group_of)] if self._group_of else ENTRY
        outside = self._read_outside()
        for number, group in self.groups.items():
            inside = {place for place, own in self._group_of.items() if own == number}
            elsewhere = outside | {
                read.source
                for other in self.groups
                if other != number
                for read in self._all_reads(other)
            }
            written = [p for p in inside if p in elsewhere] or [max(inside)]
            group.elements = sum(self.trace.calls[place].elements for place in written)
        for number, group in self.groups.items():
            group.reads = self._read_elements(number)

    def _read_outside(self) -> set[int]:
        """Places of calls of this layer that other layers read."""
        own = self._group_of
        return {
            read.source
            for place, call in enumerate(self.trace.calls)
            if place not in own
            for read in call.reads
            if read.source in own
        }

    def _read_elements(self, number: int) -> dict[int, float]:
        """Elements of each group that one reads: no more than the group has written."""
        found: dict[int, float] = {}
        by_source: dict[int, float] = {}
        for read in self._all_reads(number):
            if self._group_of.get(read.source, ENTRY) != number:
                made = self.trace.calls[read.source].elements if read.source >= 0 else 1.0
                before = by_source.get(read.source, 0.0)
                by_source[read.source] = min(before + read.elements, max(made, read.elements))
        for source, elements in by_source.items():
            group = self._group_of.get(source, ENTRY)
            found[group] = found.get(group, 0.0) + elements
        return found


def _kind(call: Call) -> Kind:
    if call.attended:
        return "attention"
    if call.norm or call.function in ("layer_norm", "rms_norm", "group_norm"):
        return "norm"
    if "dropout" in call.function:
        return "dropout"
    if call.function in PRODUCTS or "grouped_mm" in call.function:
        return "product"
    return "memory"


class Shape(NamedTuple):
    """Of a product: rows of `k` times `k` x `n`; rows a token."""

    k: int
    n: int
    rows: float


def product_shapes(trace: Trace, group: Group) -> list[Shape]:
    """The shape of each product in a group."""
    return [_shape(trace, call) for call in group.calls if _kind(call) == "product"]


def _shape(trace: Trace, call: Call) -> Shape:
    """What a product reads, what it writes and what its weight holds say it all.

    Rows x k are read and rows x n written; the weight says k x n.
    """
    shapes = [trace.shapes[name] for name in call.weights]
    matrix = max(shapes, key=lambda shape: (len(shape), prod(shape)))
    if len(matrix) > 2 and call.chosen_by is None:
        raise ModelError(f"{call.module} runs every expert on every token")
    area, read = prod(matrix[-2:]), call.reads[0].elements
    k = isqrt(round(area * read / call.elements))
    if k == 0 or area % k:
        raise ModelError(f"{call.module} multiplies in a way that its weights do not say")
    return Shape(k, area // k, read / k)
