"""What is placed: models with their stage times in each shape of group, and the devices.

Source: AlpaServe (2302.11665), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triptych.errors import InputError, Problem
from triptych.units import GIB


class Shape(NamedTuple):
    """The form of a group: pipeline stages x tensor ranks; written `4x2`."""

    pipeline: int
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Devices of a group of this shape."""
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"{self.pipeline}x{self.tensor}"


def read_shape(text: str) -> Shape:
    """`4x2` as 4 pipeline stages of 2 tensor ranks.

    Raises:
        InputError: if it is not two whole numbers from 1.

    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(Problem(f"shape {text!r}", "PIPELINExTENSOR, both from 1", "4x2"))
    return Shape(int(parts[0]), int(parts[1]))


@dataclass(frozen=True, slots=True)
class Profile:
    """A model in a group of one shape: seconds of each stage, weights of its fullest device."""

    stage_s: tuple[float, ...]
    device_bytes: float


@dataclass(frozen=True, slots=True)
class Served:
    """A model to be placed, with a profile for each shape that it can take."""

    name: str
    profiles: Mapping[Shape, Profile]

    @property
    def alone_s(self) -> float:
        """Latency of one request where nothing else runs, in the smallest shape."""
        shape = min(self.profiles, key=lambda s: (s.devices, s.pipeline))
        return sum(self.profiles[shape].stage_s)


@dataclass(frozen=True)
class Fleet:
    """Devices of one kind and the models that they shall serve.

    Args:
        models: in the order of the numbers that traces use.
        num_devices: all devices.
        device_bytes: memory for weights on each.
        overhead_s: added to each request outside the devices.

    """

    models: tuple[Served, ...]
    num_devices: int
    device_bytes: float
    overhead_s: float = 0.0

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes that any model can take on these devices, small ones first."""
        found = {shape for model in self.models for shape in model.profiles}
        usable = [shape for shape in found if shape.devices <= self.num_devices]
        return tuple(sorted(usable, key=lambda s: (s.devices, s.tensor)))

    def bytes_of(self, model: int, shape: Shape) -> float:
        """Weights of a model on the fullest device of a group; infinite if it has no profile."""
        profile = self.models[model].profiles.get(shape)
        return math.inf if profile is None else profile.device_bytes

    def check(self) -> None:
        """Refuses what no placement can serve.

        Raises:
            InputError: with every model that fits no group, and by how many bytes.

        """
        problems = [self._unplaceable(i) for i in range(len(self.models))]
        if found := [problem for problem in problems if problem is not None]:
            raise InputError(found)

    def _unplaceable(self, model: int) -> Problem | None:
        """Why a model fits no group; None if it fits one."""
        name, least = self.models[model].name, self._least_bytes(model)
        if math.isinf(least):
            shapes = ", ".join(map(str, sorted(self.models[model].profiles))) or "none"
            rule = f"a shape of at most {self.num_devices} devices"
            return Problem(f"{name}: stage_s of {shapes}", rule, "stage_s of a smaller shape")
        if least <= self.device_bytes:
            return None
        return Problem(
            f"{name}: {least / GIB:.2f} GiB on a device in its best shape",
            f"at most the {self.device_bytes / GIB:.2f} GiB of a device",
            "stage_s of a larger shape, or less memory a weight",
        )

    def _least_bytes(self, model: int) -> float:
        return min((self.bytes_of(model, shape) for shape in self.shapes), default=math.inf)


def evenly(
    stage_s: Sequence[float], weight_bytes: float, shape: Shape, stage_overhead: float = 0.0
) -> Profile:
    """A profile of measured stages, weights split evenly over all devices.

    `stage_overhead` lengthens each stage by this share for every stage of the line.
    """
    longer = 1 + stage_overhead * shape.pipeline
    return Profile(tuple(s * longer for s in stage_s), weight_bytes / shape.devices)
