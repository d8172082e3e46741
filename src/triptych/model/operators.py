"""The operators of a layer, of the embedding and of the head: what each computes, moves and keeps.

Everything is counted per token of one sequence, in elements; the cost model turns elements into
bytes and seconds. One list serves every count: parameters are the sum of `parameters`, FLOPs the
sum of `forward_flops`, activation memory the sum of `saved`, so the three can never disagree.

An operator keeps (`saved`) the tensor that it *produces*, so that the input of a column-parallel
product, which is whole on every rank unless sequence parallelism divides it, is kept by the norm
in front. Bytes of a Llama layer (no dropout, flash attention): sb(8h + 4q + 4k + 6f) + 4asb, with
s sequence, b micro-batch, h hidden, q and k the widths of all query and key heads, f the MLP
width, a the query heads. GPT with dropout masks: 34sbh (Korthikanti et al. 2022, sec. 4.1).
"""

from __future__ import annotations

from triptych.model.model import Attention, Block, Experts, HeadNorm, Latent, Mlp, Model
from triptych.model.operator import Operator, Split, attention_operator


def block_operators(model: Model, block: Block) -> tuple[Operator, ...]:
    """The operators of one layer in the order of the forward pass."""
    if block.captured:
        return block.captured.operators
    hidden, with_bias = model.hidden, block.norm_bias
    first = () if block.output_norms else (_norm("attention_norm", hidden, with_bias),)
    has_second = block.norms >= 2 and not block.output_norms
    second = (_norm("mlp_norm", hidden, with_bias),) if has_second else ()
    return (
        *first,
        *_attention(model, block),
        *_branch_end("attention", model, block),
        *second,
        *_mlp(model, block),
        *_branch_end("mlp", model, block),
    )


def embedding_operators(model: Model) -> tuple[Operator, ...]:
    """Token lookup, learned positions and embedding norm, where the model has them."""
    if model.ends:
        return model.ends.embedding
    hidden = model.hidden
    operators = [
        Operator(
            name="embedding",
            kind="memory",
            split="vocab",
            weight_elements=model.vocab * hidden,
            elements=2.0 * hidden,
        )
    ]
    if model.learned_positions:
        rows = model.max_position + model.position_offset
        operators.append(
            Operator(
                name="positions",
                kind="memory",
                split="sequence",
                weight_elements=rows * hidden,
                elements=3.0 * hidden,
            )
        )
    if model.embedding_norm:
        operators.append(_norm("embedding_norm", hidden, with_bias=True))
    if model.dropout:
        operators.append(_dropout("embedding_dropout", hidden))
    return tuple(operators)


def head_operators(model: Model) -> tuple[Operator, ...]:
    """Final norm, product with the vocabulary, cross-entropy over fp32 logits.

    The product lists its weight even when it is tied to the embedding: a stage that holds the head
    reads it, and holds it too unless the embedding is on the same stage.
    """
    if model.ends:
        return model.ends.head
    hidden, vocab = model.hidden, model.vocab
    product = Operator(
        name="head", kind="gemm", split="vocab", k=hidden, n=vocab, weight_elements=hidden * vocab
    )
    # fp32 in and out: two 16-bit elements each; the softmax is what the backward pass needs.
    loss = Operator(
        name="cross_entropy", kind="memory", split="vocab", elements=4.0 * vocab, saved=2.0 * vocab
    )
    return (_norm("final_norm", hidden, model.final_norm_bias), product, loss)


def _attention(model: Model, block: Block) -> tuple[Operator, ...]:
    """From the normed input to the output projection."""
    attention = block.attention
    if attention.latent:
        return _latent_attention(model.hidden, attention, attention.latent)
    query, key = attention.query_width, attention.kv_width
    qkv = _gemm("qkv", "column", model.hidden, query + 2 * key, attention.qkv_bias)
    norms = (_head_norm(attention),) if attention.qk_norm else ()
    rotary = (_scaling("rotary", query + key),) if attention.rotary else ()
    temper = (_scaling("temperature", query),) if attention.tempered else ()
    core = _core(attention, head_dim=attention.head_dim, value_dim=attention.head_dim)
    return (
        qkv,
        *norms,
        *rotary,
        *temper,
        core,
        _gemm("out", "row", query, model.hidden, attention.out_bias),
    )


