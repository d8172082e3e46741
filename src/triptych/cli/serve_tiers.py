"""`--tier NAME=TTFT[,TPOT[,PRIORITY]]`: latency classes of a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from triptych.errors import InputError, Problem
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass

_RULE = "NAME=TTFT[,TPOT[,PRIORITY]]: seconds, inf for none, and a level from 0"
_WORKS = "--tier flex=60,inf,1"


def policy_of(default: LatencyClass, tiers: Sequence[str], refuses_late: bool) -> Policy:
    """The classes of a server: `default`, and those that requests name as their `service_tier`.

    Raises InputError with every tier that cannot be.
    """
    found: list[LatencyClass] = []
    problems: list[Problem] = []
    for text in tiers:
        try:
            found.append(_tier(text))
        except ValueError:
            problems.append(Problem(f"--tier {text}", _RULE, _WORKS))
    names = [default.name, *(tier.name for tier in found)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what, rule = f"--tier {', '.join(twice)} twice", "a name belongs to one class"
        problems.append(Problem(what, rule, "--slo-ttft and --slo-tpot for default"))
    if problems:
        raise InputError(problems)
    return Policy(classes=(default, *found), refuses_late=refuses_late)


def _tier(text: str) -> LatencyClass:
    """Raises ValueError for what is no tier."""
    name, _, numbers = text.partition("=")
    ttft, *more = numbers.split(",")
    tpot, level = [*more, *("inf", "0")[len(more) :]]
    found = LatencyClass(name=name, ttft_s=float(ttft), tpot_s=float(tpot), priority=int(level))
    if not (name and 0 < found.ttft_s < math.inf and found.tpot_s > 0 and found.priority >= 0):
        raise ValueError(text)
    return found
