"""What the user fixed: settings that every plan of a search keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.fields import DEGREES, SETTINGS
from triptych.plan.plan import Plan, even_split
from triptych.plan.short import default_precision, precision, read_words
from triptych.schedule.traits import TRAITS

SEARCHED = (
    "zero",
    "accumulation",
    "schedule",
    "chunks",
    "microbatch",
    "recompute",
    "sequence_parallel",
)
"""Settings that a search varies, besides degrees and layers; the others keep their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Values by full name, as their types; `layers` is a tuple of counts."""

    values: Mapping[str, Any]

    @classmethod
    def read(cls, fixed: Mapping[str, str]) -> Pins:
        """Pins from text. Raises PlanError (an InputError) with every word that cannot be read."""
        values = read_words(",".join(f"{key}={value}" for key, value in fixed.items()))
        own = [f"{key}={fixed[key]}" for key in DEGREES if isinstance(values.get(key), tuple)]
        if own:
            rule = "a search keeps the degrees of all stages the same"
            raise PlanError(Problem(", ".join(own), rule, "one number, or `predict --plan`"))
        return cls(values=values)

    def choices(self, name: str, otherwise: Sequence[Any]) -> tuple[Any, ...]:
        """The values that a search may give a setting: the pinned one alone, if it is pinned."""
        return (self.values[name],) if name in self.values else tuple(otherwise)

    def without(self, name: str) -> Pins:
        """The pins but one."""
        return Pins(values={key: value for key, value in self.values.items() if key != name})

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers of each stage, if pinned."""
        return self.values.get("layers")

    @property
    def chunks(self) -> int:
        """Stages that a pipeline rank runs: pinned, or as few as a pinned schedule has."""
        traits = TRAITS.get(self.values.get("schedule", ""))
        return int(self.values.get("chunks", traits.least_chunks if traits else 1))

    def base_plan(self, model: Model, cluster: Cluster) -> Plan:
        """A plan with every pinned setting; degrees and searched settings at their defaults."""
        word = str(self.values.get("precision", default_precision(cluster)))
        settings = {key: self.values[key] for key in SETTINGS if key in self.values}
        settings.pop("chunks", None)
        plan = Plan.uniform(model.num_layers, precision=precision(word), **settings)
        return plan.with_(chunks=self.chunks)

    def typical_plan(self, model: Model, cluster: Cluster) -> Plan:
        """The pins as one plan on all devices: what to judge when no plan at all is legal."""
        degrees = {axis: self.values.get(axis, 1) for axis in DEGREES}
        chunks = self.chunks
        if self.layers and "pp" not in self.values:
            degrees["pp"] = max(1, len(self.layers) // chunks)
        if "dp" not in self.values:
            used = degrees["tp"] * degrees["pp"] * degrees["cp"]
            degrees["dp"] = max(1, cluster.num_devices // used)
        counts = self.layers or even_split(model.num_layers, degrees["pp"] * chunks)
        uniform = Plan.uniform(model.num_layers, layers=counts, chunks=chunks, **degrees)
        base = self.base_plan(model, cluster)
        return base.with_(stages=uniform.stages, chunks=chunks)
