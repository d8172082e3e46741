"""Whose step is next where several models share devices: weighted fair turns.

Each member has a virtual time that grows by the seconds its steps take, divided by its share; the
one with the least goes next. Whoever had nothing to do comes back at the virtual time of the last
turn: nobody saves turns up, and the part of an idle member goes to the others.

Source: start-time fair queueing (Goyal, Vin and Cheng 1996).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Member = TypeVar("Member")


class Claim(NamedTuple):
    """What a model may claim of the devices that it shares.

    `guarantee` is a share of their time, and of their room for keys and values, that others cannot
    take while the model wants it; what is not guaranteed to anybody is divided by `weight`.
    """

    weight: float = 1.0
    guarantee: float = 0.0


def shares(claims: Sequence[Claim]) -> list[float]:
    """The share of each when all are busy; they add up to 1."""
    rest = 1.0 - sum(claim.guarantee for claim in claims)
    total = sum(claim.weight for claim in claims)
    return [claim.guarantee + rest * claim.weight / total for claim in claims]


class Turns(Generic[Member]):
    """Virtual times of members; seconds come from whoever runs the steps."""

    def __init__(self, shares: Mapping[Member, float]) -> None:
        self._shares: dict[Member, float] = dict(shares)
        self._virtual_s = dict.fromkeys(self._shares, 0.0)
        self._now_s = 0.0

    def share_out(self, shares: Mapping[Member, float]) -> None:
        """Other members or other shares from now on; who stays keeps its virtual time."""
        known = self._virtual_s
        self._shares = dict(shares)
        self._virtual_s = {member: known.get(member, self._now_s) for member in shares}

    def woke(self, member: Member) -> None:
        """Takes in that a member has steps to run again."""
        self._virtual_s[member] = max(self._virtual_s[member], self._now_s)

    def next(self, waiting: Iterable[Member]) -> Member:
        """Who goes next of some; of equals the first."""
        chosen = min(waiting, key=self._virtual_s.__getitem__)
        self._now_s = self._virtual_s[chosen]
        return chosen

    def took(self, member: Member, seconds: float) -> None:
        """Takes in how long a step of a member ran; one that has gone since is no matter."""
        if member in self._shares:
            self._virtual_s[member] += seconds / self._shares[member]
