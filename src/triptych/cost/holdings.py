"""What one rank holds of a model: parameters by how their gradients travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.cost.orthogonal import dense_matrices, expert_matrices
from triptych.cost.shard import LocalOperator
from triptych.model.model import Block

_PARTIAL = frozenset({"qk_norm", "router", "shared_gate", "q_down", "q_norm", "kv_down", "kv_norm"})
"""Replicated weights inside a tensor-parallel region."""


class Holdings(NamedTuple):
    """Parameter elements on the slowest rank.

    `replicated` are the same on all tensor ranks, `copied` are KV heads repeated on several; both
    are counted in `dense` (experts' output biases in `expert`). `tied` is the table that first and
    last stage both hold. Under Muon `matrices` and `expert_matrices` are what it updates, one by
    one, with so many FLOPs.
    """

    dense: int = 0
    expert: int = 0  # routed experts: their gradients meet fewer ranks
    replicated: int = 0
    partial: int = 0  # replicated weights whose gradients are partial even without SP
    copied: int = 0
    tied: int = 0
    matrices: int = 0
    expert_matrices: int = 0
    matrix_flops: int = 0
    expert_matrix_flops: int = 0

    @property
    def total(self) -> int:
        """All parameters on the rank."""
        return self.dense + self.expert

    def plus(self, other: Holdings, times: int = 1) -> Holdings:
        """The sum with `times` another."""
        return Holdings(*(a + times * b for a, b in zip(self, other, strict=True)))


def with_matrices(held: Holdings, local: Sequence[LocalOperator], block: Block) -> Holdings:
    """The holdings of a layer with what Muon updates."""
    dense, expert = dense_matrices(local, block), expert_matrices(local, block)
    return held._replace(
        matrices=dense.elements,
        expert_matrices=expert.elements,
        matrix_flops=dense.flops,
        expert_matrix_flops=expert.flops,
    )


def holdings(
    local: Iterable[LocalOperator], block: Block | None, hidden: int, tensor: int
) -> Holdings:
    """The parameters of a layer (or of an end of the model) on the slowest rank."""
    dense = expert = replicated = partial = 0
    for op in local:
        if op.operator.copies > 1:
            expert += op.weight_elements
            replicated += _output_biases(op)
            partial += _output_biases(op)  # one rank adds them
            continue
        dense += op.weight_elements
        replicated += op.weight_elements if op.is_replicated else 0
        partial += op.weight_elements if op.operator.name in _PARTIAL else 0
    copied = 0
    if block is not None and not block.attention.latent and tensor > block.attention.kv_heads:
        copied = 2 * block.attention.head_dim * (hidden + int(block.attention.qkv_bias))
    return Holdings(dense, expert, replicated, partial, copied)


def _output_biases(op: LocalOperator) -> int:
    """Bias elements of experts' last products, which every tensor rank holds."""
    has_bias = op.weight_elements > op.k * op.n * op.copies
    return op.n * op.copies if op.operator.split == "row" and has_bias else 0
