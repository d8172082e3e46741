"""From one layout to another: which part of which stored box fills which part of a wanted box."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from triptych.plan.layout import Box, box_elements

Key = TypeVar("Key")


class Copy(NamedTuple, Generic[Key]):
    """One rectangular copy, from a part of a stored box to a part of a wanted one."""

    source: Key
    source_slices: tuple[slice, ...]
    target_slices: tuple[slice, ...]


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Indices of `box` in a tensor that holds `within`."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, within, strict=True)
    )


def copies(sources: Iterable[tuple[Key, Box]], target: Box) -> list[Copy[Key]]:
    """The copies that fill `target` from disjoint stored boxes.

    Raises LookupError with the number of missing elements if the sources do not cover it.
    """
    found: list[Copy[Key]] = []
    covered = 0
    for key, box in sources:
        common = intersect(box, target)
        if common is not None:
            found.append(Copy(key, slices(common, box), slices(common, target)))
            covered += box_elements(common)
    if covered != box_elements(target):
        missing = box_elements(target) - covered
        raise LookupError(f"{missing} of {box_elements(target)} elements are not stored")
    return found
