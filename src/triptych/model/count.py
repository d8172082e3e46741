"""Counts of a model: parameters, model FLOPs and activation bytes, all from its operators."""

from __future__ import annotations

from collections import Counter

from triptych.model.model import Block, Model
from triptych.model.operator import Operator
from triptych.model.operators import block_operators, embedding_operators, head_operators


def parameters(model: Model) -> int:
    """Trainable parameters; a tied head counts once."""
    blocks = sum(
        count * block_parameters(model, block) for block, count in Counter(model.blocks).items()
    )
    return embedding_parameters(model) + blocks + head_parameters(model)


def active_parameters(model: Model) -> int:
    """Parameters that one token uses: `top_k` of the routed experts, all of the rest.

    Embedding and head are included.
    """
    idle = sum(
        count * sum(op.parameters - op.active_parameters for op in block_operators(model, block))
        for block, count in Counter(model.blocks).items()
    )
    return parameters(model) - idle


def block_parameters(model: Model, block: Block) -> int:
    """Parameters of one layer."""
    return _parameters(block_operators(model, block))


def embedding_parameters(model: Model) -> int:
    """Parameters in front of the first layer: token table, learned positions, embedding norm."""
    return _parameters(embedding_operators(model))


def head_parameters(model: Model) -> int:
    """Parameters behind the last layer: final norm, and the vocabulary matrix unless it is tied.

    A pipeline stage that holds a tied head but not the embedding keeps a copy: `tied_parameters`.
    """
    return _parameters(head_operators(model)) - tied_parameters(model)


def tied_parameters(model: Model) -> int:
    """Parameters that head and embedding share: vocab x hidden if they are tied, else 0."""
    return model.vocab * model.hidden if model.tied else 0


def forward_flops_per_token(model: Model, sequence_length: int, causal: bool = True) -> float:
    """Model FLOPs of the forward pass per token, the head included, the lookup free.

    `causal` counts the half of the attention scores that a causal mask keeps (s/2 a token), as
    Megatron-LM does today; Narayanan et al. 2021 and Korthikanti et al. 2022 count them in full.
    """
    blocks = sum(
        count * block_flops_per_token(model, block, sequence_length, causal)
        for block, count in Counter(model.blocks).items()
    )
    return blocks + head_flops_per_token(model)


def training_flops_per_token(model: Model, sequence_length: int, causal: bool = True) -> float:
    """Model FLOPs of forward and backward per token: 3 x forward, recomputation not counted."""
    return 3.0 * forward_flops_per_token(model, sequence_length, causal)


def block_flops_per_token(
    model: Model, block: Block, sequence_length: int, causal: bool = True
) -> float:
    """Forward FLOPs of one layer per token."""
    operators = block_operators(model, block)
    return sum(op.forward_flops(sequence_length, causal) for op in operators)


def head_flops_per_token(model: Model) -> float:
    """Forward FLOPs of the product with the vocabulary per token: 2hV."""
    return sum(op.forward_flops(1) for op in head_operators(model))


def block_activation_bytes(model: Model, block: Block) -> float:
    """Bytes that one layer keeps per token for its backward pass, in 16 bit, not split at all."""
    return 2.0 * sum(op.saved for op in block_operators(model, block))


def _parameters(operators: tuple[Operator, ...]) -> int:
    return sum(op.parameters for op in operators)
