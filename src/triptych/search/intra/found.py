"""The layout of the operators of a stage, as a value: what it takes no solver to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """An axis of a stage's mesh."""

    role: str
    size: int


Operators = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of operators, and what each axis does to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layers of one kind in stages of one mesh: what each axis divides of each operator.

    `operators` are as the plan runs them, `seconds` of a micro-batch in one layer: operators and
    exchanges, without the host's time. `best` is the fastest of all layouts, whether a plan has
    it or not, `best_s` its seconds, `roles` the name of each axis in it, if all have one.
    """

    stages: tuple[int, ...]
    kind: int
    axes: tuple[Axis, ...]
    operators: Operators
    seconds: float
    best: Operators
    best_s: float
    roles: tuple[str, ...] | None

    @property
    def is_best(self) -> bool:
        """True if no layout is faster than what the plan does."""
        return self.best == self.operators

    def to_json(self) -> dict[str, Any]:
        """Operators with what each axis does."""
        return {
            "stages": list(self.stages),
            "kind": self.kind,
            "axes": [{"role": axis.role, "size": axis.size} for axis in self.axes],
            "operators": _listed(self.operators),
            "seconds": self.seconds,
            "best": _listed(self.best),
            "best_s": self.best_s,
            "roles": list(self.roles) if self.roles else None,
        }


def _listed(operators: Operators) -> list[dict[str, Any]]:
    return [{"name": name, "axes": list(modes)} for name, modes in operators]
