"""A measured run in the words of SimuMax (MooreThreads), and its system files.

SimuMax knows dense models, experts and latent attention under tensor, pipeline, data, context and
expert parallelism as Megatron runs them, on the systems that it ships: A100 (the PCIe card) and
B200. Its checkout is given by the user.
"""

from __future__ import annotations

from typing import Any

from triptych.model.model import Experts
from triptych.validate.case import Case
from triptych.validate.table import Skip

SYSTEMS = {"A100-PCIe": "a100_pcie.json", "B200": "b200_bf16_ceperm.json"}
TE_VERSION = "2.11.0"
"""Of the runs that its B200 file is made for."""


def request(case: Case) -> dict[str, Any]:
    """The inputs of a run. Raises Skip with the feature that SimuMax does not have."""
    system = _system(case)
    _check_plan(case)
    return {"model": _model(case), "strategy": _strategy(case), "system": system}


def _system(case: Case) -> str:
    name = case.cluster.device.name
    for known, file in SYSTEMS.items():
        if name.startswith(known):
            return file
    raise Skip(f"no system file for {name}")


def _check_plan(case: Case) -> None:
    plan, model = case.plan, case.model
    if plan.precision.parameter not in ("bf16", "fp16"):
        raise Skip("precision")
    if plan.recompute == "selective" and case.software.selects_operators:
        raise Skip("recomputation by operator")
    if len({block.attention for block in model.blocks}) > 1:
        raise Skip("layers that differ in attention")
    if plan.zero > 1:
        raise Skip(f"ZeRO-{plan.zero}")
    if case.rounds != int(case.rounds):
        raise Skip("ragged last micro-batch")
    if model.num_layers % (plan.pp * plan.chunks):
        raise Skip("uneven stages")


def _model(case: Case) -> dict[str, Any]:
    model = case.model
    attention, mlp = model.blocks[-1].attention, model.blocks[-1].mlp
    found: dict[str, Any] = {
        "model_name": model.name,
        "hidden_size": model.hidden,
        "head_num": attention.query_heads,
        "kv_head_num": attention.kv_heads,
        "head_size": attention.head_dim,
        "layer_num": model.num_layers,
        "vocab_size": model.vocab,
        "use_swiglu": mlp.gated,
        "intermediate_size": mlp.width,
        "model_type": "dense",
    }
    if isinstance(mlp, Experts):
        dense = [b.mlp for b in model.blocks if not isinstance(b.mlp, Experts)]
        found |= {
            "model_type": "moe",
            "expert_num": mlp.count,
            "topk": mlp.top_k,
            "moe_ffn_hidden_size": mlp.width,
            "moe_shared_expert_intermediate_size": mlp.shared_width or None,
            "intermediate_size": dense[0].width if dense else mlp.width,
            "dense_layers": len(dense),
        }
    if latent := attention.latent:
        found |= {
            "attention_type": "mla",
            "v_head_dim": latent.value_dim,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
        }
    return found


def _strategy(case: Case) -> dict[str, Any]:
    plan, row = case.plan, case.row
    granularity = {"none": None, "full": "full_block", "selective": "sdp_only"}[plan.recompute]
    overlaps = not row.says("overlap features OFF") and case.software.hides_gradients
    return {
        "seq_len": case.workload.sequence_length,
        "micro_batch_size": plan.microbatch,
        "micro_batch_num": int(case.rounds),
        "dtype": "bf16",
        "world_size": plan.world_size,
        "tp_size": plan.tp,
        "cp_size": plan.cp,
        "pp_size": plan.pp,
        "ep_size": plan.ep,
        "etp_size": 1,
        "enable_sequence_parallel": plan.sequence_parallel,
        "interleaving_size": plan.chunks,
        "zero_state": plan.zero,
        "enable_dropout": case.model.dropout,
        "use_flash_sdp": plan.attention != "eager",
        "use_math_sdp": plan.attention == "eager",
        "enable_recompute": True,
        "recompute_granularity": granularity,
        "recompute_layer_num": case.model.num_layers // plan.pp if granularity else 0,
        "attn_recompute": granularity == "sdp_only",
        "cross_entropy_loss_fusion": row.says("CE fusion"),
        "overlap_grad_reduce": overlaps,
        "pp_comm_async": overlaps,
        "te_version": TE_VERSION,
        "dispatch_probs": case.model.experts is not None,
    }
