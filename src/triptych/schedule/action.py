"""The letters that pipeline programs are written in.

`2F0` is the forward of micro-batch 0 on stage 2. Kinds:

    F, B            forward, full backward
    I, W            input-gradient and weight-gradient halves of a backward
    SEND_F, RECV_F  activations to the next stage, from the previous one
    SEND_B, RECV_B  activation gradients to the previous stage, from the next one

The stage of a SEND or RECV is the stage that does it: `2RECV_F0` is what stage 2 receives
before `2F0`, and pairs with `1SEND_F0`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from triptych.errors import ScheduleError


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one pipeline rank."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads `2F0`, `1SEND_B3`, ... Raises ScheduleError."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"'{text}' is not an action; examples: 2F0, 1B3, 0SEND_F2")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))
