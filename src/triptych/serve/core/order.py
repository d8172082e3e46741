"""The order of all decisions, and how latency objectives enter it.

One number ranks every sequence for its whole life, the time when it is due:

    due = arrival + TTFT objective of its class + priority of its class x ageing time

Waiting requests are started, and prompts computed, in this order; blocks are taken from the
sequences that are due last. Because the number never changes and only finitely many requests can
be due before any given one, nothing starves: a priority level is worth `ageing_s` of waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from triptych.errors import InputError, Problem, nearest
from triptych.serve.core.request import LatencyClass, Request
from triptych.serve.core.sequence import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Latency classes and what they are worth.

    Args:
        classes: at least one; names differ.
        ageing_s: seconds of waiting that make up for one priority level.
        refuses_late: refuse on arrival what is predicted to miss its TTFT objective.
        margin: part of an objective that a prediction must leave, for what it cannot know.

    """

    classes: tuple[LatencyClass, ...] = (LatencyClass(),)
    ageing_s: float = 30.0
    refuses_late: bool = False
    margin: float = 0.1
    by_name: dict[str, LatencyClass] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {latency.name: latency for latency in self.classes}
        problems = [
            Problem(f"latency class {c.name}: {name} {value}", "above 0 seconds")
            for c in self.classes
            for name, value in (("ttft_s", c.ttft_s), ("tpot_s", c.tpot_s))
            if not value > 0
        ]
        if len(by_name) != len(self.classes) or not by_name:
            problems.append(
                Problem(f"latency classes {[c.name for c in self.classes]}", "one each")
            )
        if not (self.ageing_s >= 0 and math.isfinite(self.ageing_s)):
            problems.append(Problem(f"ageing_s {self.ageing_s}", "finite and not negative"))
        if problems:
            raise InputError(problems)
        object.__setattr__(self, "by_name", by_name)

    def class_of(self, request: Request) -> LatencyClass:
        """The class of a request; raises `InputError` with the nearest names."""
        found = self.by_name.get(request.latency_class)
        if found is None:
            close = nearest(request.latency_class, self.by_name) or list(self.by_name)
            raise InputError(
                Problem(
                    f"latency class {request.latency_class!r}",
                    "a class of this server",
                    " | ".join(close),
                )
            )
        return found

    def order(self, request: Request) -> Order:
        """The place of a request's first continuation among all."""
        due_s = request.arrival_s + self.lead_s(self.class_of(request))
        return (due_s, request.id, 0)

    def lead_s(self, latency: LatencyClass) -> float:
        """From arrival to due time."""
        return latency.ttft_s + latency.priority * self.ageing_s
