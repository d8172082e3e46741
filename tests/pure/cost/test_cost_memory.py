"""Memory by term against published tables and formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_samples import cluster, frame_of, llama, plan, setting, work

from triptych.cost.ends import CHUNK_TOKENS
from triptych.cost.frame import Frame
from triptych.cost.memory import state_bytes, work_bytes
from triptych.cost.pipeline import Alive
from triptych.cost.pricer import Pricer
from triptych.cost.programs import ALPA, MEGATRON_2021, MEGATRON_CORE, ONEFLOW
from triptych.cost.software import TRIPTYCH, Software
from triptych.cost.storage import Storage
from triptych.model.model import Attention, Block, Mlp, Model
from triptych.plan.plan import Precision
from triptych.units import GIB

SEQUENCE = 256


FUSED = replace(TRIPTYCH, compiles_all=True)
"""Of a program whose layers are fused kernels, with dropout or without."""


def layer_bytes(model: Model, software: Software = TRIPTYCH, **changes: object) -> float:
    """What one layer keeps for one sequence."""
    pricer = Pricer(model, cluster(8), work(SEQUENCE), software)
    return pricer.piece(0, setting(**changes)).saved_bytes


def test_a_llama_layer_keeps_8h_4q_4k_6f_and_the_log_sum_exp() -> None:
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    query, key = 64, 32
    expected = SEQUENCE * (8 * 64 + 4 * query + 4 * key + 6 * 176 + 4 * 8)
    assert layer_bytes(model) == pytest.approx(expected)


def gpt(hidden: int, heads: int) -> Model:
    attention = Attention(query_heads=heads, kv_heads=heads, head_dim=hidden // heads, rotary=False)
    block = Block(attention=attention, mlp=Mlp(width=4 * hidden, gated=False), norm_bias=True)
    return Model(
        name="gpt",
        family="gpt2",
        hidden=hidden,
        blocks=(block,),
        vocab=512,
        tied=True,
        max_position=4096,
        learned_positions=True,
        dropout=True,
    )


def test_a_gpt_layer_keeps_34sbh_with_flash_attention() -> None:
    """Korthikanti et al. 2022, table 2; the log-sum-exp of flash attention comes on top."""
    hidden, heads = 256, 4
    expected = SEQUENCE * (34 * hidden + 4 * heads)
    assert layer_bytes(gpt(hidden, heads), FUSED) == pytest.approx(expected)


def test_full_recomputation_keeps_the_input_of_a_layer() -> None:
    assert layer_bytes(llama(hidden=64), recompute="full") == 2 * SEQUENCE * 64


def test_sequence_parallelism_divides_that_input() -> None:
    kept = layer_bytes(llama(hidden=64), recompute="full", tensor=4, sequence_parallel=True)
    assert kept == 2 * SEQUENCE * 64 / 4


def test_tensor_parallelism_leaves_the_gathered_inputs_whole() -> None:
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    inside = SEQUENCE * (4 * 64 + 4 * 32 + 6 * 176 + 4 * 8) / 2
    outside, gathered = SEQUENCE * 4 * 64, SEQUENCE * 4 * 64
    assert layer_bytes(model, tensor=2) == pytest.approx(inside + outside + gathered)
    with_sp = layer_bytes(model, tensor=2, sequence_parallel=True)
    assert with_sp == pytest.approx(inside + outside / 2 + gathered)


def test_inputs_of_regions_that_are_gathered_again_are_kept_in_parts() -> None:
    """Korthikanti et al. 2022, sec. 4.2.2: each rank keeps its part of what enters a region."""
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    whole = SEQUENCE * (8 * 64 + 4 * 64 + 4 * 32 + 6 * 176 + 4 * 8)
    kept = layer_bytes(model, MEGATRON_CORE, tensor=2, sequence_parallel=True)
    assert kept == pytest.approx(whole / 2)


def test_ulysses_keeps_the_outputs_of_attention_twice() -> None:
    """As it makes them, and as the next product reads them."""
    model = llama(hidden=64, heads=8, kv_heads=4)
    ring, dealt = (layer_bytes(model, context=2, context_method=m) for m in ("ring", "ulysses"))
    assert dealt - ring == pytest.approx(2 * SEQUENCE / 2 * 64)


def test_products_that_add_to_kept_gradients_leave_one_tensor_of_each_shape() -> None:
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    chosen = plan(model, zero=1)
    frame = Frame.of(Pricer(model, cluster(1), work(SEQUENCE), MEGATRON_CORE), chosen)
    *_, buffers = state_bytes(frame.costs, Storage.of(chosen), MEGATRON_CORE.footprint)
    assert buffers == 2 * 64 * (128 + 64 + 2 * 176 + 176)  # qkv, out, up with gate, down


def xla_layer_bytes(precision: str) -> float:
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    return layer_bytes(model, ALPA, attention="eager", dtype=precision)


def test_xla_keeps_scores_in_fp32_too_and_makes_activations_again() -> None:
    """Alpa's tables: 96 MiB more in fp16 and 64 MiB less in fp32 than eager layers keep."""
    model = llama(hidden=64, heads=8, kv_heads=4, width=176)
    scores, activation = 8 * SEQUENCE * SEQUENCE, SEQUENCE * 176
    for dtype, more in (("fp16", 4 * scores - 2 * activation), ("fp32", -4 * activation)):
        eager = layer_bytes(model, MEGATRON_CORE, attention="eager", dtype=dtype)
        assert xla_layer_bytes(dtype) - eager == pytest.approx(more)


