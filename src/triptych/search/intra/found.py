"""The layout of the operators of a stage, as a value: what it takes no solver to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """An axis of a stage's mesh."""

    role: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layers of one kind in stages of one mesh: what each axis divides of each operator.

    `seconds` of a micro-batch in one layer, operators and exchanges, without the host's time;
    `planned_s` as the plan runs it. `roles` name the axes if the layout has a name.
    """

    stages: tuple[int, ...]
    kind: int
    axes: tuple[Axis, ...]
    operators: tuple[tuple[str, tuple[str, ...]], ...]
    roles: tuple[str, ...] | None
    seconds: float
    planned_s: float | None

    @property
    def is_planned(self) -> bool:
        """True if nothing is better than what the plan does."""
        return self.planned_s is not None and self.seconds >= self.planned_s * (1 - 1e-6)

    def to_json(self) -> dict[str, Any]:
        """Operators with what each axis does."""
        return {
            "stages": list(self.stages),
            "kind": self.kind,
            "axes": [{"role": axis.role, "size": axis.size} for axis in self.axes],
            "operators": [{"name": name, "axes": list(modes)} for name, modes in self.operators],
            "roles": list(self.roles) if self.roles else None,
            "seconds": self.seconds,
            "planned_s": self.planned_s,
            "runnable": self.is_planned,
        }
