"""The slowest rank's share of each operator under tensor and expert parallelism.

Shares may be uneven: with 3 KV heads over 2 ranks the slowest has 2, with 503 words over 4 it has
126. What one rank computes, moves, holds and keeps follows from these sizes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.model.operator import Operator

ATTENTION_PRODUCTS = frozenset({"qkv", "q", "q_up", "kv_up", "out"})

REGION_NORMS = frozenset({"attention_norm", "mlp_norm", "final_norm"})
"""Norms whose output, gathered, is what column-parallel products read."""

ENTRY_PRODUCTS = frozenset({"qkv", "mlp_up"})
"""Products that alone read what enters a tensor-parallel region, if it is theirs only."""

_ENTRY_OF = {
    **dict.fromkeys(("attention_norm", "mlp_residual"), "qkv"),
    **dict.fromkeys(("mlp_norm", "attention_residual"), "mlp_up"),
}
"""What makes a region's input, and the product that may be alone in reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """An operator as the slowest rank sees it, per token of a micro-batch.

    `elements` (moved) and `saved` are what every rank of the tensor group has in any case;
    the `sequence_*` parts are divided further by sequence parallelism, and so is what is saved
    `entering` a region, if the backward gathers that again: else it is whole.
    """

    operator: Operator
    k: int
    n: int
    copies: int  # experts on this rank
    query_heads: int
    kv_heads: int
    weight_elements: int  # held by this rank, all its copies
    elements: float
    sequence_elements: float
    saved: float
    sequence_saved: float
    entering_saved: float

    @property
    def is_replicated(self) -> bool:
        """True if all tensor ranks hold the same weights."""
        op = self.operator
        return op.split in ("none", "sequence") or op.name == "qk_norm"


def has_joint_region(block: Block) -> bool:
    """True if attention and MLP stand side by side behind one norm."""
    return block.norms < 2


def _enters_alone(op: Operator, block: Block) -> bool:
    """True if an operator's output enters a region where a single product reads it."""
    if op.name not in _ENTRY_OF or has_joint_region(block):
        return False
    if _ENTRY_OF[op.name] == "qkv":
        return not block.attention.latent
    return isinstance(block.mlp, Mlp)


def local_heads(attention: Attention, tensor: int) -> tuple[int, int]:
    """Query and KV heads of the slowest rank. Beyond the KV heads, each is repeated."""
    if tensor > attention.kv_heads:
        return attention.query_heads // tensor, 1
    kv_heads = math.ceil(attention.kv_heads / tensor)
    return kv_heads * (attention.query_heads // attention.kv_heads), kv_heads


def copies_of(block: Block, tensor: int) -> int:
    """Tensor ranks that hold the same KV head."""
    kv_heads = block.attention.kv_heads
    return 1 if block.attention.latent or tensor <= kv_heads else tensor // kv_heads


def localize(
    op: Operator, model: Model, block: Block | None, tensor: int, expert: int = 1
) -> LocalOperator:
    """The slowest rank's part of an operator; `block` is None for embedding and head."""
    query, key = local_heads(block.attention, tensor) if block else (0, 0)
    share = _share(op, model, block, tensor)
    k, n = _local_shape(op, share)
    copies = op.copies // expert if op.copies > 1 else 1
    saved, sequence_saved = _saved(op, share, query, key)
    enters = block is not None and _enters_alone(op, block)
    divided = op.split == "sequence"
    return LocalOperator(
        operator=op,
        k=k,
        n=n,
        copies=copies,
        query_heads=query,
        kv_heads=query if block and block.attention.latent else key,
        weight_elements=_weights(op, share, k, n) * copies,
        elements=0.0 if divided else op.elements * share,
        sequence_elements=op.elements if divided else 0.0,
        saved=0.0 if enters else saved,
        sequence_saved=sequence_saved,
        entering_saved=saved if enters else 0.0,
    )


def _share(op: Operator, model: Model, block: Block | None, tensor: int) -> float:
    """The slowest rank's part of what tensor parallelism divides; 1 if it does not."""
    if tensor == 1 or op.split in ("none", "sequence"):
        return 1.0
    if op.split == "vocab":
        return math.ceil(model.vocab / tensor) / model.vocab
    assert block is not None, "only the vocabulary is divided outside of layers"
    attention = block.attention
    query, key = local_heads(attention, tensor)
    if op.name == "qkv":
        return (query + 2 * key) / (attention.query_heads + 2 * attention.kv_heads)
    if op.split == "heads" or op.name in ATTENTION_PRODUCTS:
        return query / attention.query_heads
    width = _width(op, block)
    return math.ceil(width / tensor) / width


def _width(op: Operator, block: Block) -> int:
    """The feed-forward width that an operator of the MLP divides."""
    if isinstance(block.mlp, Experts) and op.name.startswith("shared"):
        return block.mlp.shared_width
    return block.mlp.width


def _local_shape(op: Operator, share: float) -> tuple[int, int]:
    if op.split in ("column", "vocab"):
        return op.k, round(op.n * share)
    if op.split == "row":
        return round(op.k * share), op.n
    return op.k, op.n


def _weights(op: Operator, share: float, k: int, n: int) -> int:
    """Weight and bias of one copy; the bias of a row-parallel product is whole on every rank."""
    if op.kind == "gemm":
        has_bias = op.weight_elements > op.k * op.n
        return k * n + (n if has_bias else 0)
    if op.name == "qk_norm":  # one norm of `head_dim`, whatever the heads
        return op.weight_elements
    return round(op.weight_elements * share)


def _saved(op: Operator, share: float, query: int, key: int) -> tuple[float, float]:
    """Saved elements: those that stay as they are, and those that sequence parallelism divides."""
    if op.kind == "attention":
        kv_heads = query if op.kv_heads == op.heads else key
        width = op.head_dim + op.value_dim
        return float((query + kv_heads) * width + 2 * query), 0.0
    if op.split != "sequence":
        return op.saved * share, 0.0
    if op.name in REGION_NORMS and op.saved > op.elements / 2.0:
        return op.saved / 2.0, op.saved / 2.0
    if op.name.endswith("_residual"):  # read by a region, where it is whole
        return op.saved, 0.0
    return 0.0, op.saved