def test_sums_over_ranks_are_tensors_of_their_own_in_static_graphs() -> None:
    """OneFlow: as much as the gradients, if there are other ranks."""
    model = llama()
    for dp, times in ((1, 0), (2, 1)):
        chosen = plan(model, dp=dp)
        frame = Frame.of(Pricer(model, cluster(dp), work(SEQUENCE), ONEFLOW), chosen)
        kept = [
            state_bytes(frame.costs, Storage.of(chosen), footprint)
            for footprint in (ONEFLOW.footprint, replace(ONEFLOW.footprint, sums_apart=False))
        ]
        assert kept[0][3] - kept[1][3] == times * kept[0][1]


def test_logits_and_the_backward_of_a_layer_do_not_peak_together() -> None:
    model = llama(vocab=4096)
    stage = frame_of(model, plan(model)).costs[0]._replace(working_bytes=7.0, logits_bytes=5.0)
    moments = [(Alive(in_flight=0, deferred=0),)]
    assert sum(work_bytes([stage], moments, MEGATRON_2021.footprint)) == 7.0


def test_a_materialised_score_matrix_adds_2as_per_token() -> None:
    model = llama(heads=8)
    more = layer_bytes(model, attention="eager") - layer_bytes(model)
    assert more == pytest.approx(2 * 8 * SEQUENCE * SEQUENCE)


def test_eager_kernels_keep_more_than_fused_ones() -> None:
    """Written layers keep what fused ones do; under tensor ranks the library's run."""
    model = gpt(256, 4)
    assert layer_bytes(model, FUSED, compile=False) > layer_bytes(model, FUSED)
    assert layer_bytes(llama(), compile=False) == layer_bytes(llama())
    assert layer_bytes(llama(), compile=False, tensor=2) > layer_bytes(llama(), tensor=2)


@pytest.mark.parametrize(("zero", "expected_gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_state_of_7_5b_parameters_over_64_ranks(zero: int, expected_gb: float) -> None:
    """Rajbhandari et al. 2020, figure 1: fp16 weights and gradients, fp32 master and moments."""
    precision = Precision(parameter="bf16", gradient="bf16")
    model = llama()
    chosen = plan(model, dp=64, zero=zero, precision=precision)
    stage = frame_of(model, chosen).costs[0]
    scaled = stage._replace(holdings=stage.holdings._replace(dense=7_500_000_000))
    weights, gradients, optimizer, _ = state_bytes([scaled], Storage.of(chosen))
    assert (weights + gradients + optimizer) / 1e9 == pytest.approx(expected_gb, rel=5e-3)


def test_mixed_precision_holds_18_bytes_a_parameter_and_fp32_holds_16() -> None:
    model = llama()
    held = frame_of(model, plan(model)).costs[0].holdings.total
    for precision, expected in ((Precision.mixed(), 18), (Precision(), 16)):
        storage = Storage.of(plan(model, precision=precision))
        state = state_bytes(frame_of(model, plan(model)).costs, storage)
        assert sum(state[:3]) == expected * held


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_that_travel_in_another_dtype_are_copies(zero: int) -> None:
    """Whole ones all at once; divided ones a bucket (with ZeRO-3 a unit) or two at a time."""
    model = llama()
    kept = [
        plan(model, dp=4, zero=zero, precision=Precision(parameter="bf16", reduction=word))
        for word in ("fp32", "bf16")
    ]
    costs = frame_of(model, kept[0]).costs
    plain, copied = (state_bytes(costs, Storage.of(chosen))[3] for chosen in kept)
    elements = costs[0].holdings.total if zero < 3 else 2 * costs[0].largest_unit
    assert copied - plain == 2 * elements


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    model = llama(layers=8)
    chosen = plan(model, pp=4)
    frame, storage = frame_of(model, chosen), Storage.of(chosen)
    ours, theirs = (frame.memory(0, storage, schedule) for schedule in ("1f1b", "gpipe"))
    assert ours.activations < theirs.activations
    assert ours.weights == theirs.weights


def test_logits_are_never_whole() -> None:
    model = llama(vocab=50_000)
    chosen = plan(model, microbatch=8)
    memory = frame_of(model, chosen, workload=work(2048, 8)).largest_memory(
        Storage.of(chosen), "1f1b"
    )
    assert memory.logits == CHUNK_TOKENS * model.vocab * 8


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_head_s_gradient_is_made_in_its_bucket(dtype: str) -> None:
    """In 16 bit a product is on its way to the wider bucket for a moment, the largest of them."""
    model = llama(vocab=50_000)
    precision = Precision() if dtype == "fp32" else Precision.mixed()
    chosen = plan(model, precision=precision)
    memory = frame_of(model, chosen).largest_memory(Storage.of(chosen), "1f1b")
    on_its_way = 2 * model.vocab * model.hidden if dtype == "bf16" else 0
    assert memory.buffers == on_its_way


def test_both_ways_to_a_peak_agree() -> None:
    model = llama(layers=6, vocab=5000)
    for settings in ({"pp": 3}, {"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3}):
        chosen = plan(model, **settings)
        frame, storage = frame_of(model, chosen), Storage.of(chosen)
        whole = frame.largest_memory(storage, "1f1b").total_bytes
        assert frame.peak_bytes(frame.state(storage), frame.work("1f1b")) == pytest.approx(whole)


def test_a_cpu_rank_has_an_interpreter_and_no_fragmentation() -> None:
    model, chosen = llama(), plan(llama(), precision=Precision())
    memory = frame_of(model, chosen, cluster(1, kind="cpu")).largest_memory(
        Storage.of(chosen), "1f1b"
    )
    assert memory.overhead == pytest.approx(0.42 * GIB)
