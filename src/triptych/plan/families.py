"""What the runtime has to know of each model family, as data.

A family is a row: the names of its parts, and how tensor parallelism splits each of its tensors.
Names are those of the hub's disks. A family that is not here is not run: several fail silently
when they are cut or sharded, so a row is admitted by a parity test with the stock library
(`tests/procs/runtime/test_parity.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.errors import ModelError, Problem
from triptych.plan.fused import Fused


class Split(StrEnum):
    """What tensor parallelism divides a tensor by."""

    NONE = "none"
    QUERY = "query heads"
    KV = "kv heads"
    WIDTH = "mlp width"
    SHARED = "width of the shared expert"
    VOCAB = "vocabulary"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of parameter is split along dimension `dim`.

    A packed projection has several `splits`: its parts lie one behind the other along `dim`, and
    each is divided in its own right (`[queries | keys | values]`, `[gate | up]`). `partial` marks
    a replicated parameter inside a tensor-parallel region: each rank's gradient covers only its
    own heads, with or without sequence parallelism.
    """

    splits: tuple[Split, ...]
    dim: int = 0
    partial: bool = False


Rules = Mapping[str, Rule]
"""Rules by tensor name, below the layer for a layer's tensors, else below the trunk.

A `*` stands for the number of an expert.
"""

_NONE, _QUERY, _KV, _WIDTH = (Split.NONE,), (Split.QUERY,), (Split.KV,), (Split.WIDTH,)


def _columns(name: str, *splits: Split, transposed: bool = False) -> dict[str, Rule]:
    """A linear whose output is divided. A `transposed` one stores its weight as [in, out]."""
    return {
        f"{name}.weight": Rule(splits, dim=1 if transposed else 0),
        f"{name}.bias": Rule(splits),
    }


def _rows(name: str, split: Split, transposed: bool = False) -> dict[str, Rule]:
    """A linear whose input is divided; its bias is added once."""
    return {
        f"{name}.weight": Rule((split,), dim=0 if transposed else 1),
        f"{name}.bias": Rule(_NONE),
    }


def _whole(*names: str, partial: bool = False) -> dict[str, Rule]:
    """Norms, and what else is replicated."""
    rule = Rule(_NONE, partial=partial)
    return {f"{name}.{kind}": rule for name in names for kind in ("weight", "bias")}


_SEPARATE_QKV = {
    **_columns("self_attn.q_proj", *_QUERY),
    **_columns("self_attn.k_proj", *_KV),
    **_columns("self_attn.v_proj", *_KV),
    **_rows("self_attn.o_proj", Split.QUERY),
}


def _gated(name: str, split: Split) -> dict[str, Rule]:
    """A gated MLP, or one of many experts."""
    return {
        **_columns(f"{name}.gate_proj", split),
        **_columns(f"{name}.up_proj", split),
        **_rows(f"{name}.down_proj", split),
    }


