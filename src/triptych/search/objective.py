"""What a search makes small: the step time, the memory of the largest rank, GPU-hours or money."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import InputError, Problem, nearest
from triptych.search.bounds import SLACK, Bound
from triptych.search.options import Option, rounded

OBJECTIVES = ("time", "memory", "gpu-hours", "money")

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What to make small. `price` is that of a device for an hour, in any currency.

    On one cluster, whose devices are all used, GPU-hours and money rank plans as time does; between
    clusters of a sweep they do not.
    """

    name: str = "time"
    price: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError for an unknown objective."""
        if self.name not in OBJECTIVES:
            close = nearest(self.name, OBJECTIVES) or OBJECTIVES
            rule = "the objective is one of " + ", ".join(OBJECTIVES)
            raise InputError(Problem(f"objective {self.name}", rule, " or ".join(close)))

    @property
    def is_memory(self) -> bool:
        """True if memory comes before time."""
        return self.name == "memory"

    def bound(self, bound: Bound) -> float:
        """What a set of plans takes at least."""
        return bound.memory_bytes if self.is_memory else bound.time_s

    def option_bound(self, option: Option) -> float:
        """What a plan takes at least."""
        return SLACK * (option.least_peak_bytes if self.is_memory else option.bound_s)

    def value(self, option: Option) -> float:
        """What a plan takes."""
        return option.peak_bytes if self.is_memory else option.step_s

    def order(self, option: Option) -> tuple[float, float]:
        """The objective, and what comes next."""
        key = (option.step_s, rounded(option.peak_bytes))
        return (key[1], key[0]) if self.is_memory else key
