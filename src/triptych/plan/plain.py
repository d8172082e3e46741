"""Which layers are of the plain kind, that the runtime has written out.

    x + o(attention(q, k, v of norm(x))), then the same with down(silu(gate) * up)

RMSNorm in front of each half, rotary positions or none, grouped queries, biases and norms of heads
as a family likes, a factor on each half. A family is marked in `families.py`, and admitted by the
parity test like any other.
"""

from __future__ import annotations

from triptych.model.model import Block, Mlp, Model
from triptych.plan.families import FAMILIES


def is_plain(model: Model, block: Block) -> bool:
    """True if the runtime runs a layer as it has written it, unless it is compiled."""
    family = FAMILIES.get(model.family)
    if family is None or not family.plain or not isinstance(block.mlp, Mlp):
        return False
    return block.mlp.gated and not (model.dropout or block.attention.dropout)
