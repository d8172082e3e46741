"""What every export shares: the settings that a plan uses, and how none of them gets lost.

A target writes a text and names, setting by setting, what it said and what it could not say.
What it forgets to name counts as not said, so that nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.model.model import Model
from triptych.plan.fields import PRECISION
from triptych.plan.plan import Plan
from triptych.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One setting that a target cannot express: its value, why, and what stands instead."""

    field: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as another engine's configuration, and what that cannot say."""

    target: str
    text: str
    notes: tuple[Note, ...]

    def to_json(self) -> dict[str, Any]:
        """The part `export` of a JSON document."""
        notes = [{"field": n.field, "value": n.value, "why": n.why} for n in self.notes]
        return {"target": self.target, "text": self.text, "not_expressed": notes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is exported: a plan, and the model, cluster and workload that it is for."""

    plan: Plan
    model: Model
    cluster: Cluster
    workload: Workload
    source: str = ""  # MODEL as the user gave it

    @property
    def nodes(self) -> int:
        """Nodes of the cluster."""
        return sum(group.nodes for group in self.cluster.groups)

    @property
    def accumulation(self) -> int:
        """Micro-batches a step on each data rank."""
        return self.plan.num_microbatches(self.workload.global_batch)


@dataclass(slots=True)
class Account:
    """Which settings a target has said, and why it could not say others."""

    subject: Subject
    said: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)

    def say(self, *names: str) -> None:
        """Marks settings as expressed."""
        self.said |= set(names)

    def refuse(self, name: str, why: str) -> None:
        """Marks a setting as not expressed."""
        self.notes.append(Note(field=name, value=self._value(name), why=why))

    def say_or_refuse(self, name: str, is_said: bool, why: str) -> None:
        """Marks a setting as one or the other."""
        self.say(name) if is_said else self.refuse(name, why)

    def remark(self, name: str, value: object, why: str) -> None:
        """Adds a line about something that is no setting of a plan, such as a model's feature."""
        self.notes.append(Note(field=name, value=text_of(value), why=why))

    def close(self, otherwise: str) -> tuple[Note, ...]:
        """All notes. Settings that nobody named get the reason `otherwise`."""
        noted = {note.field for note in self.notes}
        values = used(self.subject.plan)
        rest = [
            Note(field=name, value=text_of(value), why=otherwise)
            for name, value in values.items()
            if name not in self.said and name not in noted
        ]
        kept = [note for note in self.notes if note.field in values or "." in note.field]
        return (*kept, *rest)

    def _value(self, name: str) -> str:
        return text_of(used(self.subject.plan).get(name))


def used(plan: Plan) -> Mapping[str, Any]:
    """The settings of a uniform plan that have an effect in it, by name."""
    return dict(_used(plan))


def _used(plan: Plan) -> Iterator[tuple[str, Any]]:
    yield from ((axis, getattr(plan, axis)) for axis in ("tp", "pp", "dp", "cp", "ep"))
    replicas = plan.dp * plan.cp
    values: tuple[tuple[bool, str, Any], ...] = (
        (len(plan.stages) > 1, "layers", tuple(stage.num_layers for stage in plan.stages)),
        (replicas > 1, "zero", plan.zero),
        (replicas > 1 and plan.zero > 0, "hybrid_shard", plan.shards_of(plan.stages[0])),
        (plan.zero > 1, "accumulation", "reduce_each" if plan.reduces_each else "reduce_last"),
        (replicas > 1, "bucket_bytes", plan.bucket_bytes),
        (replicas > 1 and plan.zero == 3, "prefetch", plan.prefetch),
        (len(plan.stages) > 1, "schedule", plan.schedule),
        (plan.chunks > 1, "chunks", plan.chunks),
        (True, "microbatch", plan.microbatch),
        (True, "recompute", plan.recompute),
        (plan.recompute_every > 1, "recompute_every", plan.recompute_every),
        (plan.shard_activations, "shard_activations", True),
        (plan.tp > 1, "sequence_parallel", plan.sequence_parallel),
        (plan.offload != "none", "offload", plan.offload),
        (True, "attention", plan.attention),
        (plan.cp > 1, "context_method", plan.context_method),
        (plan.compile, "compile", True),
        (bool(plan.layouts), "layouts", dict(plan.layouts)),
    )
    yield from ((name, value) for is_used, name, value in values if is_used)
    yield from ((f"precision.{key}", getattr(plan.precision, key)) for key in PRECISION)


def text_of(value: object) -> str:
    """A value as a plan's short form writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def commented(notes: tuple[Note, ...], mark: str = "#") -> str:
    """The notes as comment lines, with a heading if there are any."""
    lines = [f"{mark} Not expressed here:", *(f"{mark}   {note}" for note in notes)]
    return "\n".join(lines) + "\n" if notes else ""
