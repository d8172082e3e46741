"""The decision: groups of devices and the models that each holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from triptych.errors import InputError, Problem
from triptych.fleet.models import Fleet, Shape
from triptych.simulate import single_shot
from triptych.units import GIB


class Group(NamedTuple):
    """Devices of one shape and the numbers of the models on them."""

    shape: Shape
    models: frozenset[int] = frozenset()

    def bytes_in(self, fleet: Fleet) -> float:
        """Weights on its fullest device."""
        return sum(fleet.bytes_of(model, self.shape) for model in self.models)

    def takes(self, model: int, fleet: Fleet) -> bool:
        """Whether a model that it does not hold yet fits beside the others."""
        if model in self.models:
            return False
        needed = self.bytes_in(fleet) + fleet.bytes_of(model, self.shape)
        return needed <= fleet.device_bytes

    def with_model(self, model: int) -> Group:
        """The same group with one model more."""
        return Group(self.shape, self.models | {model})

    def without(self, model: int) -> Group:
        """The same group with one model less."""
        return Group(self.shape, self.models - {model})


@dataclass(frozen=True, slots=True)
class Placement:
    """Groups in a fixed order; of groups that are equally free, a request takes the first."""

    groups: tuple[Group, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.shape.devices for group in self.groups)

    @property
    def shapes(self) -> Counter[Shape]:
        """How many groups of each shape."""
        return Counter(group.shape for group in self.groups)

    def put(self, index: int, group: Group) -> Placement:
        """The same with one group exchanged."""
        return Placement((*self.groups[:index], group, *self.groups[index + 1 :]))

    def named(self, fleet: Fleet) -> list[tuple[Shape, list[str]]]:
        """Shapes, and models by name, as files have them."""
        return [(s, [fleet.models[m].name for m in sorted(models)]) for s, models in self.groups]

    def lines(self, fleet: Fleet) -> list[single_shot.Group]:
        """The groups as the simulator takes them."""
        return [
            single_shot.Group({m: fleet.models[m].profiles[shape].stage_s for m in sorted(models)})
            for shape, models in self.groups
        ]

    def check(self, fleet: Fleet) -> None:
        """Refuses what the devices cannot hold.

        Raises:
            InputError: with every broken rule.

        """
        problems = []
        if self.num_devices > fleet.num_devices:
            what, rule = f"groups of {self.num_devices} devices", f"at most {fleet.num_devices}"
            problems.append(Problem(what, rule, "fewer or smaller groups"))
        for index, group in enumerate(self.groups):
            if (held := group.bytes_in(fleet)) > fleet.device_bytes:
                what = f"group {index}: {held / GIB:.2f} GiB of weights on a device"
                rule = f"at most {fleet.device_bytes / GIB:.2f} GiB"
                problems.append(Problem(what, rule, "fewer models in the group, or a larger shape"))
        if problems:
            raise InputError(problems)


def empty(shapes: Iterable[Shape]) -> Placement:
    """Groups without models."""
    return Placement(tuple(Group(shape) for shape in shapes))


def joined(parts: Iterable[Placement]) -> Placement:
    """The groups of several placements side by side."""
    return Placement(tuple(group for part in parts for group in part.groups))
