"""Laws of the kernels: more work takes longer, tiles fill devices, power slows what lasts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from cost_samples import cluster, frame_of, llama, plan, work

from triptych.cluster.catalogue import devices
from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.kernels.attention import flash_s, unfused_s
from triptych.cost.kernels.collectives import group
from triptych.cost.kernels.gemm import KERNEL_S, gemm_s, joined_s, lasting_s, tiled_s
from triptych.cost.kernels.rates import Rates, rates
from triptych.cost.pricer import Pricer
from triptych.cost.programs import MEGATRON_2021, MEGATRON_DEEPSPEED, ONEFLOW
from triptych.cost.software import TRIPTYCH, Software
from triptych.cost.storage import Storage
from triptych.cost.uncertainty import RUN, TERMS, half_width

A100 = rates(devices()["A100-SXM4-80GB"], "bf16")
KINDS = [rates(devices()[name], "bf16") for name in ("A100-SXM4-80GB", "B200-SXM-180GB", "cpu")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.peak_flops:.0e}")
def test_a_larger_product_never_takes_less(kind: Rates) -> None:
    sizes = [64, 100, 128, 1000, 1024, 4096, 5000, 20000]
    for k, n in itertools.product((64, 1024, 8192), repeat=2):
        times = [gemm_s(kind, m, k, n) for m in sizes]
        assert times == sorted(times)
        times = [gemm_s(kind, n, m, k) for m in sizes]
        assert times == sorted(times)
    assert gemm_s(kind, 256, 256, 256, 4) >= gemm_s(kind, 256, 256, 256, 3)
    assert gemm_s(kind, 0, 256, 256) == 0.0


def test_one_tile_more_than_a_wave_costs_another_wave() -> None:
    parts, k = A100.multiprocessors, 4096
    full = tiled_s(A100, 256, k, 128, copies=parts)
    assert tiled_s(A100, 256, k, 128, copies=parts + 1) > 1.2 * full
    assert tiled_s(A100, 256, k, 128, copies=2 * parts) == pytest.approx(2 * full)


def test_a_full_wave_attains_the_burst_rate_but_for_the_ramp() -> None:
    k = 1_000_000
    seconds = tiled_s(A100, 256, k, 128, copies=A100.multiprocessors)
    flops = 2.0 * 256 * 128 * k * A100.multiprocessors
    assert flops / seconds == pytest.approx(A100.burst_flops, rel=1e-3)
    short = tiled_s(A100, 256, A100.ramp_k, 128, copies=A100.multiprocessors)
    flops = 2.0 * 256 * 128 * A100.ramp_k * A100.multiprocessors
    assert flops / short == pytest.approx(A100.burst_flops / 2)


def test_few_tiles_are_cut_along_the_inner_dimension() -> None:
    whole_tile_s = 2.0 * 64 * 64 / 0.6 * 65536 * A100.multiprocessors / A100.burst_flops
    assert tiled_s(A100, 64, 65536, 64) < whole_tile_s / 4


def test_what_lasts_runs_at_the_sustained_rate_and_what_is_short_at_the_burst_rate() -> None:
    assert lasting_s(A100, 1e-6) == pytest.approx(1e-6, rel=1e-3)
    slowed = A100.burst_flops / A100.gemm_flops
    assert lasting_s(A100, 10.0) == pytest.approx(10.0 * slowed, rel=1e-3)


def test_a_thin_product_takes_the_time_of_its_weights() -> None:
    moved_s = 8192 * 8192 * 2 / A100.memory_bytes_per_s
    assert gemm_s(A100, 1, 8192, 8192) == pytest.approx(moved_s + KERNEL_S, rel=0.05)


def test_two_kinds_of_work_side_by_side_take_the_longer_and_a_little_more() -> None:
    assert joined_s(3.0, 0.0) == 3.0
    assert joined_s(3.0, 0.1) == pytest.approx(3.0, rel=1e-3)
    assert 3.0 < joined_s(3.0, 3.0) < 1.2 * 3.0
    assert joined_s(2.0, 3.0) == joined_s(3.0, 2.0)


@pytest.mark.parametrize(
    ("m", "n", "k", "microseconds"),
    # ai-dynamo/aiconfigurator systems/data/a100_sxm/gemm (vLLM 0.14, bf16)
    [(2048, 8192, 7168, 870.5), (1024, 10240, 8192, 594.0), (8192, 5120, 8192, 2379.2)],
)
def test_products_take_what_was_measured_before_power_limits(
    m: int, n: int, k: int, microseconds: float
) -> None:
    assert tiled_s(A100, m, k, n) * 1e6 == pytest.approx(microseconds, rel=0.1)


@pytest.mark.parametrize(
    ("size", "mebibytes", "microseconds"),
    # ai-dynamo/aiconfigurator systems/data/a100_sxm/comm/nccl/2.27.3; nccl-tests for 1 GiB
    [(2, 64, 391.5), (4, 64, 544.3), (8, 64, 595.3), (8, 1024, 8203.9)],
)
def test_all_reduces_over_nvlink_take_what_was_measured(
    size: int, mebibytes: int, microseconds: float
) -> None:
    ranks = group(parse_cluster("1x8xA100-SXM4-80GB"), size, 1)
    assert ranks.all_reduce_s(mebibytes * 2**20) * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_later_attention_kernels_are_faster_and_the_backward_does_more() -> None:
    shape = {"heads": 32.0, "width": 256.0, "context": 2048.0, "tokens": 8192.0}
    first, second = (flash_s(A100, generation, **shape) for generation in (1, 2))
    assert second[0] < first[0] and first[1] > 2.5 * first[0]
    longer = flash_s(A100, 2, **{**shape, "context": 4096.0})
    assert second[0] < longer[0] < 2 * second[0]  # twice the work at a better rate


def test_few_heads_leave_multiprocessors_waiting_for_the_last_tile() -> None:
    """Half of the rate where each has one tile, all of it where each has many."""
    tiles = 128.0 * A100.multiprocessors

    def per_head_s(heads: float) -> float:
        shape = {"width": 256.0, "context": 2048.0, "tokens": tiles / 8}
        return (flash_s(A100, 2, heads=heads, **shape)[0] - KERNEL_S) / heads

    assert per_head_s(8) == pytest.approx(2 / (1 + 1 / 100) * per_head_s(800))


def test_written_out_scores_cost_traffic_and_misaligned_heads_the_tensor_cores() -> None:
    def scores_s(key: float = 128, fused: bool = True, dropout: bool = False) -> float:
        return unfused_s(
            A100,
            matrices=64,
            rows=2048,
            length=2048,
            key=key,
            value=key,
            softmax_is_fused=fused,
            has_dropout=dropout,
        )[0]

    assert scores_s() < scores_s(dropout=True) < scores_s(fused=False, dropout=True)
    assert scores_s(108) > 3 * scores_s(112)  # 108 is no multiple of 8


# --- features of programs -----------------------------------------------------------------------


def step_pieces(software: Software, **settings: Any) -> Frame:
    model = llama(layers=8, hidden=1024, width=2816, vocab=2000)
    chosen = plan(model, **settings)
    return Frame.of(Pricer(model, cluster(chosen.world_size), work(1024, 16), software), chosen)


def test_a_program_that_hides_no_gradients_ends_later() -> None:
    ours, theirs = (step_pieces(s, dp=2) for s in (TRIPTYCH, MEGATRON_2021))
    storage = Storage.of(plan(llama(), dp=2))
    assert theirs.tail(0, storage).reduce_s > ours.tail(0, storage).reduce_s


def test_a_program_that_hides_no_gradients_sums_them_at_once() -> None:
    chosen = plan(llama(), dp=2, bucket_bytes=1024)
    frame = step_pieces(MEGATRON_2021, dp=2)
    at_once = frame.tail(0, Storage.of(plan(llama(), dp=2))).reduce_s
    assert frame.tail(0, Storage.of(chosen)).reduce_s == at_once


def test_messages_that_tensor_ranks_share_are_gathered_again() -> None:
    whole, parts = (step_pieces(s, pp=2, tp=2).hops[0] for s in (TRIPTYCH, MEGATRON_2021))
    assert parts.sent_bytes == whole.sent_bytes / 2
    assert (whole.gathered_bytes, parts.gathered_bytes) == (0.0, whole.sent_bytes)


def test_messages_behind_compute_cost_a_pipeline_its_first_and_last_ones() -> None:
    hidden, waited = (step_pieces(replace(ONEFLOW, hides_messages=h), pp=4) for h in (True, False))
    assert hidden.num_microbatches == 16
    assert hidden.hop_s == pytest.approx(waited.hop_s * 3 / 16)


def test_a_slow_host_sets_the_pace_of_small_layers() -> None:
    frame = frame_of(llama(), plan(llama()))
    slow = Frame.of(Pricer(llama(), cluster(1), work(), MEGATRON_DEEPSPEED), plan(llama()))
    assert slow.costs[0].forward_s > 1.5 * frame.costs[0].forward_s


# --- error bars ----------------------------------------------------------------------------------


def test_bars_grow_with_what_is_uncertain() -> None:
    quiet = dict.fromkeys(TERMS, 0.0) | {"compute": 1.0}
    loud = quiet | {"compute": 0.5, "expert_comm": 0.5}
    assert half_width(quiet, "bf16") == pytest.approx((RUN**2 + TERMS["compute"] ** 2) ** 0.5)
    assert half_width(loud, "bf16") > half_width(quiet, "bf16")
    assert half_width(quiet, "fp8") > half_width(quiet, "bf16")
    assert half_width(quiet, "bf16", has_experts=True) > half_width(quiet, "bf16")
