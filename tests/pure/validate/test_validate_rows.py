"""Rows of a table: what each becomes, what blank cells mean, and every reason to leave one out."""

from __future__ import annotations

from typing import Any

import pytest
from runs import run

from triptych.cost.programs import MEGATRON_2021, MEGATRON_CORE, MEGATRON_DEEPSPEED, TORCHTITAN
from triptych.cost.software import TRIPTYCH
from triptych.model.count import parameters, training_flops_per_token
from triptych.validate.case import case_of
from triptych.validate.program import software_of
from triptych.validate.table import Skip
from triptych.validate.train import outcome_of


def test_a_row_says_model_cluster_plan_and_work() -> None:
    case = case_of(run())
    assert case.plan.short().startswith("tp=2,pp=1,dp=4,zero=1,microbatch=2")
    assert (case.model.num_layers, case.model.hidden, case.model.vocab) == (4, 1024, 50304)
    assert case.cluster.device.name == "A100-SXM4-80GB" and case.cluster.num_devices == 8
    assert (case.workload.global_batch, case.rounds) == (32, 4.0)
    assert case.measured_s == 0.2 and case.assumed == ()


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "Z9000"}, "GPU not in the catalogue"),
        ({"n_gpus": ""}, "number of GPUs not stated"),
        ({"hidden": ""}, "architecture incomplete"),
        ({"model_name": "llama-x", "ffn_hidden": 3000, "n_layers": ""}, "architecture incomplete"),
        ({"model_name": "Llama3-70B-slice", "n_layers": ""}, "architecture incomplete"),
        ({"notes": "MoE of our own", "ep": 4}, "experts not known"),
        ({"seq_len": ""}, "sequence length not stated"),
        ({"dp": ""}, "plan incomplete"),
        ({"micro_batch_size": ""}, "plan incomplete"),
        ({"dp": 3}, "degrees and number of GPUs disagree"),
        ({"pp": 8, "dp": 1, "tp": 1}, "fewer layers than stages"),
        ({"recompute": "by hand"}, "recomputation not known"),
        ({"notes": "activations checkpointed in CPU"}, "offloading is not priced"),
        ({"global_batch_size": ""}, "global batch not stated"),
        ({"iteration_time_s": ""}, "nothing measured"),
        ({"notes": "CHECK: does not add up"}, "reported figures disagree"),
        ({"hidden": "wide"}, "hidden is not a number"),
    ],
)
def test_a_row_that_cannot_be_compared_says_why(cells: dict[str, Any], reason: str) -> None:
    with pytest.raises(Skip, match=f"^{reason}$"):
        case_of(run(**cells))


def test_throughput_and_flops_mean_a_step_time() -> None:
    tokens = 32 * 1024
    by_rate = case_of(run(iteration_time_s="", tokens_per_s_per_gpu=2048))
    assert by_rate.measured_s == pytest.approx(tokens / 2048 / 8)
    model = by_rate.model
    by_flops = case_of(run(iteration_time_s="", tflops_per_gpu=100, tflops_kind="model"))
    flops = training_flops_per_token(model, 1024) * tokens
    assert by_flops.measured_s == pytest.approx(flops / 8 / 100e12)
    by_share = case_of(run(iteration_time_s="", mfu_reported=0.5))
    assert by_share.measured_s == pytest.approx(flops / 8 / (0.5 * 312e12))
    by_per_cent = case_of(run(gpu="H100", iteration_time_s="", mfu_reported=40))
    assert by_per_cent.measured_s == pytest.approx(flops / 8 / (0.4 * 989e12))


def test_hardware_flops_count_the_repeated_forward() -> None:
    h, s, layers, vocab = 1024, 1024, 4, 50304
    counted = 96 * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h)) * 32 * 1024
    cells = {"iteration_time_s": "", "tflops_per_gpu": 100, "tflops_kind": "hardware (eq. 3)"}
    full, none = case_of(run(**cells, recompute="full")), case_of(run(**cells))
    assert full.measured_s == pytest.approx(counted / 8 / 100e12)
    assert none.measured_s == pytest.approx(0.75 * counted / 8 / 100e12)


