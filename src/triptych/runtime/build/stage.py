"""The part of a model that one pipeline stage runs.

The skeleton keeps its list of layers at full length: layers of other stages become pass-throughs,
so that everything the library indexes by position stays right. What the stage before sent enters
through the last skipped layer (an `Entry`), never as `inputs_embeds`, which some families scale.

Shapes: B batch, S sequence, s = S / tp under sequence parallelism (else S), H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from triptych.model.model import Model
from triptych.plan.families import Family, family_of
from triptych.plan.plan import Plan, part
from triptych.runtime.attention import describe_attention, split_sequence
from triptych.runtime.build.zoo import stored_buffers
from triptych.runtime.context.tiles import Documents
from triptych.runtime.expert.balance import ROUTED, Balancer, Routed, RouterSettings
from triptych.runtime.expert.experts import experts_of
from triptych.runtime.mesh import Mesh
from triptych.runtime.recompute import LayerInputs, recompute_attention, recompute_layer
from triptych.runtime.shard import Shard
from triptych.runtime.tensor.functions import enter_region
from triptych.runtime.tensor.linear import Deferral, Linear, replace_linears
from triptych.runtime.tensor.loss import Bending, Vocabulary, cross_entropy
from triptych.runtime.tensor.ops import number_of
from triptych.runtime.tensor.packed import pack
from triptych.runtime.tensor.shard import set_heads, shard_embedding, shard_layer


class PassThrough(nn.Module):
    """Stands for a layer of another stage. There may be many: a call is no more than a function."""

    def __call__(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns its input."""
        return hidden


class Entry(nn.Module):
    """Stands for the layer before the stage's first: returns what the previous stage sent."""

    received: torch.Tensor

    def __call__(self, *_: Any, **__: Any) -> torch.Tensor:
        """[B, s, H] as received."""
        return self.received


