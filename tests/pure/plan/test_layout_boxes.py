"""Boxes of a layout: they cover each tensor, and a flat range is the boxes it says."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import ModelError
from triptych.model.model import Attention, Block, Mlp, Model
from triptych.plan.layout import (
    Box,
    box_elements,
    box_shape,
    flat_range_to_boxes,
    holders,
    kv_head_range,
    layer_of,
    local_box,
    num_parts,
    query_head_range,
    rule_for,
    shift,
    stages_of,
)
from triptych.plan.plan import Plan

HEAD_DIM, HIDDEN, WIDTH, VOCAB = 4, 24, 22, 37

SPLIT_SHAPES = {
    "model.embed_tokens.weight": lambda q, kv: (VOCAB, HIDDEN),
    "lm_head.weight": lambda q, kv: (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": lambda q, kv: (q * HEAD_DIM, HIDDEN),
    "model.layers.1.self_attn.k_proj.weight": lambda q, kv: (kv * HEAD_DIM, HIDDEN),
    "model.layers.1.self_attn.v_proj.bias": lambda q, kv: (kv * HEAD_DIM,),
    "model.layers.0.self_attn.o_proj.weight": lambda q, kv: (HIDDEN, q * HEAD_DIM),
    "model.layers.0.mlp.up_proj.weight": lambda q, kv: (WIDTH, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": lambda q, kv: (HIDDEN, WIDTH),
    "model.layers.0.input_layernorm.weight": lambda q, kv: (HIDDEN,),
    "model.norm.weight": lambda q, kv: (HIDDEN,),
}


PACKED_SHAPES = {
    "phi3": (
        "model.layers.0.self_attn.qkv_proj.weight",
        lambda q, kv: ((q + 2 * kv) * HEAD_DIM, HIDDEN),
    ),
    "glm4": ("model.layers.1.mlp.gate_up_proj.weight", lambda q, kv: (2 * WIDTH, HIDDEN)),
    "gpt2": (
        "transformer.h.0.attn.c_attn.weight",
        lambda q, kv: (HIDDEN, (q + 2 * kv) * HEAD_DIM),
    ),
}


def model(query: int, kv: int, layers: int = 2, tied: bool = False, family: str = "llama") -> Model:
    attention = Attention(query_heads=query, kv_heads=kv, head_dim=HEAD_DIM)
    return Model(
        name="small",
        family=family,
        hidden=HIDDEN,
        blocks=(Block(attention=attention, mlp=Mlp(width=WIDTH)),) * layers,
        vocab=VOCAB,
        tied=tied,
        max_position=64,
    )


@st.composite
def heads_and_degrees(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, KV heads, and a tensor degree that can divide them."""
    kv = draw(st.integers(1, 5))
    copies = draw(st.sampled_from([1, 1, 2, 4]))
    group = copies * draw(st.integers(1, 3))
    tp = kv * copies if copies > 1 else draw(st.integers(1, kv))
    return kv * group, kv, tp


def count(shape: tuple[int, ...], boxes: Iterable[Box]) -> np.ndarray:
    """How many of `boxes` each element is in."""
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(*side) for side in box)] += 1
    return found


@given(heads_and_degrees(), st.sampled_from(sorted(SPLIT_SHAPES)))
def test_boxes_of_the_tensor_ranks_cover_every_tensor_and_differ_or_are_the_same(
    degrees: tuple[int, int, int], name: str
) -> None:
    query, kv, tp = degrees
    shape = SPLIT_SHAPES[name](query, kv)
    boxes = [local_box(name, shape, model(query, kv), tp, rank) for rank in range(tp)]
    assert (count(shape, set(boxes)) == 1).all()


@given(heads_and_degrees(), st.sampled_from(sorted(SPLIT_SHAPES)))
def test_holders_are_the_ranks_with_the_same_box(degrees: tuple[int, int, int], name: str) -> None:
    query, kv, tp = degrees
    shape = SPLIT_SHAPES[name](query, kv)
    small = model(query, kv)
    for rank in range(tp):
        same = holders(name, shape, small, tp, rank)
        mine = local_box(name, shape, small, tp, rank)
        assert rank in same
        assert {local_box(name, shape, small, tp, other) for other in same} == {mine}
    firsts = {holders(name, shape, small, tp, rank)[0] for rank in range(tp)}
    assert len(firsts) == len({local_box(name, shape, small, tp, rank) for rank in range(tp)})