_GATED_MLP = _gated("mlp", Split.WIDTH)
_FUSED_MLP = {
    **_columns("mlp.gate_up_proj", Split.WIDTH, Split.WIDTH),
    **_rows("mlp.down_proj", Split.WIDTH),
}
_TWO_NORMS = _whole("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = _whole("self_attn.q_norm", "self_attn.k_norm", partial=True)
# A router sees whole tokens; its gradient comes from this rank's part of each expert's width.
_EXPERTS = {**_gated("mlp.experts.*", Split.WIDTH), "mlp.gate.weight": Rule(_NONE, partial=True)}
# Norms that are divided with the heads: over all of them (OLMo 2), or one weight a head (Cohere).
_SPLIT_HEAD_NORMS = {
    "self_attn.q_norm.weight": Rule(_QUERY),
    "self_attn.k_norm.weight": Rule(_KV),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names and rules of a family; the defaults are Llama's.

    `regions` maps a child of a layer to its row-parallel linear: input gathered or copied once,
    output reduced once; in the order in which they run. Branches side by side behind one norm
    (`joint_norm`) are one region. `head` is the output matrix as it is stored; the library's
    module is always `lm_head`.
    """

    rules: Rules
    trunk: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None  # a learned table, added to the embedding
    norm: str = "norm"
    head: str = "lm_head"
    rotary: str | None = "rotary_emb"
    attention: str = "self_attn"
    regions: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn": "o_proj", "mlp": "down_proj"}
    )
    joint_norm: str | None = None
    experts: str | None = None  # the child of a layer that holds a router and experts, if it has
    router: str = "gate"  # below that child
    fused: Fused | None = None  # how the hub's disks have all experts in one tensor, if they do
    scales_input: bool = False  # experts see tokens times their weights (Llama 4)
    sigmoid_router: bool = False  # its scores are sigmoids, not a softmax (DeepSeek-V3)
    buffers: tuple[str, ...] = ()  # tensors below a layer that are stored but never trained
    stored: tuple[tuple[str, str], ...] = ()  # words of the library and those of the hub's disks
    norm_start: float = 1.0  # the value of a fresh norm's weight
    scaled_embedding: bool = False  # the library's embedding module multiplies (Gemma)
    wide_head_norm: bool = False  # query and key norms run over all heads together
    plain: bool = False  # its layers are of the kind that the runtime has written out
    logit_factor: str | None = None  # the config's name of what logits are multiplied by
    logit_divisor: str | None = None  # ... and of what they are divided by
    logit_softcap: str | None = None  # ... and of the c in c x tanh(logits / c)

    def is_buffer(self, name: str) -> bool:
        """True for the name of a tensor that is stored but never trained."""
        return name.endswith(self.buffers)

    def name_of(self, part: str) -> str:
        """The stored name of a part of the trunk: `model.embed_tokens.weight`."""
        return f"{self.trunk}.{part}.weight"

    def logical_name(self, name: str) -> str:
        """The name of a tensor on the hub's disks, given the library's or that of a bare trunk."""
        if name == "lm_head.weight":
            return self.head_name
        for ours, theirs in self.stored:
            name = name.replace(ours, theirs)
        bare = name.partition(".")[0] in (self.layers, self.embedding, self.positions, self.norm)
        return f"{self.trunk}.{name}" if bare else name

    @property
    def embedding_name(self) -> str:
        """The stored name of the token table, which is also a tied head's."""
        return self.name_of(self.embedding)

    @property
    def head_name(self) -> str:
        """The stored name of an output matrix that is not tied."""
        return f"{self.head}.weight"


_LLAMA = Family(rules={**_SEPARATE_QKV, **_GATED_MLP, **_TWO_NORMS})
_PLAIN = replace(_LLAMA, plain=True)
_QK_NORM = replace(_LLAMA, rules={**_LLAMA.rules, **_HEAD_NORMS})
_GEMMA_NORMS = _whole("pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA2 = replace(
    _LLAMA,
    rules={**_LLAMA.rules, **_GEMMA_NORMS},
    norm_start=0.0,
    scaled_embedding=True,
    logit_softcap="final_logit_softcapping",
)
_GPT_NEOX = Family(
    trunk="gpt_neox",
    embedding="embed_in",
    norm="final_layer_norm",
    head="embed_out",
    attention="attention",
    regions={"attention": "dense", "mlp": "dense_4h_to_h"},
    rules={
        # Queries, keys and values of a head lie together: a split by heads is a plain one.
        **_columns("attention.query_key_value", *_QUERY),
        **_rows("attention.dense", Split.QUERY),
        **_columns("mlp.dense_h_to_4h", *_WIDTH),
        **_rows("mlp.dense_4h_to_h", Split.WIDTH),
        **_TWO_NORMS,
    },
)
_GPT2 = Family(
    trunk="transformer",
    layers="h",
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    rotary=None,
    attention="attn",
    regions={"attn": "c_proj", "mlp": "c_proj"},
    rules={
        **_columns("attn.c_attn", Split.QUERY, Split.KV, Split.KV, transposed=True),
        **_rows("attn.c_proj", Split.QUERY, transposed=True),
        **_columns("mlp.c_fc", *_WIDTH, transposed=True),
        **_rows("mlp.c_proj", Split.WIDTH, transposed=True),
        **_whole("ln_1", "ln_2"),
    },
)
_PHI3 = Family(
    rules={
        **_columns("self_attn.qkv_proj", Split.QUERY, Split.KV, Split.KV),
        **_rows("self_attn.o_proj", Split.QUERY),
        **_FUSED_MLP,
        **_TWO_NORMS,
    }
)
_OLMO2 = Family(
    rules={
        **_SEPARATE_QKV,
        **_GATED_MLP,
        **_SPLIT_HEAD_NORMS,
        **_whole("post_attention_layernorm", "post_feedforward_layernorm"),
    },
    wide_head_norm=True,
)
_GLM4 = Family(
    rules={
        **_SEPARATE_QKV,
        **_FUSED_MLP,
        **_TWO_NORMS,
        **_whole("post_self_attn_layernorm", "post_mlp_layernorm"),
    }
)
_STARCODER2 = Family(
    regions={"self_attn": "o_proj", "mlp": "c_proj"},
    rules={
        **_SEPARATE_QKV,
        **_columns("mlp.c_fc", *_WIDTH),
        **_rows("mlp.c_proj", Split.WIDTH),
        **_TWO_NORMS,
    },
)
_COHERE = Family(
    rules={**_SEPARATE_QKV, **_GATED_MLP, **_SPLIT_HEAD_NORMS, **_whole("input_layernorm")},
    joint_norm="input_layernorm",
    logit_factor="logit_scale",
)
_MIXTRAL = Family(
    experts="mlp",
    stored=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    rules={
        **_SEPARATE_QKV,
        **_TWO_NORMS,
        **_columns("block_sparse_moe.experts.*.w1", *_WIDTH),
        **_columns("block_sparse_moe.experts.*.w3", *_WIDTH),
        **_rows("block_sparse_moe.experts.*.w2", Split.WIDTH),
        "block_sparse_moe.gate.weight": _EXPERTS["mlp.gate.weight"],
    },
)
_QWEN3_MOE = replace(_QK_NORM, experts="mlp", rules={**_QK_NORM.rules, **_EXPERTS})
_QWEN2_MOE = replace(
    _LLAMA,
    experts="mlp",
    rules={
        **_LLAMA.rules,
        **_EXPERTS,
        **_gated("mlp.shared_expert", Split.SHARED),
        **_whole("mlp.shared_expert_gate", partial=True),
    },
)
_OLMOE = Family(
    experts="mlp",
    rules={**_SEPARATE_QKV, **_TWO_NORMS, **_SPLIT_HEAD_NORMS, **_EXPERTS},
    wide_head_norm=True,
)
# Latents and the one rotary key are whole on every rank, for the heads of each.
_LATENT = {
    **_whole(
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
        partial=True,
    ),
    **_columns("self_attn.q_proj", *_QUERY),
    **_columns("self_attn.q_b_proj", *_QUERY),
    **_columns("self_attn.kv_b_proj", *_QUERY),
    **_rows("self_attn.o_proj", Split.QUERY),
}
_DEEPSEEK_V3 = Family(
    experts="mlp",
    sigmoid_router=True,
    buffers=("mlp.gate.e_score_correction_bias",),
    rules={
        **_LATENT,
        **_TWO_NORMS,
        **_GATED_MLP,
        **_EXPERTS,
        **_gated("mlp.shared_experts", Split.SHARED),
    },
)
_GPT_OSS = Family(
    experts="mlp",
    router="router",
    fused=Fused(in_turn=True),
    rules={
        **_SEPARATE_QKV,
        **_TWO_NORMS,
        "self_attn.sinks": Rule(_QUERY),
        **_gated("mlp.experts.*", Split.WIDTH),
        # One rank adds it, before results are summed.
        "mlp.experts.*.down_proj.bias": Rule(_NONE, partial=True),
        **_whole("mlp.router", partial=True),
    },
)
_LLAMA4 = Family(
    experts="feed_forward",
    router="router",
    sigmoid_router=True,
    scales_input=True,
    fused=Fused(in_turn=False),
    regions={"self_attn": "o_proj", "feed_forward": "down_proj"},
    rules={
        **_SEPARATE_QKV,
        **_TWO_NORMS,
        **_gated("feed_forward", Split.WIDTH),
        **_gated("feed_forward.experts.*", Split.WIDTH),
        **_gated("feed_forward.shared_expert", Split.SHARED),
        **_whole("feed_forward.router", partial=True),
    },
)

FAMILIES: Mapping[str, Family] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": replace(_QK_NORM, plain=True),
    "mistral": _PLAIN,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, rules={**_GEMMA2.rules, **_HEAD_NORMS}),
    "gpt_neox": _GPT_NEOX,
    "gpt2": _GPT2,
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "granite": replace(_PLAIN, logit_divisor="logits_scaling"),
    "glm4": _GLM4,
    "smollm3": _PLAIN,
    "starcoder2": _STARCODER2,
    "cohere": _COHERE,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_moe": _QWEN2_MOE,
    "olmoe": _OLMOE,
    "deepseek_v3": _DEEPSEEK_V3,
    "gpt_oss": _GPT_OSS,
    "llama4_text": _LLAMA4,
}
"""The families that can be run, by their `model_type`."""


def is_norm(name: str) -> bool:
    """True for the parameters of a norm, whatever their shape (Cohere's have two dimensions)."""
    module = name.split(".")[-2]
    return "norm" in module or module.startswith("ln_")


def family_of(model_type: str) -> Family:
    """The row of a family. Raises ModelError, which lists those that run, for any other."""
    family = FAMILIES.get(model_type)
    if family is None:
        works = ", ".join(FAMILIES)
        raise ModelError(
            Problem(f"'{model_type}' cannot be run", "families with a parity test", works)
        )
    return family
