"""Operators of a layer from its groups, under the names that all counts know.

What is recognised can be divided: products in front of and behind attention by heads, those around
a function of single elements by columns and rows, experts by expert. All else is whole on every
rank, or divided by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from triptych.capture.graph import ENTRY, SUMS, Group, Grouped, product_shapes
from triptych.capture.trace import Attended
from triptych.errors import ModelError
from triptych.model.operator import Operator, Split, attention_operator

ELEMENTWISE = frozenset(
    [
        "silu",
        "gelu",
        "relu",
        "relu2",
        "sigmoid",
        "tanh",
        "softplus",
        "mish",
        "hardswish",
        "mul",
        "add",
        "sub",
        "div",
        "pow",
        "square",
        "neg",
        "__mul__",
        "__rmul__",
        "__add__",
        "__radd__",
        "__sub__",
        "__truediv__",
        "__pow__",
        "mul_",
        "add_",
        "clamp",
        "clamp_",
        "exp",
        "erf",
        "glu",
        "where",
        "maximum",
        "minimum",
        "abs",
        "leaky_relu",
        "sqrt",
    ]
)


class Pair(NamedTuple):
    """Two products with a function of single elements between them."""

    name: str  # mlp, shared or experts
    up: int
    down: int


class Reader:
    """Names the groups of one layer and makes operators of them."""

    def __init__(self, grouped: Grouped, width: int) -> None:
        self.grouped, self.groups, self.hidden = grouped, grouped.groups, width
        cores = [number for number, group in self.groups.items() if group.kind == "attention"]
        if len(cores) != 1:
            raise ModelError(f"a layer has {len(cores)} attentions instead of one")
        self.core = cores[0]
        self.routers = self._find_routers()
        self.pairs = tuple(self._find_pairs())
        self.operators = dict(self._all())

    # --- roles -----------------------------------------------------------------------------------

    def _find_routers(self) -> set[int]:
        """Products that say which experts a token visits, with what follows them made part."""
        found: set[int] = set()
        for number in list(self.groups):
            chosen = self.groups[number].chosen_by if number in self.groups else None
            if chosen is None or self.groups[number].kind != "product":
                continue
            routers = (
                {chosen} if self.groups[chosen].kind == "product" else self.grouped.origins(chosen)
            )
            if len(routers) != 1 or ENTRY in routers:
                raise ModelError("experts are chosen by more than one product")
            found |= routers
        for router in found:
            self.grouped.fold_behind(router)
        return found

    def _find_pairs(self) -> Iterator[Pair]:
        """Pairs in the order of the layer: experts, then the first dense one, all others not."""
        dense = []
        for down, group in sorted(self.groups.items()):
            ups = self.grouped.origins(down)
            if group.kind != "product" or len(ups) != 1 or down in self.routers:
                continue
            (up,) = ups
            if up == ENTRY or self.groups[up].kind != "product" or up in self.routers:
                continue
            if self.grouped.goals(up) != {down} or not self._is_elementwise(down):
                continue
            if self.copies(up) != self.copies(down):
                continue
            if self.copies(up) > 1:
                yield Pair("experts", up, down)
            else:
                dense.append((up, down))
        for up, down in dense[:1]:
            yield Pair("shared" if self.routers else "mlp", up, down)

    def _is_elementwise(self, down: int) -> bool:
        between = list(self.grouped.between(down))
        return bool(between) and all(
            group.kind == "memory" and group.functions <= ELEMENTWISE and not group.weights
            for group in between
        )

    def copies(self, number: int) -> int:
        """Experts of a product; 1 if it is no product of experts."""
        group = self.groups[number]
        if group.chosen_by is None or not group.weights:
            return 1
        return max(group.weights.values(), key=len)[0]

    @property
    def attended(self) -> Attended:
        """What the attention was called with."""
        found = self.groups[self.core].calls[0].attended
        assert found is not None, "a core is called with heads"
        return found

    # --- operators -------------------------------------------------------------------------------

    def _all(self) -> Iterator[tuple[int, Operator]]:
        for number, group in self.groups.items():
            match group.kind:
                case "attention":
                    yield number, self._attention(group)
                case "product":
                    yield number, self._product(number, group)
                case "norm":
                    yield number, self._norm(number, group)
                case "dropout":
                    yield number, self._dropout(number, group)
                case _:
                    yield number, self._memory(number, group)

    def _attention(self, group: Group) -> Operator:
        core = self.attended
        return attention_operator(
            weight_elements=group.parameters,
            heads=core.heads,
            kv_heads=core.kv_heads,
            head_dim=core.head_dim,
            value_dim=core.value_dim,
            window=core.window,
            softcapped=core.softcapped,
            dropout=core.dropout,
        )

    def _product(self, number: int, group: Group) -> Operator:
        name, split = self._product_role(number)
        copies = self.copies(number)
        shapes = product_shapes(self.grouped.trace, group)
        k, n, rows = shapes[0].k, sum(shape.n for shape in shapes), shapes[0].rows
        saved = 0.0
        if number in {pair.up for pair in self.pairs}:
            saved = n * rows
        elif name == "router":
            saved = 2.0 * n
        return Operator(
            name=name,
            kind="gemm",
            split=split,
            k=k,
            n=n,
            weight_elements=group.parameters // copies,
            tokens_factor=round(rows),
            copies=copies,
            saved=float(saved),
        )

    def _product_role(self, number: int) -> tuple[str, Split]:
        for pair in self.pairs:
            if number == pair.up:
                return f"{pair.name}_up", "column"
            if number == pair.down:
                return f"{pair.name}_down", "row"
        if number in self.routers:
            return "router", "none"
        if self.grouped.goals(number) == {self.core}:
            return self._before_attention(number), "column"
        if self.grouped.origins(number) == {self.core} and not list(self.grouped.between(number)):
            return "out", "row"
        return self._small_product(number), "none"

    def _small_product(self, number: int) -> str:
        """What is whole on every rank: low ranks, gates, all that has a name of its own only."""
        goals = self.grouped.goals(number)
        behind = {self._before_attention(g) for g in goals if self._leads_to_core(g)}
        for name in ("kv", "q"):
            if f"{name}_up" in behind:
                return f"{name}_down"
        shapes = product_shapes(self.grouped.trace, self.groups[number])
        if any(pair.name == "shared" for pair in self.pairs) and shapes[0].n == 1:
            return "shared_gate"
        return self.groups[number].calls[0].module.rpartition(".")[2]

    def _before_attention(self, number: int) -> str:
        """Queries, keys and values, together or each from a tensor of its own."""
        alike = [n for n in self.groups if self._leads_to_core(n)]
        if len(alike) == 1:
            return "qkv"
        return "kv_up" if number == alike[-1] else "q" if self._is_trunk(number) else "q_up"

    def _leads_to_core(self, number: int) -> bool:
        is_product = self.groups[number].kind == "product"
        return is_product and self.grouped.goals(number) == {self.core}

    def _is_trunk(self, number: int) -> bool:
        """True if a group reads what the layer before, or a residual, hands over."""
        return all(
            source == ENTRY or self._is_residual(source) or self._is_region_norm(source)
            for source in self.grouped.sources(number)
        )

    def _is_residual(self, number: int) -> bool:
        """True if a group adds something to what comes along the trunk."""
        group = self.groups[number]
        if group.kind != "memory" or group.elements != self.hidden:
            return False
        trunk = [s for s in group.reads if s == ENTRY or self._is_residual(s)]
        return bool(trunk) and len(group.reads) > 1

    def _is_region_norm(self, number: int) -> bool:
        group = self.groups[number]
        return group.kind == "norm" and all(
            source == ENTRY or self._is_residual(source) for source in self.grouped.sources(number)
        )

    def _norm(self, number: int, group: Group) -> Operator:
        width, goals = group.elements, self.grouped.goals(number)
        split: Split = "sequence"
        kept = 2.0
        sources = self.grouped.sources(number)
        if self._is_region_norm(number):
            before = any(self._comes_to_core(goal) for goal in goals)
            name = "attention_norm" if before else "mlp_norm"
        elif goals == {self.core}:
            name, split, kept = self._head_norm(group), "heads", 1.0
        elif all(self.groups[r].kind != "product" for r in self.grouped.readers(number)):
            name, kept = f"{self._branch(number)}_output_norm", 1.0
        else:
            name = "kv_norm" if sources and self._feeds_keys(goals) else "q_norm"
        return Operator(
            name=name,
            kind="memory",
            split=split,
            weight_elements=group.parameters,
            elements=2.0 * width,
            saved=kept * width,
        )

    def _feeds_keys(self, goals: frozenset[int]) -> bool:
        return any(self._product_role(goal)[0] == "kv_up" for goal in goals if goal in self.groups)

    def _comes_to_core(self, number: int) -> bool:
        """True if a product, or one behind it, is in front of attention."""
        if number == self.core:
            return True
        if self.grouped.goals(number) == {self.core}:
            return True
        return any(self.grouped.goals(goal) == {self.core} for goal in self.grouped.goals(number))

    def _branch(self, number: int) -> str:
        """The half of the layer that a group ends."""
        return "attention" if self.core in self._behind(number) else "mlp"

    def _behind(self, number: int) -> set[int]:
        """The groups on the branch that ends here: until the first norm of the trunk."""
        found: set[int] = set()
        queue = [number]
        while queue:
            for source in self.grouped.sources(queue.pop()):
                if source != ENTRY and source not in found:
                    found.add(source)
                    if not self._is_region_norm(source) and not self._is_residual(source):
                        queue.append(source)
        return found

    def _head_norm(self, group: Group) -> str:
        if not group.weights:
            return "qk_norm_unweighted"
        core = self.attended
        shapes = list(group.weights.values())
        if all(prod(shape) == core.head_dim for shape in shapes):
            return "qk_norm"
        return "qk_norm_per_head" if len(shapes[0]) > 1 else "qk_norm_joint"

    def _dropout(self, number: int, group: Group) -> Operator:
        width = group.elements
        return Operator(
            name=f"{self._branch(number)}_dropout",
            kind="memory",
            split="sequence",
            elements=2.5 * width,
            saved=0.5 * width,
        )

    def _memory(self, number: int, group: Group) -> Operator:
        read, written = sum(group.reads.values()), group.elements
        name, split, saved = self._memory_role(number)
        elements = 2.0 * written if split == "heads" else read + written
        if name == "combine":
            elements = saved + written
        return Operator(
            name=name,
            kind="memory",
            split=split,
            weight_elements=group.parameters,
            elements=elements,
            saved=saved,
        )

    def _memory_role(self, number: int) -> tuple[str, Split, float]:
        group = self.groups[number]
        for pair in self.pairs:
            sources = self.grouped.sources(number)
            if sources == [pair.up] and self.grouped.readers(number) == [pair.down]:
                return f"{pair.name}_activation", "column", group.elements
            if pair.name == "experts" and pair.down in sources:
                return "combine", "sequence", group.reads[pair.down]
        if self.grouped.goals(number) == {self.core} and not group.weights:
            return "rotary", "heads", 0.0
        if self._is_residual(number):
            is_read = self._is_multiplied(number)
            if number == self.grouped.result:  # as the next layer reads it
                is_read = self._is_multiplied(ENTRY)
            return f"{self._half(number)}_residual", "sequence", self.hidden * float(is_read)
        if self._is_sum(group):  # of both branches, to which the trunk is added later
            return "experts_sum" if self.routers else "attention_residual", "sequence", 0.0
        keeps = self._is_multiplied(number)
        module = group.calls[0].module.rpartition(".")[2]
        name = group.calls[0].function.strip("_") if module.isdigit() else module
        return name, "sequence", group.elements * keeps

    def _half(self, number: int) -> str:
        return "mlp" if number == self.grouped.result else "attention"

    def _is_sum(self, group: Group) -> bool:
        is_wide = all(
            elements == self.hidden for elements in (group.elements, *group.reads.values())
        )
        return is_wide and len(group.reads) > 1 and {f.strip("_") for f in group.functions} <= SUMS

    def _is_multiplied(self, number: int) -> bool:
        """True if a product reads what a group writes."""
        return any(self.groups[r].kind == "product" for r in self.grouped.readers(number))