class Remembered:
    """The library's rotary embedding, asked once for positions that stay the same."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._positions: torch.Tensor | None = None
        self._made: dict[Hashable, Any] = {}

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *kind: Hashable) -> Any:
        """Cosines and sines for positions [1 or B, S], of a `kind` if the family has several."""
        if position_ids is not self._positions:
            self._positions, self._made = position_ids, {}
        key = (x.dtype, kind)
        if key not in self._made:
            self._made[key] = self._forward(x, position_ids, *kind)
        return self._made[key]


class StageLayers(nn.ModuleList):
    """The layers of a stage. The library slices its list in every forward: here that is cheap."""

    def __getitem__(self, index: Any) -> Any:
        """A layer, or a plain list of them."""
        return [*self][index] if isinstance(index, slice) else super().__getitem__(index)


class PlainTrunk(Protocol):
    """What the library's trunk does for layers of the plain kind, without a cache."""

    def __call__(
        self, hidden_BsH: torch.Tensor, positions_BS: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        """[B, s, H] to the same."""


class NoPositions(nn.Module):
    """Stands for the table of positions, which only the first stage adds."""

    def forward(self, positions_1S: torch.Tensor) -> torch.Tensor:
        """Zero."""
        return torch.zeros((), device=positions_1S.device)


class StageModule(nn.Module):
    """Layers `start` to `stop` of a model, with the embedding or the head if they are its own.

    `causal_lm` is the library's module after cutting and sharding; parameter names stay its own,
    but for the parts of packed projections.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        model: Model,
        plan: Plan,
        mesh: Mesh,
        index: int,
        deferral: Deferral,
        router: RouterSettings | None = None,
    ) -> None:
        super().__init__()
        stage = plan.stages[index]
        self.index = index
        self.is_first = stage.start == 0
        self.is_last = stage.stop == model.num_layers
        self.before_head: Callable[[], None] = _nothing  # gathers the head under ZeRO-3
        self.causal_lm = causal_lm
        self._family = family_of(model.family)
        self.trunk = causal_lm.get_submodule(self._family.trunk)
        self._bending = _bending(self._family, causal_lm.config)
        self._hidden = model.hidden
        self._plan = plan
        self.layer_inputs = LayerInputs(
            mesh.tensor if plan.shard_activations else None,
            mesh.counters.axis("host") if plan.offload == "activations" else None,
        )
        self.tensor = mesh.tensor
        self._context, self._context_method = mesh.context, plan.context_method
        self._expert = mesh.expert
        self._router = router or RouterSettings()
        self._sequence_parallel = plan.sequence_parallel and mesh.tensor.size > 1
        start, stop = part(model.vocab, mesh.tensor.size, mesh.tensor.index)
        self.vocabulary = Vocabulary(start, stop, mesh.tensor)
        self._entry = cut(causal_lm, self._family, stage.start, stage.stop, model.num_layers)
        # What the library wraps around it (defaults, records of what is inside) is not for us.
        self.plain_trunk: PlainTrunk | None = None  # runs instead where it can
        self._run_trunk = partial(inspect.unwrap(type(self.trunk).forward), self.trunk)
        self._counted: torch.Tensor | None = None
        if self._family.rotary is not None:
            rotary = self.trunk.get_submodule(self._family.rotary)
            setattr(rotary, "forward", Remembered(rotary.forward))  # noqa: B010
        self._layers = range(stage.start, stage.stop)
        self._shard(model, self._layers, deferral)

    def _shard(self, model: Model, layers: range, deferral: Deferral) -> None:
        family = self._family
        if self.is_first:
            shard_embedding(self.trunk, model, self.tensor, self._sequence_parallel)
        if self.is_last:
            replace_linears(self.causal_lm, deferral, recurse=False)
        for index in layers:
            layer = self.trunk.get_submodule(f"{family.layers}.{index}")
            if experts_of(layer, family) is not None:
                self._divide_experts(layer, index)
            if self.tensor.size > 1:
                pack(layer, family)
            replace_linears(layer, deferral)
            if self.tensor.size > 1:
                shard_layer(layer, family, self.tensor, self._sequence_parallel)
                set_heads(layer, model, self.tensor)
            attention = layer.get_submodule(family.attention)
            describe_attention(attention, model.blocks[index].attention)
            if self._context.size > 1:
                split_sequence(attention, self._context, self._context_method)
            if self._plan.recomputes(index):
                self._recompute(layer)

    def _recompute(self, layer: nn.Module) -> None:
        if self._plan.recompute == "full":
            recompute_layer(layer, self.layer_inputs)
        else:
            recompute_attention(layer.get_submodule(self._family.attention))

    def _divide_experts(self, layer: nn.Module, index: int) -> None:
        """Leaves this rank's experts in a layer and balances its router."""
        experts = experts_of(layer, self._family)
        assert experts is not None and self._family.experts is not None
        experts.keep(self._expert)
        experts.may_drop = self._router.capacity_factor is not None
        balancer = Balancer(
            index,
            self._router,
            self.causal_lm.config,
            is_sigmoid=self._family.sigmoid_router,
            tensor=self.tensor,
            context=self._context,
        )
        attention = layer.get_submodule(self._family.attention)
        router = f"{self._family.experts}.{self._family.router}"
        balancer.attach(attention, layer.get_submodule(router))

    @property
    def sequence_split(self) -> int:
        """Into how many parts the sequence is cut outside of tensor-parallel regions."""
        return self.tensor.size if self._sequence_parallel else 1

    @property
    def tensor_number(self) -> int | None:
        """The communicator of its tensor-parallel regions; None without."""
        return number_of(self.tensor) if self.tensor.size > 1 else None

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The decoder layers of the stage, each with its place in the model."""
        for index in self._layers:
            yield index, self.trunk.get_submodule(f"{self._family.layers}.{index}")

    def to_device(self, device: torch.device) -> None:
        """Moves or makes buffers: frequencies, and those that are loaded.

        Parameters are allocated where they belong.
        """
        if self._family.rotary is not None:
            self.trunk.get_submodule(self._family.rotary).to(device)
        for module in self.causal_lm.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    setattr(module, name, torch.zeros_like(buffer, device=device))

    def buffer_shards(self, saved: bool) -> list[Shard]:
        """What the stage holds that is stored but not trained; the same on all of its ranks."""
        return [
            Shard(
                kind="weight",
                name=name,
                shape=tuple(buffer.shape),
                box=tuple((0, size) for size in buffer.shape),
                tensor=buffer,
                saved=saved,
            )
            for name, buffer in stored_buffers(self.causal_lm).items()
        ]

    @property
    def initializer_range(self) -> float:
        """The standard deviation of first weights, as the model's configuration says."""
        return float(getattr(self.causal_lm.config, "initializer_range", 0.02))

    @property
    def head(self) -> Linear:
        """The output matrix, this rank's rows [v, H]; its weight is the embedding's own if tied."""
        head = self.causal_lm.get_submodule("lm_head")
        assert isinstance(head, Linear)
        return head

    def forward(
        self,
        ids_BS: torch.Tensor,
        received_BsH: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        documents: Documents | None = None,
        cache: Any = None,
        routed: Routed | None = None,
    ) -> torch.Tensor:
        """Runs the stage: token ids or received hidden states to hidden states [B, s, H].

        On the last stage they are normalised. Positions follow the `cache`, the library's
        key/value cache, unless they are given; they are [1, S] where all rows have the same.
        `routed` is what routers have to know in training.
        """
        if positions_BS is None:
            positions_BS = self._count(ids_BS, cache)
        if received_BsH is None:
            embedded_BsH = self.trunk.get_submodule(self._family.embedding)(ids_BS)
        if self.plain_trunk is not None and cache is None:
            start_BsH = embedded_BsH if received_BsH is None else received_BsH
            return self.plain_trunk(start_BsH, positions_BS, documents)
        if received_BsH is not None:
            assert self._entry is not None
            self._entry.received = received_BsH
            embedded_BsH = received_BsH.detach()  # only its shape, type and device are looked at
        more = {} if routed is None else {ROUTED: routed}
        output = self._run_trunk(
            inputs_embeds=embedded_BsH,
            position_ids=positions_BS,
            cache=cache,
            use_cache=cache is not None,
            documents=documents,  # the library hands it on to our attention
            positions=positions_BS,  # and this
            **more,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _count(self, ids_BS: torch.Tensor, cache: Any) -> torch.Tensor:
        """Positions [1, S]; without a cache the same tensor as long as the length is the same."""
        length = ids_BS.shape[1]
        if cache is not None:
            past = cache.get_seq_length()
            return torch.arange(past, past + length, device=ids_BS.device)[None]
        if self._counted is None or self._counted.shape[1] != length:
            self._counted = torch.arange(length, device=ids_BS.device)[None]
        return self._counted

    def loss(
        self, hidden_BsH: torch.Tensor, labels_BS: torch.Tensor, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """scale x the summed cross-entropy of the last stage's hidden states."""
        self.before_head()
        hidden = enter_region(hidden_BsH, self.tensor, self._sequence_parallel)
        return cross_entropy(
            hidden.reshape(-1, self._hidden),
            self.head.weight,
            labels_BS.reshape(-1),
            self.vocabulary,
            scale,
            self.head.sink,
            self._bending,
        )

    def local_logits(self, hidden_BsH: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits [B, S, v]."""
        self.before_head()
        hidden = enter_region(hidden_BsH, self.tensor, self._sequence_parallel)
        logits = functional.linear(hidden, self.head.weight)
        self._bending.bend(logits)
        return logits


def _bending(family: Family, config: Any) -> Bending:
    """What the family does to its logits, by the words of its configuration."""
    factor, divisor, softcap = (
        getattr(config, name) if name is not None else None
        for name in (family.logit_factor, family.logit_divisor, family.logit_softcap)
    )
    return Bending(factor=float(factor or 1.0) / float(divisor or 1.0), softcap=softcap)


def _nothing() -> None:
    return None


def cut(
    causal_lm: nn.Module, family: Family, start: int, stop: int, num_layers: int
) -> Entry | None:
    """Removes what other stages own, in place; returns where received hidden states enter."""
    trunk = causal_lm.get_submodule(family.trunk)
    layers = trunk.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    layers = StageLayers(layers)
    trunk.add_module(family.layers, layers)
    for index in range(num_layers):
        if not start <= index < stop:
            layers[index] = PassThrough()
    entry = Entry() if start > 0 else None
    if entry is not None:
        layers[start - 1] = entry
        trunk.add_module(family.embedding, nn.Identity())
        if family.positions is not None:
            trunk.add_module(family.positions, NoPositions())
    if stop < num_layers:
        trunk.add_module(family.norm, nn.Identity())
        causal_lm.add_module("lm_head", nn.Identity())
    return entry
