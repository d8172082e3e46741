"""A model as Megatron-LM's arguments, and where a script's model is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triptych.export.target import Account
from triptych.model.model import Attention, Block, Experts, Mlp, Model

Words = Iterator[tuple[str, ...]]


# Where a gate or a plain MLP has another function than SiLU or GELU.
_ACTIVATIONS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "gated GELU"),
    "opt": "ReLU",
}


def model_arguments(account: Account) -> Words:
    """The shape of the model; remarks on what the arguments leave out."""
    model = account.subject.model
    block = model.blocks[-1]
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden)
    yield "--ffn-hidden-size", str(_dense_width(model))
    yield from _attention_arguments(block.attention)
    if isinstance(block.mlp, Experts):
        yield from _expert_arguments(model, block.mlp)
    if block.mlp.gated:
        yield ("--swiglu",)
    yield "--normalization", "LayerNorm" if block.norm_bias else "RMSNorm"
    if not (block.mlp.bias or block.attention.out_bias):
        yield ("--disable-bias-linear",)
    yield "--position-embedding-type", "learned_absolute" if model.learned_positions else "rope"
    if not model.tied:
        yield ("--untie-embeddings-and-output-weights",)
    yield "--tokenizer-type", "NullTokenizer"
    yield "--vocab-size", str(model.vocab)
    yield "--make-vocab-size-divisible-by", "1"
    if not _has_dropout(model):
        yield "--hidden-dropout", "0.0"
        yield "--attention-dropout", "0.0"
    for name, value, why in _left_out(model, block):
        account.remark(f"model.{name}", value, why)


def _has_dropout(model: Model) -> bool:
    return model.dropout or any(block.attention.dropout for block in model.blocks)


def _dense_width(model: Model) -> int:
    widths = [block.mlp.width for block in model.blocks if isinstance(block.mlp, Mlp)]
    return widths[0] if widths else model.blocks[0].mlp.width


def _attention_arguments(attention: Attention) -> Words:
    yield "--num-attention-heads", str(attention.query_heads)
    if attention.latent:
        latent = attention.latent
        yield ("--multi-latent-attention",)
        if latent.query_rank:
            yield "--q-lora-rank", str(latent.query_rank)
        yield "--kv-lora-rank", str(latent.kv_rank)
        yield "--qk-head-dim", str(latent.nope_dim)
        yield "--qk-pos-emb-head-dim", str(latent.rope_dim)
        yield "--v-head-dim", str(latent.value_dim)
        return
    if attention.kv_heads != attention.query_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(attention.kv_heads)
    yield "--kv-channels", str(attention.head_dim)
    if attention.qkv_bias and not attention.out_bias:
        yield ("--add-qkv-bias",)
    if attention.qk_norm:
        yield ("--qk-layernorm",)
    if attention.window:
        yield "--window-size", f"{attention.window - 1},0"


def _expert_arguments(model: Model, experts: Experts) -> Words:
    yield "--num-experts", str(experts.count)
    yield "--moe-router-topk", str(experts.top_k)
    yield "--moe-ffn-hidden-size", str(experts.width)
    if experts.shared_width:
        yield "--moe-shared-expert-intermediate-size", str(experts.shared_width)
    if experts.shared_gate:
        yield ("--moe-shared-expert-gate",)
    yield "--moe-token-dispatcher-type", "alltoall"
    places = [int(isinstance(block.mlp, Experts)) for block in model.blocks]
    if not all(places):
        yield "--moe-layer-freq", "[" + ",".join(map(str, places)) + "]"


def _left_out(model: Model, block: Block) -> Iterator[tuple[str, object, str]]:
    attention = block.attention
    if len({other.attention for other in model.blocks}) > 1:
        yield "attention", "differs by layer", "every layer has the last one's attention instead"
    if len({other.mlp for other in model.blocks if isinstance(other.mlp, Experts)}) > 1:
        yield "experts", "differ by layer", "every layer has the last one's experts instead"
    activation = _ACTIVATIONS.get(model.family, "")
    is_rotary = attention.rotary and not model.learned_positions
    features = (
        ("activation", activation, activation, "--swiglu or GELU instead"),
        ("rotary_base", is_rotary, "not known here", "10000 unless --rotary-base says another"),
        ("norms", block.norms != 2 or block.output_norms, block.norms, "two a layer, before"),
        ("softcapped", attention.softcapped, True, "scores are not bent"),
        ("sinks", attention.sinks, True, "left out"),
        ("rotary", not attention.rotary and not model.learned_positions, False, "rotary instead"),
        ("qk_norm_kind", attention.qk_norm and attention.qk_norm_kind != "shared",
         attention.qk_norm_kind, "one norm that all heads share instead"),
        ("embedding_norm", model.embedding_norm, True, "left out"),
        ("dropout", _has_dropout(model), True, "rates are not known here: Megatron-LM's 0.1"),
    )  # fmt: skip
    yield from ((name, value, why) for name, is_left_out, value, why in features if is_left_out)
    for reason in model.unreliable:
        yield "unreliable", reason, "not in the arguments either"


def differences(given: Mapping[str, int], model: Model) -> list[str]:
    """Where the shape in a script is not MODEL's: one line each, for what both say."""
    block = model.blocks[-1]
    experts = model.experts
    ours: dict[str, int | None] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": _dense_width(model),
        "--num-attention-heads": block.attention.query_heads,
        "--num-query-groups": block.attention.kv_heads,
        "--kv-channels": None if block.attention.latent else block.attention.head_dim,
        "--vocab-size": model.vocab,
        "--num-experts": experts.count if experts else 0,
        "--moe-router-topk": experts.top_k if experts else None,
        "--moe-ffn-hidden-size": experts.width if experts else None,
        "--moe-shared-expert-intermediate-size": experts.shared_width if experts else None,
    }
    heads = given.get("--num-attention-heads")
    usual = {} if heads is None else {"--num-query-groups": heads, "--num-experts": 0}
    said = {**usual, **given}
    return [
        f"{name} {said[name]}{'' if name in given else ' by default'} in the file, "
        f"{value} in {model.name}"
        for name, value in ours.items()
        if name in said and value is not None and said[name] != value
    ]
