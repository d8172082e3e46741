"""A trace as a `Model`: blocks with their graphs, ends, and what the graph does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from triptych.capture.flows import captured
from triptych.capture.graph import Grouped
from triptych.capture.operators import Reader
from triptych.capture.trace import OUTSIDE, Call, Trace
from triptych.errors import ModelError
from triptych.model.count import parameters
from triptych.model.families.trunk import POSITIONS
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.model.operator import Ends, Operator


def model_of(trace: Trace, config: Mapping[str, Any], name: str) -> Model:
    """The model that a trace shows; `config` says only how long its sequences may be.

    Raises ModelError for layers that operators as they are known here cannot say.
    """
    vocab, hidden = trace.shapes[trace.tables[0]]
    taken = set(trace.tables)
    blocks = tuple(_block(trace, layer, hidden, taken) for layer in range(len(trace.layers)))
    positions = next((config[key] for key in POSITIONS if isinstance(config.get(key), int)), 2048)
    ends = _ends(trace, vocab, hidden)
    is_tied = trace.tables[0] == trace.tables[1]
    model = Model(
        name=name,
        family=str(config.get("model_type")),
        hidden=hidden,
        blocks=blocks,
        vocab=vocab,
        tied=is_tied,
        max_position=positions,
        ends=ends,
        learned_positions=any(op.name == "positions" for op in ends.embedding),
        dropout=any(op.name.endswith("_dropout") for b in blocks for op in _operators(b)),
        unreliable=tuple(_doubts(config, blocks)),
    )
    return _checked(model, trace, config)


def _checked(model: Model, trace: Trace, config: Mapping[str, Any]) -> Model:
    from_module = sum(map(prod, trace.shapes.values()))
    if parameters(model) != from_module:
        text = f"its graph has {parameters(model)} of the module's {from_module} parameters"
        raise ModelError(text)
    return model


def _operators(block: Block) -> tuple[Operator, ...]:
    return block.captured.operators if block.captured else ()


def _doubts(config: Mapping[str, Any], blocks: Sequence[Block]) -> Iterator[str]:
    """What a configuration states and no operator of the graph shows."""
    sees_all = all(block.attention.window is None for block in blocks)
    for key in ("sliding_window", "window_size", "attention_chunk_size"):
        if sees_all and config.get(key) and config.get("use_sliding_window") is not False:
            yield f"{key} = {config[key]} is in no attention's call: attention is counted as full"
    if config.get("kv_lora_rank"):
        yield "the cache of latent attention is counted as whole keys and values"


# --- layers --------------------------------------------------------------------------------------


def _block(trace: Trace, layer: int, hidden: int, taken: set[str]) -> Block:
    try:
        reader = Reader(Grouped(trace, layer, taken), hidden)
        graph = captured(reader)
    except ModelError as error:
        where = f"{trace.layers[layer]} ({trace.kinds[layer]})"
        raise ModelError(f"{where}: {error.problems[0].what}") from error
    names = [op.name for op in graph.operators]
    behind = any(name.endswith("_output_norm") for name in names)
    in_front = "attention_norm" in names
    return Block(
        attention=_attention(reader, names),
        mlp=_mlp(reader),
        norms=(4 if behind and in_front else 2) if "mlp_norm" in names or behind else 1,
        output_norms=behind and not in_front,
        captured=graph,
    )


def _attention(reader: Reader, names: list[str]) -> Attention:
    """Heads of a layer, and what of it decides which degrees are legal."""
    core = reader.attended
    return Attention(
        query_heads=core.heads,
        kv_heads=core.kv_heads,
        head_dim=core.head_dim,
        qkv_bias=_has_bias(reader, "qkv"),
        out_bias=_has_bias(reader, "out"),
        rotary="rotary" in names,
        sinks=core.sinks,
        window=core.window,
        softcapped=core.softcapped,
        dropout=core.dropout,
    )


def _mlp(reader: Reader) -> Mlp | Experts:
    pairs = {pair.name: pair for pair in reader.pairs}
    dense = pairs.get("mlp") or pairs.get("shared")
    dense_width = reader.operators[dense.down].k if dense else 0
    if "experts" not in pairs:
        if dense is None:
            raise ModelError("it has no products with a function of single elements between them")
        up = reader.operators[dense.up]
        return Mlp(
            width=dense_width, gated=up.n == 2 * dense_width, bias=up.weight_elements > up.k * up.n
        )
    up, down = reader.operators[pairs["experts"].up], reader.operators[pairs["experts"].down]
    return Experts(
        count=up.copies,
        top_k=up.tokens_factor,
        width=down.k,
        shared_width=dense_width,
        gated=up.n == 2 * down.k,
        bias=up.weight_elements > up.k * up.n,
    )


def _has_bias(reader: Reader, name: str) -> bool:
    return any(
        op.name == name and op.weight_elements > op.k * op.n for op in reader.operators.values()
    )


# --- ends ----------------------------------------------------------------------------------------


def _ends(trace: Trace, vocab: int, hidden: int) -> Ends:
    """What is in front of the first layer and behind the last; the norm and the head come first."""
    first, last = _layer_places(trace)
    front = [_end(trace, call, hidden) for call in _weighted(trace, 0, first)]
    back = [_end(trace, call, hidden) for call in _weighted(trace, last, len(trace.calls))]
    head_weights = {trace.tables[1]}
    bias = sum(
        prod(trace.shapes[name])
        for call in trace.calls[last:]
        if trace.tables[1] in call.weights
        for name in call.weights
        if name not in head_weights
    )
    table = Operator(
        name="embedding",
        kind="memory",
        split="vocab",
        weight_elements=vocab * hidden,
        elements=2.0 * hidden,
    )
    product = Operator(
        name="head",
        kind="gemm",
        split="vocab",
        k=hidden,
        n=vocab,
        weight_elements=hidden * vocab + bias,
    )
    loss = Operator(
        name="cross_entropy", kind="memory", split="vocab", elements=4.0 * vocab, saved=2.0 * vocab
    )
    norm = Operator(
        name="final_norm",
        kind="memory",
        split="sequence",
        weight_elements=sum(op.weight_elements for op in back),
        elements=2.0 * hidden,
        saved=2.0 * hidden,
    )
    return Ends(embedding=(table, *front), head=(norm, product, loss))


def _layer_places(trace: Trace) -> tuple[int, int]:
    inside = [place for place, call in enumerate(trace.calls) if call.layer != OUTSIDE]
    return inside[0], inside[-1] + 1


def _weighted(trace: Trace, start: int, stop: int) -> Iterator[tuple[Call, int]]:
    """Calls outside of layers with weights of their own, and how many elements those have."""
    seen = set(trace.tables)
    for call in trace.calls[start:stop]:
        own = [name for name in call.weights if name not in seen]
        seen.update(own)
        if call.layer == OUTSIDE and own and trace.tables[1] not in call.weights:
            yield call, sum(prod(trace.shapes[name]) for name in own)


def _end(trace: Trace, found: tuple[Call, int], hidden: int) -> Operator:
    call, elements = found
    is_norm = bool(call.norm) or call.function == "layer_norm"
    if not is_norm and call.function not in ("embedding", "add", "__add__", "__radd__"):
        raise ModelError(f"{call.module} has weights outside of layers ({call.function})")
    return Operator(
        name="embedding_norm" if is_norm else "positions",
        kind="memory",
        split="sequence",
        weight_elements=elements,
        elements=2.0 * hidden if is_norm else 3.0 * hidden,
        saved=2.0 * hidden if is_norm else 0.0,
    )