def _latent_attention(hidden: int, attention: Attention, latent: Latent) -> tuple[Operator, ...]:
    """Multi-head latent attention as trained: keys and values expanded (DeepSeek-V2, sec. 2.1).

    Queries and keys are put together from a part without and one with positions, and values taken
    out of what keys were expanded with: all are copied.
    """
    heads, rank, key_dim = attention.query_heads, latent.kv_rank, latent.nope_dim + latent.rope_dim
    if latent.query_rank is None:
        query: tuple[Operator, ...] = (_gemm("q", "column", hidden, heads * key_dim),)
    else:
        query = (
            _gemm("q_down", "none", hidden, latent.query_rank),
            _norm("q_norm", latent.query_rank, with_bias=False),
            _gemm("q_up", "column", latent.query_rank, heads * key_dim),
        )
    return (
        *query,
        _gemm("kv_down", "none", hidden, rank + latent.rope_dim),
        _norm("kv_norm", rank, with_bias=False),
        _gemm("kv_up", "column", rank, heads * (latent.nope_dim + latent.value_dim)),
        _scaling("rotary", (heads + 1) * latent.rope_dim),
        _scaling("assembly", heads * (2 * key_dim + latent.value_dim)),
        _core(attention, head_dim=key_dim, value_dim=latent.value_dim),
        _gemm("out", "row", heads * latent.value_dim, hidden),
    )


def _core(attention: Attention, *, head_dim: int, value_dim: int) -> Operator:
    """Flash attention: keeps queries, keys, values, its output and the fp32 log-sum-exp."""
    heads = attention.query_heads
    kv_heads = heads if attention.latent else attention.kv_heads
    return attention_operator(
        weight_elements=heads if attention.sinks else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=attention.window,
        chunk=attention.chunk,
        softcapped=attention.softcapped,
        dropout=attention.dropout,
    )


def _mlp(model: Model, block: Block) -> tuple[Operator, ...]:
    """The feed-forward half of a layer."""
    if isinstance(block.mlp, Experts):
        return _experts(model.hidden, block.mlp)
    return _dense("mlp", model.hidden, block.mlp)


def _dense(name: str, hidden: int, mlp: Mlp) -> tuple[Operator, ...]:
    """Up (and gate), activation, down; keeps the products in front of and behind the activation."""
    inner = mlp.width * (2 if mlp.gated else 1)
    up = _gemm(f"{name}_up", "column", hidden, inner, mlp.bias, saved=float(inner))
    down = _gemm(f"{name}_down", "row", mlp.width, hidden, mlp.bias)
    return (up, _activation(f"{name}_activation", inner, mlp.width), down)


def _experts(hidden: int, experts: Experts) -> tuple[Operator, ...]:
    """Router, dispatch, routed experts, combine, shared experts.

    Keeps K(3f + 2h) + 3f_shared + 2E elements where the dense MLP keeps 3f: the dispatched copy,
    the experts' outputs and the router's fp32 probabilities come on top (K experts a token of E).
    """
    top_k, count = experts.top_k, experts.count
    inner = experts.width * (2 if experts.gated else 1)
    routed = {"tokens_factor": top_k, "copies": count}
    moved = float(top_k * hidden)
    router = _gemm("router", "none", hidden, count, experts.bias, saved=2.0 * count)
    up = _gemm(
        "experts_up", "column", hidden, inner, experts.bias, saved=float(top_k * inner), **routed
    )
    down = _gemm("experts_down", "row", experts.width, hidden, experts.bias, **routed)
    return (
        router,
        Operator(name="dispatch", kind="memory", split="sequence", elements=2 * moved, saved=moved),
        up,
        _activation("experts_activation", top_k * inner, top_k * experts.width),
        down,
        Operator(
            name="combine", kind="memory", split="sequence", elements=moved + hidden, saved=moved
        ),
        *_shared(hidden, experts),
    )


