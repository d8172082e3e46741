"""What the slowest rank of each stage of a serving plan holds: operators, weights, cached tokens.

It depends on the model, the stages, the tensor degree and the dtypes, not on batch, chunk or
engine, so that a search makes it once for all of those.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from triptych.cost.shard import ATTENTION_PRODUCTS, LocalOperator, localize
from triptych.model.model import Attention, Block, Experts, Model
from triptych.model.operators import block_operators, embedding_operators, head_operators
from triptych.plan.serving import ServingPlan
from triptych.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A kind of layer, `count` of which a stage has."""

    products: tuple[LocalOperator, ...]
    core: LocalOperator  # attention
    moved: float  # elements a token of everything else
    window: int | None
    cache_elements: int  # keys and values of a token
    width: int  # elements of a head that a decode multiplies for each cached token
    weights_bytes: float
    inner: float  # widest output of a product
    sums: int  # all-reduces
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Kinds of layers, and the bytes of all weights that a rank holds."""

    layers: tuple[Layer, ...]
    weights_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All stages, and what comes behind the last layer."""

    stages: tuple[Stage, ...]
    head: LocalOperator
    hidden: int
    vocab: int


def layout(model: Model, plan: ServingPlan) -> Layout:
    """The layout of a plan."""
    edges = [sum(plan.layers[:index]) for index in range(plan.pp + 1)]
    stages = []
    for index, (start, stop) in enumerate(pairwise(edges)):
        kinds = tuple(
            layer(model, block, plan, count)
            for block, count in Counter(model.blocks[start:stop]).items()
        )
        weights = sum(kind.weights_bytes * kind.count for kind in kinds)
        weights += plan.wide_bytes * _ends(model, plan.tensor, index == 0, index == plan.pp - 1)
        stages.append(Stage(layers=kinds, weights_bytes=weights))
    head = next(op for op in head_operators(model) if op.kind == "gemm")
    return Layout(
        stages=tuple(stages),
        head=localize(head, model, None, plan.tensor),
        hidden=model.hidden,
        vocab=model.vocab,
    )


def layer(model: Model, block: Block, plan: ServingPlan, count: int = 1) -> Layer:
    """A block on the slowest rank."""
    local = [localize(op, model, block, plan.tensor) for op in block_operators(model, block)]
    products = tuple(op for op in local if op.operator.kind == "gemm")
    others = [op for op in local if op.operator.kind == "memory"]
    return Layer(
        products=products,
        core=next(op for op in local if op.operator.kind == "attention"),
        moved=sum(op.elements + op.sequence_elements for op in others),
        window=block.attention.window,
        cache_elements=cache_elements(block.attention, plan.tensor),
        width=_width(block.attention),
        weights_bytes=sum(op.weight_elements * weight_bytes(op, plan) for op in local),
        inner=_inner(block) / plan.tensor,
        sums=1 if block.norms == 1 else 2,
        count=count,
    )


def cache_elements(attention: Attention, tensor: int) -> int:
    """Elements that a token keeps in the cache of one rank and layer.

    A latent is whole on every rank (DeepSeek-V2, sec. 2.1), KV heads at most down to one a rank.
    """
    if attention.latent:
        return attention.latent.kv_rank + attention.latent.rope_dim
    return 2 * max(1, -(-attention.kv_heads // tensor)) * attention.head_dim


def _width(attention: Attention) -> int:
    """Key plus value of a head; with latents queries and outputs are brought to their width."""
    latent = attention.latent
    return 2 * latent.kv_rank + latent.rope_dim if latent else 2 * attention.head_dim


def is_wide(local: LocalOperator, plan: ServingPlan) -> bool:
    """True for a product whose weights stay in 16 bit."""
    return plan.wide_attention and local.operator.name in ATTENTION_PRODUCTS


def weight_bytes(local: LocalOperator, plan: ServingPlan) -> float:
    """Bytes of a weight: the plan's dtype for products, 16 bit for what is small."""
    if local.operator.kind != "gemm" or is_wide(local, plan):
        return plan.wide_bytes
    return DTYPE_BYTES[plan.weights]


def _inner(block: Block) -> float:
    if isinstance(block.mlp, Experts):
        return 2.0 * (block.mlp.top_k * block.mlp.width + block.mlp.shared_width)
    return float(block.mlp.width * (2 if block.mlp.gated else 1))


def _ends(model: Model, tensor: int, has_embedding: bool, has_head: bool) -> float:
    """Elements of embedding and head; a tied head has none of its own where the embedding is."""
    operators = list(embedding_operators(model)) if has_embedding else []
    if has_head and not (model.tied and has_embedding):
        operators += head_operators(model)
    return float(sum(localize(op, model, None, tensor).weight_elements for op in operators))
