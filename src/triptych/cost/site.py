"""Where and for what a piece of a model is priced."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cost.kernels.collectives import Group
from triptych.cost.kernels.rates import Rates
from triptych.cost.setting import Setting
from triptych.cost.software import Software
from triptych.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A model, its sequences, a device's rates, the program and the groups that a layer uses."""

    model: Model
    sequence_length: int
    rates: Rates
    software: Software
    tensor: Group
    context: Group
    expert: Group

    def tokens(self, setting: Setting) -> float:
        """Tokens of a micro-batch on a rank."""
        return setting.microbatch * self.sequence_length / setting.context

    def activation_bytes(self, setting: Setting) -> float:
        """Bytes of a micro-batch's hidden states [b, s, h], not divided by sequence parallelism."""
        return self.tokens(setting) * self.model.hidden * self.rates.element_bytes

    def message_bytes(self, setting: Setting) -> float:
        """Bytes of the hidden states that one rank hands to the next stage."""
        return self.activation_bytes(setting) / setting.sequence_split
