"""The numbers of the cost model that measured runs decide, and a search over them.

What kernel and network tables decide is not here. Each number starts from a neutral guess: a
typical value that no run of the table has touched, and stays there unless runs decide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module

from triptych.cluster.cluster import Cluster
from triptych.cost.software import Software
from triptych.validate.case import Case
from triptych.validate.program import families

GEMM, OPERATORS = "triptych.cost.kernels.gemm", "triptych.cost.operators"
RATES = "triptych.cost.kernels.rates"
A100, H100, H500, B200 = (
    ("A100-SXM4-80GB", "A100-SXM4-40GB"),
    ("H100-SXM5-80GB",),
    ("H100-SXM-96GB-500W",),
    ("B200-SXM-180GB",),
)
V100 = ("V100-SXM2-16GB", "V100-SXM2-32GB")
MEGATRON, DEEPSPEED, CORE = "Megatron-LM 2021", "Megatron-DeepSpeed 2022", "Megatron Core"
COMPOSER, TITAN = "composer FSDP 2023", "torchtitan (FSDP2)"
ONEFLOW, ALPA = "OneFlow 2021", "Alpa (XLA) 2022"


@dataclass(frozen=True, slots=True)
class Number:
    """One number: of a kind of owner, by name (devices: names), and the guess it starts from."""

    kind: str  # constant, device, link, network, program, kernels
    owner: str | tuple[str, ...]
    field: str
    guess: float
    most: float = math.inf


NUMBERS = (
    Number("constant", GEMM, "POWER_S", 1.2e-3),
    Number("constant", OPERATORS, "MEMORY_BACKWARD", 1.5),
    Number("constant", RATES, "HOST_BACKWARD", 1.6),
    Number("constant", OPERATORS, "NORM_RATE", 0.65),
    Number("device", A100, "gemm_efficiency", 0.78, 0.96),
    Number("device", A100, "memory_efficiency", 0.84, 0.92),
    Number("device", V100, "gemm_efficiency", 0.75, 0.96),
    Number("device", H100, "gemm_efficiency", 0.71, 0.92),
    Number("device", H100, "gemm_burst", 0.92, 0.95),
    Number("device", H500, "gemm_efficiency", 0.5, 0.9),
    Number("device", H500, "gemm_burst", 0.8, 0.9),
    Number("device", B200, "gemm_efficiency", 0.5, 0.8),
    Number("device", B200, "gemm_burst", 0.65, 0.8),
    Number("link", "NVLink2", "efficiency", 0.6, 0.85),
    Number("link", "NVLink3", "efficiency", 0.72, 0.85),
    Number("link", "NVLink5", "efficiency", 0.67, 0.85),
    Number("network", "", "efficiency", 0.85, 0.95),
    Number("kernels", MEGATRON, "traffic", 1.0),
    Number("kernels", MEGATRON, "host", 1.0),
    Number("program", MEGATRON, "accumulation_bytes", 10.0),
    Number("kernels", DEEPSPEED, "traffic", 1.0),
    Number("kernels", DEEPSPEED, "host", 1.9),
    Number("kernels", DEEPSPEED, "loss_bytes", 48.0),
    Number("program", DEEPSPEED, "exchange", 0.6, 1.0),
    Number("program", DEEPSPEED, "scatter", 0.33, 1.0),
    Number("program", DEEPSPEED, "checkpoint_s", 4e-4),
    Number("program", DEEPSPEED, "two_sockets", 1.3),
    Number("program", DEEPSPEED, "message_s", 1e-3),
    Number("program", DEEPSPEED, "accumulation_bytes", 10.0),
    Number("kernels", COMPOSER, "traffic", 1.5),
    Number("kernels", COMPOSER, "loss_bytes", 30.0),
    Number("program", COMPOSER, "hides_shards", 0.25, 0.95),
    Number("kernels", TITAN, "traffic", 1.0),
    Number("program", TITAN, "hides_shards", 0.5, 0.95),
    Number("kernels", CORE, "traffic", 1.0),
    Number("program", CORE, "optimizer_bytes", 28.0),
    Number("program", CORE, "accumulation_bytes", 10.0),
    Number("kernels", ONEFLOW, "traffic", 1.2),
    Number("kernels", ALPA, "traffic", 1.0),
)


PRIOR = 0.01
"""Loss (relative error) that a number must save to move by a factor of e from its guess."""


class Values:
    """Values of some numbers, put into a case when it is priced."""

    def __init__(self, values: Mapping[Number, float]) -> None:
        self.values = dict(values)

    @classmethod
    def neutral(cls) -> Values:
        """The guesses."""
        return cls({number: number.guess for number in NUMBERS})

    def distance(self) -> float:
        """Sum of the squared logarithms of value over guess."""
        return sum(math.log(value / number.guess) ** 2 for number, value in self.values.items())

    def set_constants(self) -> None:
        """Puts the numbers that are constants of modules in their place."""
        for number, value in self.values.items():
            if number.kind == "constant":
                setattr(import_module(str(number.owner)), number.field, value)

    def put_into(self, case: Case) -> Case:
        """The case with these numbers instead of the shipped ones."""
        return replace(case, software=self._software(case), cluster=self._cluster(case.cluster))

    def _software(self, case: Case) -> Software:
        family = families()[case.software.name]
        own = [(n, v) for n, v in self.values.items() if n.owner == family.name]
        kernels = {n.field: v for n, v in own if n.kind == "kernels"}
        tuned = replace(family, **{n.field: v for n, v in own if n.kind == "program"})
        eager = family.eager
        if family.name != TITAN:  # its eager kernels differ
            eager = replace(eager, **kernels)
        tuned = replace(tuned, eager=eager, compiled=replace(family.compiled, **kernels))
        said = {f.name: getattr(case.software, f.name) for f in fields(Software)}
        changed = {k: v for k, v in said.items() if v != getattr(family, k)}
        return replace(tuned, **changed)

    def _cluster(self, cluster: Cluster) -> Cluster:
        group = cluster.groups[0]
        device: dict[str, float] = {}
        link: dict[str, float] = {}
        network: dict[str, float] = {}
        for number, value in self.values.items():
            if number.kind == "device" and group.device.name in number.owner:
                device[number.field] = value
            elif number.kind == "link" and group.link.name == number.owner:
                link[number.field] = value
            elif number.kind == "network":
                network[number.field] = value
        group = replace(
            group, device=replace(group.device, **device), link=replace(group.link, **link)
        )
        return replace(cluster, groups=(group,), network=replace(cluster.network, **network))


def concerns(number: Number, case: Case) -> bool:
    """True if a number can change the price of a case."""
    group = case.cluster.groups[0]
    if number.kind in ("program", "kernels"):
        return case.software.name == number.owner
    if number.kind == "device":
        return group.device.name in number.owner
    return number.kind != "link" or group.link.name == number.owner


def tune(
    cases: Sequence[Case],
    error_of: Callable[[Case], float | None],
    loss_of: Callable[[Sequence[float | None]], float],
    *,
    sweeps: int,
) -> Values:
    """Coordinate search from the neutral guesses: each number up or down as long as it helps.

    What the cases do not decide stays where it was: a number must earn its distance (`PRIOR`).
    """
    found = Values.neutral()
    found.set_constants()
    errors = [error_of(found.put_into(case)) for case in cases]
    best, step = loss_of(errors), dict.fromkeys(NUMBERS, 0.15)
    for _ in range(sweeps):
        for number in NUMBERS:
            concerned = [i for i, case in enumerate(cases) if concerns(number, case)]
            moved = False
            for trial in _trials(number, found.values[number], step[number]):
                before, kept = found.values[number], list(errors)
                found.values[number] = trial
                found.set_constants()
                for i in concerned:
                    errors[i] = error_of(found.put_into(cases[i]))
                loss = loss_of(errors) + PRIOR * found.distance()
                if loss < best - 1e-6:
                    best, moved = loss, True
                    break
                found.values[number], errors = before, kept
            found.set_constants()
            step[number] *= 1.0 if moved else 0.5
    return found


def _trials(number: Number, value: float, step: float) -> Iterator[float]:
    for factor in (math.exp(step), math.exp(-step)):
        trial = min(value * factor, number.most)
        if trial != value:
            yield trial
