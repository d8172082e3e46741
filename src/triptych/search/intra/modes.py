"""What an axis of a mesh may divide of an operator, and of the tensors it reads and writes.

A tensor of tokens x features is, along one axis of the mesh,

    B   divided by sequences              F   divided by features (heads, columns)
    S   divided by positions              E   divided by experts
    R   whole on every rank               P   a term of a sum on every rank (written, never read)
    G   whole, its gradient a term of a sum (read): what a column-parallel product wants
    g   whole, and such a gradient is welcome (written)

A column-parallel product is then G -> F, a row-parallel one F -> P, data parallelism B -> B,
sequence parallelism S -> S between them: Megatron's layout is one of many. Source: Zheng et al.
2022, "Alpa", sec. 4.1; Korthikanti et al. 2022, sec. 4.2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from triptych.model.operator import Operator, Split

Divides = Literal["", "rows", "positions", "column", "row", "heads"]


class Mode(NamedTuple):
    """What one axis does to an operator: the tensors it reads and writes, and what it divides."""

    name: str
    reads: str
    writes: str
    divides: Divides

    @property
    def split(self) -> Split | None:
        """The features or weights that are divided; None if tokens are, or nothing."""
        return self.divides if self.divides in ("column", "row", "heads") else None

    @property
    def exchanges(self) -> bool:
        """True if tokens go to experts on other ranks, or come back."""
        return (self.reads == "E") != (self.writes == "E")


DATA = Mode("data", "B", "B", "rows")
SEQUENCE = Mode("sequence", "S", "S", "positions")
WHOLE = Mode("whole", "R", "R", "")
COLUMN, ROW = Mode("column", "G", "F", "column"), Mode("row", "F", "P", "row")
FEATURES, HEADS = Mode("features", "F", "F", "column"), Mode("heads", "F", "F", "heads")
EXPERTS = Mode("experts", "E", "E", "positions")  # an even share of the tokens, wherever they are
TOKENS = (DATA, SEQUENCE, WHOLE)
DISPATCH = (
    *TOKENS,
    Mode("to experts", "B", "E", "rows"),
    Mode("to experts", "S", "E", "positions"),
    Mode("partial gradient", "G", "g", ""),
)
COMBINE = (
    *TOKENS,
    Mode("from experts", "E", "B", "rows"),
    Mode("from experts", "E", "S", "positions"),
    Mode("partial sum", "P", "P", ""),
)
ENTRY = Operator(name="input", kind="memory")
"""What the layer before hands over: a node without cost."""


def modes(op: Operator) -> tuple[Mode, ...]:
    """What an axis may do to an operator."""
    if op.name == "dispatch":
        return DISPATCH
    if op.name == "combine":
        return COMBINE
    if op.kind == "attention":
        return (DATA, HEADS, WHOLE)
    if op.kind == "gemm":
        products = () if op.split == "none" else (COLUMN, ROW)
        return (*TOKENS, *products, *((EXPERTS,) if op.copies > 1 else ()))
    if op.name.startswith("experts_"):
        return (*TOKENS, FEATURES, EXPERTS)
    if op.split in ("heads", "column"):
        return (*TOKENS, HEADS if op.split == "heads" else FEATURES)
    return TOKENS


def output_width(op: Operator, hidden: int) -> float:
    """Elements per token that an operator writes."""
    if op.kind == "gemm":
        return float(op.n * op.tokens_factor)
    if op.kind == "attention":
        return float(op.heads * op.value_dim)
    if op.name == "dispatch":
        return op.elements / 2.0
    if op.split == "column":
        return op.saved
    if op.split == "heads":
        return op.elements / 2.0
    return float(hidden)


Flow = tuple[int, int]
"""From one operator to another, by index."""


def flows(operators: tuple[Operator, ...]) -> list[Flow]:
    """Which operator reads what another writes: the order of a layer, its branches and sums.

    Operator 0 is `ENTRY`, and the last one writes what the next layer's entry is.
    """
    found: list[Flow] = []
    last = trunk = region = 0  # written last; the residual stream; what a branch of products reads
    query = routed = 0
    shares_norm = not any(op.name == "mlp_norm" for op in operators)
    for index, op in enumerate(operators):
        if index == 0:
            continue
        name, sources = op.name, [last]
        if name in ("qkv", "q", "q_down") or (name in ("mlp_up", "router") and not shares_norm):
            region = last
        elif name in ("mlp_up", "router"):
            has_norms_behind = operators[1].name != "attention_norm"
            region = last if has_norms_behind else region
            sources = [region]
        if name == "kv_down":
            query, sources = last, [region]
        elif name == "rotary" and query:
            sources = [query, last]
        elif name == "dispatch":
            sources = [region, last]
        elif name in ("shared_up", "shared_gate"):
            routed = routed or last
            sources = [region]
        elif routed and name not in ("shared_activation", "shared_down"):
            sources, routed = [routed, last], 0
        if name.endswith("_residual"):
            sources.append(trunk)
            trunk = index
        found += [(source, index) for source in dict.fromkeys(sources)]
        last = index
    return [*found, (last, 0)]
