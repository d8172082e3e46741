"""The slowest rank's share: the layout's own boxes, uneven and repeated heads included."""

from __future__ import annotations

import pytest
from cost_samples import cluster, llama, setting

from triptych.cost.holdings import Holdings
from triptych.cost.pricer import EMBEDDING, HEAD, Pricer
from triptych.cost.shard import copies_of, local_heads
from triptych.model.count import parameters
from triptych.model.model import Attention, Experts, Model
from triptych.plan.layout import box_elements, local_box
from triptych.plan.workload import Workload

WORK = Workload(sequence_length=128, global_batch=8)


def held(model: Model, tensor: int, expert: int = 1) -> Holdings:
    """Parameters of the whole model on the slowest of `tensor` ranks, without pipeline."""
    pricer = Pricer(model, cluster(tensor * expert), WORK)
    counts = pricer.counts(0, model.num_layers)
    return pricer.stage(counts, True, True, setting(tensor=tensor, expert=expert)).holdings


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The logical parameters of a Llama, as the hub stores them."""
    block = model.blocks[0]
    query, key = block.attention.query_width, block.attention.kv_width
    hidden, width = model.hidden, block.mlp.width
    layer = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    names = {
        f"model.layers.{index}.{name}": shape
        for index in range(model.num_layers)
        for name, shape in layer.items()
    }
    names |= {"model.embed_tokens.weight": (model.vocab, hidden), "model.norm.weight": (hidden,)}
    return names if model.tied else names | {"lm_head.weight": (model.vocab, hidden)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8])
def test_parameters_of_the_slowest_rank_are_those_of_the_layout(tensor: int, tied: bool) -> None:
    model = llama(kv_heads=4, width=175, vocab=503, tied=tied)
    boxes = (local_box(name, shape, model, tensor, 0) for name, shape in shapes(model).items())
    assert held(model, tensor).total == sum(map(box_elements, boxes))


def test_one_rank_holds_the_whole_model() -> None:
    model = llama(tied=True)
    assert held(model, 1).total == parameters(model)


@pytest.mark.parametrize(
    ("tensor", "expected"), [(1, (12, 3)), (2, (8, 2)), (3, (4, 1)), (6, (2, 1)), (12, (1, 1))]
)
def test_heads_of_the_slowest_rank(tensor: int, expected: tuple[int, int]) -> None:
    attention = Attention(query_heads=12, kv_heads=3, head_dim=8)
    assert local_heads(attention, tensor) == expected


def test_kv_heads_beyond_the_tensor_degree_are_copied() -> None:
    block = llama(kv_heads=2).blocks[0]
    assert [copies_of(block, tensor) for tensor in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_expert_parallelism_divides_routed_experts_only() -> None:
    model = llama(experts=Experts(count=8, top_k=2, width=32, shared_width=48))
    one, four = held(model, 1), held(model, 1, expert=4)
    assert four.expert * 4 == one.expert
    assert four.dense == one.dense


def test_only_norms_are_replicated_over_tensor_ranks_of_a_llama() -> None:
    model = llama(layers=4, hidden=64)
    assert held(model, 2).replicated == (2 * 4 + 1) * 64


def test_a_tied_table_is_held_by_both_ends_of_a_pipeline() -> None:
    model = llama(tied=True, layers=4)
    pricer = Pricer(model, cluster(2), WORK)
    first = pricer.stage(pricer.counts(0, 2), True, False, setting()).holdings
    last = pricer.stage(pricer.counts(2, 4), False, True, setting()).holdings
    assert first.tied == last.tied == model.vocab * model.hidden
    assert first.total + last.total == parameters(model) + model.vocab * model.hidden


def test_pieces_are_priced_once() -> None:
    pricer = Pricer(llama(), cluster(1), WORK)
    assert pricer.piece(0, setting()) is pricer.piece(0, setting())
    assert pricer.piece(EMBEDDING, setting()) is not pricer.piece(HEAD, setting())
