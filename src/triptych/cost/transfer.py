"""What hidden states cost on their way from one stage to the next (`plan/transfer.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.cost.setting import Setting
from triptych.cost.site import Site
from triptych.plan.transfer import Spread


class Hop(NamedTuple):
    """A message of one micro-batch: what a rank of the source stage sends, and what tensor ranks
    of the target stage gather of their shares, the size of the whole.
    """

    source: int
    target: int
    sent_bytes: float
    gathered_bytes: float


def hop(
    source: int,
    target: int,
    spreads: Sequence[Spread],
    settings: Sequence[Setting],
    sites: Sequence[Site],
) -> Hop:
    """The message between two stages. With one spread a rank sends all that it holds (unless the
    program splits messages); otherwise its share of what its tensor group holds.
    """
    setting, site, other = settings[source], sites[source], settings[target]
    if spreads[source] == spreads[target] and not site.software.splits_messages:
        return Hop(source, target, site.message_bytes(setting), 0.0)
    sent_bytes = site.activation_bytes(setting) / setting.tensor
    is_gathered = other.tensor > 1 and not other.sequence_parallel
    return Hop(source, target, sent_bytes, is_gathered * sites[target].activation_bytes(other))
