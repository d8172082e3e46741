"""Resharding: what is stored under any layout fills every other one, element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.plan.layout import Box, box_elements, box_shape
from triptych.plan.reshard import copies, intersect, slices


def indices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


@st.composite
def cuts(draw: st.DrawFn, box: Box) -> list[Box]:
    """Any way to cut a box into boxes by straight cuts."""
    sides = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if not sides or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(sides))
    at = draw(st.integers(box[dim][0] + 1, box[dim][1] - 1))
    halves = [(box[dim][0], at), (at, box[dim][1])]
    pieces = [(*box[:dim], half, *box[dim + 1 :]) for half in halves]
    return [part for piece in pieces for part in draw(cuts(piece))]


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    whole = tuple((0, size) for size in shape)
    first = draw(cuts(whole))
    return shape, draw(st.permutations(first)), draw(cuts(whole))


def cut(whole: np.ndarray, boxes: list[Box]) -> dict[int, np.ndarray]:
    return {number: whole[indices(box)] for number, box in enumerate(boxes)}


def reshard(stored: dict[int, np.ndarray], sources: list[Box], target: Box) -> np.ndarray:
    filled = np.full(box_shape(target), -1)
    for copy in copies(enumerate(sources), target):
        filled[copy.target_slices] = stored[copy.source][copy.source_slices]
    return filled


@given(two_layouts())
def test_any_layout_fills_any_other(case: Any) -> None:
    shape, sources, targets = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    stored = cut(whole, sources)
    for target in targets:
        np.testing.assert_array_equal(reshard(stored, sources, target), whole[indices(target)])


@given(two_layouts(), st.data())
def test_a_missing_part_is_an_error_that_counts_its_elements(
    case: Any, data: st.DataObject
) -> None:
    shape, sources, _ = case
    lost = data.draw(st.integers(0, len(sources) - 1))
    rest = [(number, box) for number, box in enumerate(sources) if number != lost]
    whole = tuple((0, size) for size in shape)
    with pytest.raises(LookupError, match=f"^{box_elements(sources[lost])} of {math.prod(shape)} "):
        copies(rest, whole)


@given(two_layouts())
def test_the_copies_into_a_layout_touch_every_element_once(case: Any) -> None:
    shape, sources, targets = case
    written = np.zeros(shape, dtype=int)
    for target in targets:
        for copy in copies(enumerate(sources), target):
            written[(*indices(target), ...)][copy.target_slices] += 1
    assert (written == 1).all()


@given(two_layouts())
def test_the_common_part_is_inside_both_boxes_and_has_no_order(case: Any) -> None:
    _, sources, targets = case
    a, b = sources[0], targets[0]
    common = intersect(a, b)
    assert common == intersect(b, a)
    if common is not None:
        assert intersect(common, a) == common == intersect(common, b)


def test_slices_are_relative_to_the_box_that_is_held() -> None:
    assert slices(((4, 6), (2, 3)), ((3, 8), (0, 5))) == (slice(1, 3), slice(2, 3))
