"""The index of a checkpoint: coverage is exact, and its JSON is the index again."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.checkpoint.index import (
    FileInfo,
    Index,
    Logical,
    Part,
    Stored,
    coverage_fault,
    first_overlap,
    merge,
    parse_index,
    part_key,
)
from triptych.errors import CheckpointError
from triptych.plan.layout import Box

WEIGHT = ("weight", "model.norm.weight")
INFO = FileInfo(128, "00c0ffee")


def part(file: str, box: Box, tensor: tuple[str, str] = WEIGHT) -> Part:
    return Part(file, part_key(*tensor, box), *tensor, box)


def stored(file: str, *boxes: Box, shape: tuple[int, ...] = (64,), dtype: str = "fp32") -> Stored:
    parts = [part(file, box) for box in boxes]
    return Stored(file, INFO, {WEIGHT: Logical(shape, dtype)}, parts)


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes within it, anyhow."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    side = [
        st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda s: s[0] < s[1])
        for size in shape
    ]
    return shape, draw(st.lists(st.tuples(*side), max_size=6))


def times_held(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(*side) for side in box)] += 1
    return found


@given(some_boxes())
def test_coverage_has_a_fault_unless_every_element_is_held_once(case: Any) -> None:
    shape, boxes = case
    exact = bool((times_held(shape, boxes) == 1).all())
    assert (coverage_fault(shape, boxes) is None) == exact


@given(some_boxes())
def test_an_overlap_is_found_exactly_when_an_element_is_held_twice(case: Any) -> None:
    shape, boxes = case
    twice = bool((times_held(shape, boxes) > 1).any())
    assert (first_overlap(boxes) is not None) == twice


def test_a_tensor_without_elements_is_covered_by_nothing() -> None:
    assert coverage_fault((0, 4), []) is None
    assert coverage_fault((0, 4), [((0, 0), (0, 4))]) is None


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 32),)], "32 of 64 elements are in no part"),
        ([((0, 40),), ((32, 64),)], "overlap"),
        ([((0, 65),)], "lies outside"),
        ([((0, 32), (0, 1))], "lies outside"),
    ],
)
def test_merging_refuses_parts_that_do_not_cover_a_tensor_once(boxes: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"weight/model.norm.weight.*{words}"):
        merge(10, [stored("rank-00000.safetensors", *boxes)], {})


def test_merging_refuses_ranks_that_disagree_on_a_tensor() -> None:
    ranks = [
        stored("rank-00000.safetensors", ((0, 64),)),
        stored("rank-00001.safetensors", shape=(32,)),
    ]
    with pytest.raises(CheckpointError, match=r"all ranks must agree"):
        merge(10, ranks, {})


def test_an_index_is_the_same_after_its_json() -> None:
    ranks = [
        stored("rank-00000.safetensors", ((0, 32),)),
        stored("rank-00001.safetensors", ((32, 64),)),
    ]
    index = merge(10, ranks, {"config.json": FileInfo(2, "deadbeef")})
    assert parse_index(json.dumps(index.to_json()), "index.json") == index
    assert set(index.files) == {
        "config.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }


def test_a_key_says_kind_name_and_box() -> None:
    box = ((128, 256), (0, 64))
    key = part_key("weight", "model.layers.0.mlp.up_proj.weight", box)
    assert key == "weight/model.layers.0.mlp.up_proj.weight@128:256,0:64"


def damaged(change: str, value: object) -> str:
    index = merge(3, [stored("rank-00000.safetensors", ((0, 64),))], {})
    document = index.to_json()
    if value is None:
        del document[change]
    else:
        document[change] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        '{"schema_version": 1}',
        damaged("schema_version", 99),
        damaged("parts", None),
        damaged("parts", [{"file": "x"}]),
        damaged("files", {"../outside": {"bytes": 1, "xxh3": "0"}}),
        damaged("tensors", {"no-kind": {"shape": [1], "dtype": "fp32"}}),
        damaged("tensors", 5),
    ],
)
def test_a_damaged_index_is_refused_and_named(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"run/step/index.json"):
        parse_index(text, "run/step/index.json")


def test_parts_are_grouped_by_tensor() -> None:
    other = ("exp_avg", "model.norm.weight")
    parts = [part("a", ((0, 1),)), part("b", ((0, 2),), other), part("c", ((1, 2),))]
    tensors = {WEIGHT: Logical((2,), "bf16"), other: Logical((2,), "fp32")}
    index = Index.of(1, tensors, parts, {})
    assert [p.file for p in index.parts[WEIGHT]] == ["a", "c"]
    assert index.kinds() == {"weight", "exp_avg"}
    assert math.prod(index.tensors[WEIGHT].shape) == 2
