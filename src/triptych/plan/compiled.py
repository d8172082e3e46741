"""Which layers `compile` compiles."""

from __future__ import annotations

from triptych.model.model import Block, Experts


def obstacle(block: Block, *, drops: bool, context: int) -> str | None:
    """Why a layer runs as it is under `compile`; None if it is compiled.

    `drops`: the model has dropout; `context`: ranks that share its sequences.
    """
    reasons = (
        (isinstance(block.mlp, Experts), "its experts get as many tokens as its router sends"),
        (drops or block.attention.dropout, "dropout draws a mask for every sequence"),
        (context > 1, "its attention passes keys from rank to rank"),
    )
    return next((reason for is_so, reason in reasons if is_so), None)
