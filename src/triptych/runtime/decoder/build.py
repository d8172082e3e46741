"""Which layers run as written here, and how they are made of the library's modules.

A layer is recognised by what it consists of, its parts by their names: a module more, another
activation or a hook, and the library's layer runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from triptych.model.model import Model
from triptych.plan.plain import is_plain
from triptych.plan.plan import Plan
from triptych.runtime.build.stage import StageModule
from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.slot import Slot
from triptych.runtime.decoder.attend import Attend, HeadNorms, Heads
from triptych.runtime.decoder.layer import DecoderLayer, Half
from triptych.runtime.decoder.norm import Norm
from triptych.runtime.decoder.products import Bias, Matrix, Products
from triptych.runtime.decoder.rotary import Rotary
from triptych.runtime.decoder.swiglu import SwiGlu
from triptych.runtime.decoder.trunk import Trunk
from triptych.runtime.tensor.linear import Deferral, Linear

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_HEAD_NORMS = {"q_norm", "k_norm"}
_ACTIVATIONS = ("SiLU", "SiLUActivation")


def write_layers(
    stages: Iterable[StageModule],
    plan: Plan,
    model: Model,
    buckets: GradientBuckets,
    deferral: Deferral,
) -> None:
    """Makes the plain layers of stages, but for compiled ones, run as written here.

    Buckets must hold their parameters. Under tensor parallelism the library's layers run: their
    exchanges travel behind products (`runtime/tensor/entered.py`), those of written layers do not.
    """
    rotary = Rotary()
    slots = {(id(m), name): slot for slot in buckets.slots for m, name in slot.places}
    for stage in stages:
        if stage.tensor.size > 1:
            continue
        maker = _Maker(stage, buckets, deferral, slots)
        layers = list(stage.layers())
        plain = [
            (index, layer)
            for index, layer in layers
            if is_plain(model, model.blocks[index]) and is_recognised(layer)
        ]
        for index, layer in plain:
            if "forward" not in vars(layer):  # else it is compiled
                is_repeated = plan.recompute == "full" and plan.recomputes(index)
                with buckets.in_memory(layer):
                    made = maker.layer(layer, model, index, rotary, is_repeated)
                setattr(layer, "forward", made)  # noqa: B010
        if plain == layers:
            stage.plain_trunk = _trunk(stage, [layer for _, layer in layers])


def _trunk(stage: StageModule, layers: Sequence[nn.Module]) -> Trunk:
    trunk: Any = stage.trunk
    factor = float(getattr(trunk, "embedding_multiplier", 1.0)) if stage.is_first else 1.0
    norm = trunk.norm if stage.is_last else None
    return Trunk(layers, norm, trunk.rotary_emb.forward, factor)


def is_recognised(layer: nn.Module) -> bool:
    """True if a layer of the library consists of exactly what is written here."""
    for path, names in _PARTS.items():
        found = {name for name, _ in layer.get_submodule(path).named_children()}
        if found - (_HEAD_NORMS if path == "self_attn" else set()) != names:
            return False
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if name.endswith("act_fn"):
            is_known = type(module).__name__ in _ACTIVATIONS
        elif last.endswith("_proj"):
            is_known = isinstance(module, Linear) and not module.transposed
        elif last.endswith("norm"):
            is_known = type(module).__name__.endswith("RMSNorm") and not _offset(module)
        else:
            is_known = module is layer or not module._forward_hooks
        if not is_known:
            return False
    return True


def _offset(norm: Any) -> float:
    """What a norm adds to its weight."""
    return float(getattr(norm, "offset", 0.0))


_Slots = dict[tuple[int, str], Slot]


class _Maker:
    """Makes the parts of a stage's layers."""

    def __init__(
        self, stage: StageModule, buckets: GradientBuckets, deferral: Deferral, slots: _Slots
    ) -> None:
        self._stage, self._buckets, self._deferral, self._slots = stage, buckets, deferral, slots

    def layer(
        self, layer: Any, model: Model, index: int, rotary: Rotary, is_repeated: bool
    ) -> DecoderLayer:
        """One decoder layer."""
        attention, mlp = layer.self_attn, layer.mlp
        factor = float(getattr(layer, "residual_multiplier", 1.0))
        described = model.blocks[index].attention
        core = self._attend(attention, rotary if described.rotary else None, described.window)
        halves = (
            Half(
                self._norm(layer.input_layernorm),
                self._products(attention.q_proj, attention.k_proj, attention.v_proj),
                core,
                self._products(attention.o_proj),
                factor,
            ),
            Half(
                self._norm(layer.post_attention_layernorm),
                self._products(mlp.gate_proj, mlp.up_proj),
                SwiGlu(),
                self._products(mlp.down_proj),
                factor,
            ),
        )
        anchor = next((p for p in layer.parameters() if p.requires_grad), None)
        inputs = self._stage.layer_inputs if is_repeated else None
        return DecoderLayer(layer, halves, anchor, inputs)

    def _attend(self, module: Any, rotary: Rotary | None, window: int | None) -> Attend:
        size = int(module.head_dim)
        query, key = (proj.weight.shape[0] // size for proj in (module.q_proj, module.k_proj))
        has_norms = hasattr(module, "q_norm")
        norms = (
            HeadNorms(self._norm(module.q_norm), self._norm(module.k_norm)) if has_norms else None
        )
        heads = Heads(query, key, size, float(module.scaling))
        return Attend(module, heads, norms, rotary, window)

    def _norm(self, norm: Any) -> Norm:
        slot = self._slots[id(norm), "weight"]
        return Norm(slot.value, self._buckets.sink_of(slot), float(norm.variance_epsilon))

    def _products(self, *linears: Linear) -> Products:
        stops = list(accumulate(linear.weight.shape[0] for linear in linears))
        spans = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        biases = [
            Bias(slot.value, span, self._buckets.sink_of(slot))
            for linear, span in zip(linears, spans, strict=True)
            if (slot := self._slots.get((id(linear), "bias"))) is not None
        ]
        return Products(self._matrices(linears, spans), biases, self._deferral)

    def _matrices(self, linears: Sequence[Linear], spans: Sequence[slice]) -> list[Matrix]:
        slots = [self._slots[id(linear), "weight"] for linear in linears]
        joined = self._buckets.as_one(slots) if len(slots) > 1 else None
        if joined is not None:
            return [Matrix(joined.values, joined.values.t(), slice(0, spans[-1].stop), joined)]
        return [
            Matrix(slot.value, slot.value.t(), span, linear.sink)
            for slot, span, linear in zip(slots, spans, linears, strict=True)
        ]