def _shared(hidden: int, experts: Experts) -> tuple[Operator, ...]:
    """The experts that every token visits, as one dense MLP, and what weighs them."""
    if not experts.shared_width:
        return ()
    gate = (_gemm("shared_gate", "none", hidden, 1),) if experts.shared_gate else ()
    return (*_dense("shared", hidden, Mlp(width=experts.shared_width, gated=experts.gated)), *gate)


def _branch_end(name: str, model: Model, block: Block) -> tuple[Operator, ...]:
    """What a residual branch ends with: its output norm (Gemma), dropout, the addition."""
    hidden = model.hidden
    operators: list[Operator] = []
    if block.ends_in_norm:
        # The norm's output is only added, and an addition keeps nothing: its input is all there is.
        operators.append(_norm(f"{name}_output_norm", hidden, block.norm_bias, keeps_output=False))
    if model.dropout:
        operators.append(_dropout(f"{name}_dropout", hidden))
    residual = Operator(
        name=f"{name}_residual",
        kind="memory",
        split="sequence",
        elements=3.0 * hidden,
        saved=float(hidden) if block.output_norms else 0.0,  # the next product reads it as it is
    )
    operators.append(residual)
    return tuple(operators)


def _gemm(
    name: str,
    split: Split,
    k: int,
    n: int,
    bias: bool = False,
    *,
    saved: float = 0.0,
    tokens_factor: int = 1,
    copies: int = 1,
) -> Operator:
    return Operator(
        name=name,
        kind="gemm",
        split=split,
        k=k,
        n=n,
        weight_elements=k * n + (n if bias else 0),
        tokens_factor=tokens_factor,
        copies=copies,
        saved=saved,
    )


def _norm(name: str, width: int, with_bias: bool, *, keeps_output: bool = True) -> Operator:
    """RMSNorm, or LayerNorm with a bias: reads and writes a row, keeps its input and its output."""
    return Operator(
        name=name,
        kind="memory",
        split="sequence",
        weight_elements=width * (2 if with_bias else 1),
        elements=2.0 * width,
        saved=(2.0 if keeps_output else 1.0) * width,
    )


_HEAD_NORM_NAMES: dict[HeadNorm, str] = {
    "shared": "qk_norm",
    "per head": "qk_norm_per_head",
    "joint": "qk_norm_joint",
    "unweighted": "qk_norm_unweighted",
}


def _head_norm(attention: Attention) -> Operator:
    """A norm of the queries and one of the keys; keeps its input.

    Weights that all heads share (`qk_norm`) are whole on every rank, others go with the heads.
    """
    width = attention.query_width + attention.kv_width
    weights = {"shared": 2 * attention.head_dim, "unweighted": 0}
    return Operator(
        name=_HEAD_NORM_NAMES[attention.qk_norm_kind],
        kind="memory",
        split="heads",
        weight_elements=weights.get(attention.qk_norm_kind, width),
        elements=2.0 * width,
        saved=float(width),
    )


def _scaling(name: str, width: int) -> Operator:
    """Rotates, scales or copies heads; linear, so that it keeps nothing."""
    return Operator(name=name, kind="memory", split="heads", elements=2.0 * width)


def _activation(name: str, inner: int, width: int) -> Operator:
    """SwiGLU, GELU or ReLU: reads `inner`, writes and keeps `width` (the input of `down`)."""
    return Operator(
        name=name, kind="memory", split="column", elements=float(inner + width), saved=float(width)
    )


def _dropout(name: str, hidden: int) -> Operator:
    """Reads and writes a row, writes and keeps a mask of one byte an element."""
    return Operator(
        name=name, kind="memory", split="sequence", elements=2.5 * hidden, saved=0.5 * hidden
    )
