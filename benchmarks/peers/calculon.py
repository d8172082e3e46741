"""A measured run in the words of Calculon (Isaev et al. 2023), and its price.

Calculon knows decoders of two-matrix MLPs with attention written out, under tensor, pipeline and
data parallelism, interleaving, full or attention-only recomputation and sharded optimizers, on the
systems that it ships: A100 and H100. Its checkout is given by the user.
"""

from __future__ import annotations

from typing import Any

from triptych.model.model import Mlp
from triptych.validate.case import Case
from triptych.validate.table import Skip

SYSTEMS = {"A100": "a100_80g.json", "H100": "h100_80g_nvl8.json"}
_RECOMPUTE = {"none": "none", "full": "full", "selective": "attn_only"}
_NODE = 8
"""GPUs of a node in the files that Calculon ships."""


def request(case: Case) -> dict[str, Any]:
    """The inputs of a run. Raises Skip with the feature that Calculon does not have."""
    _check_plan(case)
    stage = case.plan.stages[0]
    block = case.model.blocks[0]
    assert isinstance(block.mlp, Mlp)
    plan, sized = case.plan, stage.tensor * case.plan.pp
    application = {
        "hidden": case.model.hidden,
        "feedforward": block.mlp.width,
        "seq_size": case.workload.sequence_length,
        "attn_heads": block.attention.query_heads,
        "attn_size": block.attention.head_dim,
        "num_blocks": case.model.num_layers,
    }
    execution = {
        "num_procs": plan.world_size,
        "tensor_par": plan.tp,
        "pipeline_par": plan.pp,
        "data_par": plan.dp,
        "tensor_par_net": int(plan.tp > _NODE),
        "pipeline_par_net": int(sized > _NODE),
        "data_par_net": int(plan.world_size > _NODE),
        "batch_size": int(case.rounds) * plan.round_rows,
        "microbatch_size": plan.microbatch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[plan.recompute],
        "pipeline_interleaving": plan.chunks,
        "optimizer_sharding": plan.zero == 1 and plan.dp > 1,
        "tensor_par_comm_type": "rs_ag" if plan.sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": plan.sequence_parallel and plan.recompute != "full",
        "data_par_overlap": case.software.hides_gradients and plan.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    network = case.cluster.network.bytes_per_s / 1e9
    return {"application": application, "execution": execution, "network": network} | {
        "system": _system(case)
    }


def _system(case: Case) -> str:
    name = case.cluster.device.name
    for known, file in SYSTEMS.items():
        if known in name:
            return file
    raise Skip(f"no system file for {name}")


def _check_plan(case: Case) -> None:
    plan, model = case.plan, case.model
    attention = model.blocks[0].attention
    if model.experts is not None:
        raise Skip("experts")
    mlp = model.blocks[0].mlp
    if not isinstance(mlp, Mlp) or mlp.gated:
        raise Skip("gated MLP")
    if attention.kv_heads != attention.query_heads:
        raise Skip("grouped queries")
    if plan.attention != "eager":
        raise Skip("fused attention")
    if plan.precision.parameter not in ("bf16", "fp16"):
        raise Skip("precision")
    if plan.zero > 1:
        raise Skip(f"ZeRO-{plan.zero}")
    if plan.cp > 1:
        raise Skip("context parallelism")
    if model.num_layers % (plan.pp * plan.chunks):
        raise Skip("uneven stages")
    if case.rounds != int(case.rounds):
        raise Skip("ragged last micro-batch")
