"""Bytes on the wire against the formulas; what the runtime counts is tested with processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cost_samples import frame_of, llama, plan, work

from triptych.cost.storage import Storage
from triptych.cost.traffic import Traffic, frame_traffic, rank_traffic
from triptych.model.count import block_parameters, parameters
from triptych.model.model import Experts, Model
from triptych.plan.plan import Precision

LAYERS, HIDDEN, SEQUENCE, BATCH = 4, 64, 128, 16
ACTIVATION = SEQUENCE * HIDDEN * 2  # bf16, one sequence


def sent(model: Model, **settings: Any) -> Traffic:
    chosen = plan(model, **settings)
    frame = frame_of(model, chosen, workload=work(SEQUENCE, BATCH))
    return frame_traffic(frame, Storage.of(chosen))


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_send_four_all_reduces_a_layer(tensor: int, sequence_parallel: bool) -> None:
    """Sequence parallelism gathers the inputs of both regions once more, for the backward."""
    traffic = sent(llama(layers=LAYERS), tp=tensor, sequence_parallel=sequence_parallel)
    ends = 2 * ACTIVATION + 3 * 4 * SEQUENCE  # embedding, head, softmax sums in fp32
    per_sequence = 2 * (tensor - 1) / tensor * (4 * LAYERS * ACTIVATION + ends)
    norms = 2 * (tensor - 1) / tensor * (2 * LAYERS + 1) * HIDDEN * 4 if sequence_parallel else 0
    again = (tensor - 1) / tensor * 2 * LAYERS * ACTIVATION if sequence_parallel else 0
    assert traffic.tensor == pytest.approx(BATCH * (per_sequence + again) + norms)


def test_recomputation_repeats_all_but_the_last_reduction_of_a_layer() -> None:
    plain, again = sent(llama(), tp=2), sent(llama(), tp=2, recompute="full")
    assert again.tensor - plain.tensor == pytest.approx(BATCH * LAYERS * ACTIVATION)
    with_sp = sent(llama(), tp=2, recompute="full", sequence_parallel=True)
    without = sent(llama(), tp=2, sequence_parallel=True)
    assert with_sp.tensor - without.tensor == pytest.approx(BATCH * LAYERS * 1.5 * ACTIVATION)


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 8), (1, 6), (2, 4 * 4 + 2)])
def test_data_ranks_send_gradients_and_parameters(zero: int, bytes_each: int) -> None:
    """fp32 gradients, bf16 parameters, four micro-batches."""
    model = llama()
    traffic = sent(model, dp=4, zero=zero)
    assert traffic.data == pytest.approx(3 / 4 * parameters(model) * bytes_each)


@pytest.mark.parametrize("accumulation", ["auto", "reduce_last"])
def test_zero_3_gathers_layers_twice_and_the_ends_once(accumulation: str) -> None:
    """What stays whole is not gathered: the last layer before its backward, the first after it."""
    model, rounds = llama(layers=LAYERS), BATCH // 4
    layer = block_parameters(model, model.blocks[0])
    ends = parameters(model) - LAYERS * layer - HIDDEN
    gathered = rounds * (ends + (2 * LAYERS - 1) * layer + HIDDEN) - (rounds - 1) * layer
    reduced = parameters(model) * (rounds if accumulation == "auto" else 1)
    traffic = sent(model, dp=4, zero=3, accumulation=accumulation)
    assert traffic.data == pytest.approx(3 / 4 * (2 * gathered + 4 * reduced))


def test_hybrid_sharding_scatters_in_the_shard_and_sums_shards_over_replicas() -> None:
    model = llama(layers=LAYERS)
    traffic = sent(model, dp=4, zero=1, hybrid_shard=2)
    inside, across = 1 / 2 * (4 + 2), 2 * 1 / 2 * 4 / 2
    assert traffic.data == pytest.approx(parameters(model) * (inside + across))


def test_inner_pipeline_ranks_send_both_ways_and_outer_ones_one_way() -> None:
    model = llama()
    chosen = plan(model, pp=4)
    frame = frame_of(model, chosen, workload=work(SEQUENCE, BATCH))
    by_rank = [rank_traffic(frame, Storage.of(chosen), rank).pipeline for rank in range(4)]
    assert by_rank == [BATCH * ACTIVATION * n for n in (1, 2, 2, 1)]


def test_sequence_parallelism_divides_messages() -> None:
    whole = sent(llama(), pp=2, tp=2).pipeline
    assert sent(llama(), pp=2, tp=2, sequence_parallel=True).pipeline == whole / 2


def test_a_tied_table_is_exchanged_once_between_first_and_last_stage() -> None:
    model = llama(tied=True)
    assert sent(model, pp=2).tie == model.vocab * HIDDEN * 4
    assert sent(model).tie == 0
    assert sent(llama(tied=False), pp=2).tie == 0


def test_repeated_kv_heads_sum_their_gradients_over_the_copies() -> None:
    model = llama(kv_heads=2, heads=8)
    more = sent(model, tp=4).tensor - sent(llama(kv_heads=4, heads=8), tp=4).tensor
    key_and_value = LAYERS * 2 * HIDDEN * (HIDDEN // 8)
    assert more == pytest.approx(key_and_value * 4)


def test_experts_send_their_tokens_and_get_them_back() -> None:
    model = llama(experts=Experts(count=8, top_k=2, width=32))
    traffic = sent(model, dp=4, ep=4)
    once = 3 / 4 * 2 * ACTIVATION  # (e-1)/e T K h, 2 bytes each
    counts = 3 / 4 * 8 * 8  # how many for each expert, 8 bytes each, ahead of the tokens
    assert traffic.expert == pytest.approx(BATCH / 4 * LAYERS * (4 * once + counts))


def test_ring_attention_passes_keys_and_values_round() -> None:
    traffic = sent(llama(kv_heads=4), cp=4)
    chunk = SEQUENCE / 4 * 2 * (4 * HIDDEN // 8) * 2  # keys and values of one chunk
    assert traffic.context == pytest.approx(BATCH * LAYERS * 3 * 3 * chunk)


def test_a_window_spares_the_keys_that_no_other_rank_sees() -> None:
    """Two tokens of each chunk go to the neighbour that has the next: 4 of 3 x 32 tokens."""
    whole = llama(kv_heads=4)
    attention = replace(whole.blocks[0].attention, window=3)
    windowed = replace(whole, blocks=(replace(whole.blocks[0], attention=attention),) * LAYERS)
    assert sent(windowed, cp=4).context == pytest.approx(sent(whole, cp=4).context * 4 / 96)


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_ulysses_deals_queries_keys_values_and_outputs(kv_heads: int) -> None:
    """The same in both directions; KV heads are at least as many as the ranks."""
    traffic = sent(llama(kv_heads=kv_heads, heads=8), cp=4, context_method="ulysses")
    tokens, head_bytes = SEQUENCE / 4, 2 * HIDDEN / 8
    once = 3 / 4 * tokens * head_bytes * (2 * 8 + 2 * max(4, kv_heads))
    assert traffic.context == pytest.approx(BATCH * LAYERS * 2 * once)


def test_one_device_sends_nothing() -> None:
    assert sent(llama(), precision=Precision()) == Traffic()
