"""ZeRO-2 and ZeRO-3: communication inside every micro-batch.

ZeRO-2 reduce-scatters a micro-batch's gradients in its backward (unless they stay whole until the
last one); ZeRO-3 also gathers parameters ahead of each layer, in the forward and again in the
backward, and the embedding and the head in the forward (domain.md section 2).
"""

from __future__ import annotations

from typing import NamedTuple

from triptych.cost.holdings import Holdings
from triptych.cost.kernels.collectives import Group
from triptych.cost.storage import Storage

OVERLAP = 0.8
"""Share of compute behind which it can hide (a prefetch of one unit)."""


class Exposed(NamedTuple):
    """Exposed seconds that a pass of one micro-batch gains."""

    forward_s: float
    backward_s: float


def sharded_pass(
    held: Holdings,
    num_units: int,
    num_layers: int,
    storage: Storage,
    data: Group,
    *,
    forward_s: float,
    backward_s: float,
    most_hidden: float,
) -> Exposed:
    """Exposed seconds of a stage's gathers and scatters; all units count as equally large.

    At most a part `most_hidden` of them hides behind compute.
    """
    if storage.zero < 2 or data.size == 1:
        return Exposed(0.0, 0.0)
    unit = held.total / num_units
    scatter_s = data.scatter_s(unit * storage.reduction_bytes) if storage.reduces_each else 0.0
    gather_s = data.gather_s(unit * storage.parameter_bytes) if storage.zero >= 3 else 0.0
    most = min(most_hidden, data.free_share)
    return Exposed(
        _exposed_s(num_units * gather_s, OVERLAP * forward_s, most),
        _exposed_s(num_layers * gather_s + num_units * scatter_s, OVERLAP * backward_s, most),
    )


def _exposed_s(total_s: float, hidden_s: float, most_hidden: float) -> float:
    return total_s - min(hidden_s, most_hidden * total_s)
