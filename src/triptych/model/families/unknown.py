"""Any other family: counted as a Llama, under whatever names the keys go, and marked."""

from __future__ import annotations

from triptych.model.families.trunk import WIDTH, assemble, grouped, read_trunk
from triptych.model.keys import ConfigKeys
from triptych.model.model import Block, Experts, Mlp, Model

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")


def unknown(keys: ConfigKeys) -> Model:
    """A Llama-like count: exact only where the family differs from Llama in nothing that counts."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(
        keys,
        trunk,
        qkv_bias=bias,
        out_bias=bias,
        window=None if keys.has("layer_types") else keys.optional_count("sliding_window"),
    )
    mlp = _experts(keys) if keys.has(*EXPERTS) else Mlp(width=keys.count(*WIDTH))
    blocks = [Block(attention=attention, mlp=mlp)] * trunk.layers
    return assemble(keys, trunk, blocks, unreliable=tuple(_reasons(keys)))


def _experts(keys: ConfigKeys) -> Experts:
    """Experts in every layer, all of one width, shared ones included if their number is stated."""
    width = keys.count(*EXPERT_WIDTH, *WIDTH)
    shared = keys.count("n_shared_experts", "num_shared_experts", default=0, minimum=0)
    shared_width = keys.count("shared_expert_intermediate_size", default=0, minimum=0)
    return Experts(
        count=keys.count(*EXPERTS),
        top_k=keys.count(*TOP_K),
        width=width,
        shared_width=shared_width or shared * width,
    )


def _reasons(keys: ConfigKeys) -> list[str]:
    """Why the count cannot be trusted."""
    family = keys.config.get("model_type")
    stated = f"model_type {family!r} is not known" if family else "model_type is not stated"
    reasons = [f"{stated}: counted as a Llama of these sizes"]
    if keys.has(*EXPERTS):
        reasons.append("experts are counted in every layer")
    if keys.has("layer_types", "layers_block_type", "block_types"):
        reasons.append("layers of several kinds are all counted as full attention")
    if keys.has("kv_lora_rank"):
        reasons.append("latent attention is counted as grouped-query attention")
    return reasons