def test_a_blank_recomputation_is_told_by_time_and_hardware_flops_together() -> None:
    case = case_of(run())
    flops = training_flops_per_token(case.model, 1024, causal=False) * 32 * 1024
    attained = 4 / 3 * flops / 8 / 0.2 / 1e12
    cells = {"recompute": "", "tflops_kind": "hardware", "tflops_per_gpu": attained}
    assert case_of(run(**cells)).plan.recompute == "full"
    assert case_of(run(recompute="")).plan.recompute == "none"
    assert case_of(run(recompute="")).assumed == ("recompute",)


def test_layers_follow_from_parameters_and_experts_from_the_name() -> None:
    case = case_of(run(n_layers="", params_b=(12 * 6 * 1024**2 + 50304 * 1024) / 1e9))
    assert case.model.num_layers == 6
    sliced = run(model_name="DeepSeek-V2-slice-4L", hidden=5120, vocab=102400, ep=4)
    experts = case_of(sliced).model.experts
    assert experts is not None and experts.count == 160


def test_a_name_alone_is_enough_for_a_model_of_the_catalogue() -> None:
    row = run(model_name="Llama3-8B", n_layers="", hidden="", n_heads="", vocab="")
    assert parameters(case_of(row).model) == pytest.approx(8.03e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "gigabytes_per_s"),
    [
        ("4x200Gb/s HDR per node", 12.5),
        ("1600 Gb/s per node RoCE", 25.0),
        ("400 Gb/s RDMA per GPU", 50.0),
        ("4x Omni-Path per node", 6.25),
    ],
)
def test_a_network_is_what_the_row_states(text: str, gigabytes_per_s: float) -> None:
    case = case_of(run(n_gpus=16, dp=8, inter_node_link=text))
    assert case.cluster.network.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)


def test_programs_are_known_by_what_notes_and_sources_say() -> None:
    assert software_of(run(source="bigscience, table 3")) == MEGATRON_DEEPSPEED
    assert software_of(run(notes="framework=Megatron-LM 8aa")) == MEGATRON_2021
    assert software_of(run(source="a Megatron-LM README", year=2021)) == MEGATRON_2021
    assert software_of(run(source="a Megatron-LM README", year=2025)) == MEGATRON_CORE
    assert software_of(run(source="pytorch/torchtitan")) == TORCHTITAN
    assert software_of(run(source="my own runs", year="")) == TRIPTYCH


def test_features_of_a_run_are_put_on_top_of_its_program() -> None:
    plain = software_of(run(source="torchtitan"))
    assert software_of(run(source="torchtitan", notes="async TP")).hides_tensor > 0
    assert software_of(run(source="torchtitan", notes="float8 rowwise")).fp8_rate < plain.fp8_rate
    off = software_of(run(source="torchtitan", notes="overlap features OFF"))
    assert not off.hides_gradients and off.hides_shards == 0


def test_what_a_tool_counts_of_the_peak_decides_what_is_compared() -> None:
    cells = {"peak_mem_gb_per_gpu": 20}
    whole = outcome_of(case_of(run(**cells)))
    allocated = outcome_of(case_of(run(**cells, notes="max_memory_allocated")))
    reserved = outcome_of(case_of(run(**cells, source="torchtitan", notes="")))
    assert whole.predicted_bytes and allocated.predicted_bytes
    assert allocated.predicted_bytes < whole.predicted_bytes
    assert reserved.measured_bytes == whole.measured_bytes == 20 * 1024**3
    decimal = case_of(run(**cells, notes="nvidia-smi, GB"))
    assert decimal.measured_bytes == 20e9


def test_a_ragged_last_micro_batch_counts_in_part() -> None:
    few, ragged, more = (
        outcome_of(case_of(run(global_batch_size=batch))).predicted_s for batch in (32, 36, 40)
    )
    assert few and ragged and more
    assert ragged == pytest.approx((few + more) / 2)


def test_a_run_that_does_not_state_recomputation_fits_if_some_does() -> None:
    cells = {"tp": 1, "dp": 8, "n_layers": 48, "micro_batch_size": 96, "global_batch_size": 768}
    assert not outcome_of(case_of(run(**cells))).fits
    assert outcome_of(case_of(run(**cells, recompute=""))).fits
