"""What Muon asks for: products that make a matrix's momentum orthogonal, and one moment only.

Newton-Schulz on an m x n matrix (m <= n), in bf16: X X' (2 m^2 n), its square (2 m^3) and the
product with X (2 m^2 n), five times (Jordan et al. 2024; `torch.optim.Muon`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from triptych.cost.shard import LocalOperator
from triptych.model.model import Block

STEPS = 5


class Matrices(NamedTuple):
    """The matrices of a layer: their elements, and the FLOPs of an update of all of them."""

    elements: int
    flops: int


def dense_matrices(local: Iterable[LocalOperator], block: Block) -> Matrices:
    """Those outside of experts."""
    return _counted(local, block, of_experts=False)


def expert_matrices(local: Iterable[LocalOperator], block: Block) -> Matrices:
    """Those of the routed experts on a rank."""
    return _counted(local, block, of_experts=True)


def _counted(local: Iterable[LocalOperator], block: Block, *, of_experts: bool) -> Matrices:
    elements = flops = 0
    for op in local:
        if op.operator.kind == "gemm" and (op.operator.copies > 1) == of_experts:
            for rows, columns in _shapes(op, block):
                elements += op.copies * rows * columns
                flops += op.copies * update_flops(rows, columns)
    return Matrices(elements, flops)


def update_flops(rows: int, columns: int) -> int:
    """FLOPs of making one matrix orthogonal."""
    small, large = sorted((rows, columns))
    return STEPS * (4 * small**2 * large + 2 * small**3)


def _shapes(op: LocalOperator, block: Block) -> Iterator[tuple[int, int]]:
    """The matrices of a product that is one operator: queries, keys, values; gate and up."""
    attention = block.attention
    if op.operator.name == "qkv":
        yield from ((op.k, n) for n in (attention.query_width, *(attention.kv_width,) * 2))
    elif op.operator.name in ("mlp_up", "shared_up", "experts_up") and block.mlp.gated:
        yield from ((op.k, op.n // 2),) * 2
    else:
        yield op.k, op.n