@given(heads_and_degrees(), st.sampled_from(sorted(PACKED_SHAPES)))
def test_the_parts_of_a_packed_tensor_cover_it_and_are_divided_each_in_its_own_right(
    degrees: tuple[int, int, int], family: str
) -> None:
    query, kv, tp = degrees
    name, shape_of = PACKED_SHAPES[family]
    shape, small = shape_of(query, kv), model(query, kv, family=family)
    parts = range(num_parts(name, family, tp))
    boxes = {local_box(name, shape, small, tp, r, part) for r in range(tp) for part in parts}
    assert (count(shape, boxes) == 1).all()


def test_a_packed_projection_gives_each_rank_its_queries_keys_and_values() -> None:
    small = model(4, 2, family="phi3")
    name, shape = "model.layers.0.self_attn.qkv_proj.weight", (8 * HEAD_DIM, HIDDEN)
    held = [local_box(name, shape, small, 2, 1, part)[0] for part in range(3)]
    assert held == [(8, 16), (20, 24), (28, 32)]  # heads 2 and 3 of 4, head 5, head 7


def test_on_one_tensor_rank_a_packed_tensor_is_one_box() -> None:
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert num_parts(name, "phi3", 1) == 1
    shape = (2 * WIDTH, HIDDEN)
    assert local_box(name, shape, model(4, 2, family="phi3"), 1, 0) == ((0, 44), (0, HIDDEN))


def test_a_family_without_a_row_is_refused_with_those_that_run() -> None:
    with pytest.raises(ModelError, match=r"(?s)'bloom' cannot be run.*llama, qwen2"):
        rule_for("transformer.word_embeddings.weight", "bloom")


@given(heads_and_degrees())
def test_a_tensor_rank_holds_the_kv_heads_that_its_query_heads_attend_with(
    degrees: tuple[int, int, int],
) -> None:
    query, kv, tp = degrees
    attention = Attention(query_heads=query, kv_heads=kv, head_dim=HEAD_DIM)
    for rank in range(tp):
        needed = {head * kv // query for head in range(*query_head_range(attention, tp, rank))}
        assert needed == set(range(*kv_head_range(attention, tp, rank)))


def test_nine_query_and_three_kv_heads_on_two_ranks_are_uneven() -> None:
    attention = Attention(query_heads=9, kv_heads=3, head_dim=64)
    assert [query_head_range(attention, 2, rank) for rank in range(2)] == [(0, 6), (6, 9)]
    assert [kv_head_range(attention, 2, rank) for rank in range(2)] == [(0, 2), (2, 3)]


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(flat_ranges())
def test_a_flat_range_is_its_boxes_one_after_the_other(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_range_to_boxes(shape, start, stop)
    parts = [flat[tuple(slice(*side) for side in box)].ravel() for box in boxes]
    assert np.concatenate([[], *parts]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
    assert sum(map(box_elements, boxes)) == stop - start


def test_the_boxes_of_a_range_across_rows_are_head_body_and_tail() -> None:
    assert flat_range_to_boxes((4, 5), 3, 17) == [
        ((0, 1), (3, 5)),
        ((1, 3), (0, 5)),
        ((3, 4), (0, 2)),
    ]


def test_shift_moves_a_box_by_its_origin() -> None:
    assert shift(((1, 2), (0, 3)), ((10, 20), (5, 9))) == ((11, 12), (5, 8))
    assert box_shape(((11, 12), (5, 8))) == (1, 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("counts", [(4,), (2, 2), (1, 2, 1)])
def test_every_tensor_is_on_one_stage_but_a_tied_embedding_on_both_ends(
    tied: bool, counts: tuple[int, ...]
) -> None:
    small = model(4, 2, layers=4, tied=tied)
    plan = Plan.uniform(4, pp=len(counts), layers=counts)
    last = len(counts) - 1
    for layer in range(4):
        (stage,) = stages_of(f"model.layers.{layer}.mlp.up_proj.weight", plan, small)
        assert plan.stages[stage].start <= layer < plan.stages[stage].stop
    ends = (0, last) if tied and last else (0,)
    assert stages_of("model.embed_tokens.weight", plan, small) == ends
    assert stages_of("model.norm.weight", plan, small) == (last,)
    assert stages_of("lm_head.weight", plan, small) == (last,)


def test_the_layer_of_a_name_is_its_number_and_ends_have_none() -> None:
    assert layer_of("model.layers.12.mlp.up_proj.weight") == 12
    assert layer_of("model.embed_tokens.weight") is None


def test_a_parameter_outside_the_table_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"self_attn.rotary"):
        rule_for("model.layers.0.self_attn.rotary.weight", "llama")
