"""What was read from another engine's file: a plan, a workload, and what is not certain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.errors import Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan, even_split
from triptych.plan.short import FIELDS, Value, default_precision, precision
from triptych.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says beside the file: it fills gaps, and wins over the file's sizes."""

    model: Model
    cluster: Cluster
    sequence_length: int | None = None
    global_batch: int | None = None
    pins: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The user's present plan, as read from a file of `engine`."""

    engine: str
    plan: Plan
    workload: Workload
    assumed: tuple[str, ...] = ()
    not_understood: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()  # the model in the file from MODEL
    fuses_loss: bool = False  # its gradient takes the place of the logits

    def to_json(self) -> dict[str, Any]:
        """What was assumed, what was not understood, where the models differ."""
        return {
            "engine": self.engine,
            "sequence_length": self.workload.sequence_length,
            "global_batch": self.workload.global_batch,
            "assumed": list(self.assumed),
            "not_understood": list(self.not_understood),
            "model_differs": list(self.differs),
        }


@dataclass(slots=True)
class Draft:
    """A plan while it is read: settings by name, and everything that is to be told."""

    asked: Asked
    settings: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    layers: list[int] | None = None
    world: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    accumulation: int | None = None
    bucket_elements: int | None = None
    assumed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def degree(self, name: str) -> int:
        """A setting that is a whole number, 1 if it is not given."""
        return int(self.settings.get(name, 1))

    def pin(self) -> None:
        """Fills settings that the file does not give from `--fix`."""
        for name, value in self.asked.pins.items():
            if name == "precision":
                self.dtypes.setdefault("parameter", str(value))
            elif name == "layers" and self.layers is None and isinstance(value, tuple):
                self.layers = list(value)
            elif name in FIELDS and not isinstance(value, tuple):
                self.settings.setdefault(name, value)

    def assume_world(self, engine: str) -> None:
        """Takes the number of ranks from the cluster if the file does not give it."""
        devices = self.asked.cluster.num_devices
        if self.world is None:
            self.world = devices
            self.assumed.append(f"{devices} ranks, as {self.asked.cluster.name} has devices")
        elif self.world != devices:
            self.problems.append(
                Problem(
                    f"the {engine} file starts {self.world} ranks, but cluster "
                    f"'{self.asked.cluster.name}' has {devices} devices",
                    "both plans are priced on the same devices",
                    f"--cluster with {self.world} devices",
                )
            )

    def divide_world(self, names: str) -> None:
        """Takes `dp` from the ranks and the other degrees; they must divide the ranks."""
        used = self.degree("tp") * self.degree("pp") * self.degree("cp")
        world = self.world or used
        if used < 1 or world % used:
            what = f"{names} = {self.degree('tp')} x {self.degree('pp')} x {self.degree('cp')}"
            rule = f"their product divides the {world} ranks"
            self.problems.append(Problem(f"{what} = {used}", rule, f"a divisor of {world}"))
            return
        given = self.settings.setdefault("dp", world // used)
        if given != world // used:
            rule = f"dp = ranks / (tp x pp x cp) = {world} / {used}"
            self.problems.append(Problem(f"dp = {given}", rule, f"dp={world // used}"))

    def settle_batch(self) -> None:
        """Checks the batch equation as far as the numbers are known."""
        rows = self.degree("microbatch") * self.degree("dp")
        if self.asked.global_batch is not None:
            if self.global_batch not in (None, self.asked.global_batch):
                self.assumed.append(f"--batch {self.asked.global_batch}, not {self.global_batch}")
            self.global_batch = self.asked.global_batch
        if self.global_batch is None:
            self.global_batch = rows
            self.assumed.append(f"global batch {rows}: one micro-batch a data rank")
        if self.global_batch < rows or self.global_batch % rows:
            ranks = f" and dp={self.degree('dp')}" if "dp" in self.settings else ""
            what = f"global batch {self.global_batch} with micro-batch {self.degree('microbatch')}"
            rule = "micro-batch x dp divides the global batch"
            self.problems.append(Problem(what + ranks, rule, f"a multiple of {rows}"))

    def settle_sequence(self, usual: int) -> int:
        """The sequence length: the command line's, the file's or the usual one."""
        wanted, given = self.asked.sequence_length, self.sequence_length
        if wanted is not None and given not in (None, wanted):
            self.assumed.append(f"--seq {wanted}, not {given}")
        if wanted is None and given is None:
            self.assumed.append(f"sequences of {usual} tokens")
        return wanted or given or usual

    def plan(self) -> Plan:
        """The plan of what was read, all else at its default."""
        word = default_precision(self.asked.cluster)
        kinds = precision(self.dtypes.pop("parameter", word))
        kinds = type(kinds)(**{**_fields(kinds), **self.dtypes})
        stages = self.degree("pp") * self.degree("chunks")
        layers = self.layers or list(even_split(self.asked.model.num_layers, stages))
        settings = {key: value for key, value in self.settings.items() if key != "schedule"}
        schedule = self.settings.get("schedule")
        if schedule is None:
            schedule = "interleaved" if self.degree("chunks") > 1 else "1f1b"
        return Plan.uniform(
            self.asked.model.num_layers,
            layers=layers,
            schedule=schedule,
            precision=kinds,
            **settings,
        )


def _fields(kinds: object) -> dict[str, str]:
    names = ("parameter", "gradient", "reduction", "master", "moments")
    return {name: getattr(kinds, name) for name in names}
