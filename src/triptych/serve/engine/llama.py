"""A stage of the plain Llama structure on CPUs in fp32: a forward of our own from the weights.

RMSNorm, rotary attention with or without biases and head norms, a gated SiLU MLP: two calls of
compiled kernels a layer, on weights that were packed when they were loaded, with queries, keys and
values in one product and gates and values in another. The library's modules cost 20 ms a step.

Shapes as in `stage.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from triptych.model.model import Attention, Block, Mlp
from triptych.plan.families import family_of
from triptych.serve.core.tables import Rows, Tables
from triptych.serve.engine.cache import Pool
from triptych.serve.engine.native import bind
from triptych.serve.engine.stage import ModelStage, whole_vocabulary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def suits(stage: ModelStage) -> bool:
    """Whether a stage has this structure and the kernels are there."""
    config: Any = stage.module.causal_lm.config
    return (
        stage.model.family in FAMILIES
        and stage.dtype == torch.float32
        and stage.mesh.device.type == "cpu"
        and config.hidden_act == "silu"
        and all(_is_plain(block) for block in stage.model.blocks)
        and bind.available()
    )


def _is_plain(block: Block) -> bool:
    attention = block.attention
    odd = attention.sinks, attention.softcapped, attention.chunk, attention.latent
    fits = attention.head_dim % 2 == 0 and attention.head_dim <= bind.MOST_VALUE_DIM
    return isinstance(block.mlp, Mlp) and block.mlp.gated and not any(odd) and fits


class LlamaStage:
    """Takes the weights of a loaded stage, which is left without those of its layers."""

    def __init__(self, stage: ModelStage, most_rows: int) -> None:
        module = stage.module
        self._mesh, self._model = stage.mesh, stage.model
        self._module = module
        trunk = module.causal_lm.get_submodule(family_of(stage.model.family).trunk)
        self._embed = trunk.get_submodule("embed_tokens") if module.is_first else None
        self._rotary = trunk.get_submodule("rotary_emb")
        self._kept: list[Any] = []  # what the layers point to
        self._layers = [
            self._layer(layer, stage.model.blocks[index].attention)
            for index, layer in module.layers()
        ]
        self._indices = [index for index, _ in module.layers()]
        self._norm: Any = trunk.get_submodule("norm") if module.is_last else None
        self._head = bind.pack(module.head.weight) if module.is_last else None
        for _, layer in module.layers():
            _forget(layer)
        self._make_room(most_rows)

    def _make_room(self, most_rows: int) -> None:
        """Buffers between products, for the largest step."""
        first = self._layers[0]
        query = first.query_heads * first.head_dim
        widths = (first.hidden, query + 2 * first.kv_heads * first.head_dim, query, first.width)
        self._room = [torch.empty(most_rows, width) for width in widths]
        self._batch = bind.Batch(*map(bind.address, self._room))

    def _layer(self, layer: nn.Module, attention: Attention) -> bind.Layer:
        """The structure of one layer; its weights are packed here."""
        a: Any = layer.get_submodule("self_attn")
        mlp: Any = layer.get_submodule("mlp")
        projections = (a.q_proj, a.k_proj, a.v_proj)
        qkv = bind.pack(
            torch.cat([p.weight for p in projections]),
            None if a.q_proj.bias is None else torch.cat([p.bias for p in projections]),
        )
        once = self._mesh.tensor.index == 0  # biases behind a sum over ranks are added once
        o = bind.pack(a.o_proj.weight, a.o_proj.bias if once else None)
        gate_up = bind.pack(mlp.up_proj.weight, None, mlp.gate_proj.weight)
        gates = None
        if mlp.gate_proj.bias is not None:
            gates = bind.gated_bias(mlp.gate_proj.bias, mlp.up_proj.bias)
        down = bind.pack(mlp.down_proj.weight, mlp.down_proj.bias if once else None)
        norms: list[Any] = [layer.get_submodule("input_layernorm"), getattr(a, "q_norm", None)]
        norms += [getattr(a, "k_norm", None), layer.get_submodule("post_attention_layernorm")]
        weights = [None if norm is None else norm.weight.detach().clone() for norm in norms]
        head_dim = attention.head_dim
        self._kept.append((qkv, o, gate_up, gates, down, weights))
        return bind.Layer(
            *map(bind.address, (weights[0], qkv.panels, qkv.bias, weights[1], weights[2])),
            *map(bind.address, (o.panels, o.bias, weights[3], gate_up.panels, gates)),
            *map(bind.address, (down.panels, down.bias, None, None)),
            norms[0].variance_epsilon,
            a.scaling,
            qkv.k,
            a.q_proj.weight.shape[0] // head_dim,
            a.k_proj.weight.shape[0] // head_dim,
            head_dim,
            head_dim if attention.rotary else 0,
            mlp.up_proj.weight.shape[0],
            attention.window or 0,
            int(self._mesh.tensor.size == 1),
        )

    def use(self, pool: Pool) -> None:
        """Takes the caches of its layers."""
        self._block_size = pool.block_size
        for index, layer in zip(self._indices, self._layers, strict=True):
            cache = pool.layers[index]
            layer.keys, layer.values = map(bind.address, (cache.keys, cache.values))
            self._kept.append(cache)

    def forward(
        self, ids_R: torch.Tensor, received_RH: torch.Tensor | None, rows: Rows, tables: Tables
    ) -> torch.Tensor:
        """Token ids or received hidden states to hidden states [R, H], as `logits` takes them."""
        x_RH: torch.Tensor
        if received_RH is None:
            assert self._embed is not None
            x_RH = self._embed(ids_R[None])[0].contiguous()
        else:
            x_RH = received_RH
        angles = self._place(x_RH, rows, tables)
        if self._mesh.tensor.size == 1:
            for layer in self._layers:
                bind.attention_half(layer, self._batch, x_RH, x_RH)
                bind.mlp_half(layer, self._batch, x_RH, x_RH)
        else:
            self._run_divided(x_RH)
        del angles  # the batch pointed to them
        return x_RH

    def _run_divided(self, x_RH: torch.Tensor) -> None:
        """Each half gives this rank's part of a sum over the tensor ranks."""
        partial_RH = torch.empty_like(x_RH)
        for layer in self._layers:
            for half in (bind.attention_half, bind.mlp_half):
                half(layer, self._batch, x_RH, partial_RH)
                x_RH += self._mesh.tensor.all_reduce(partial_RH)

    def _place(self, x_RH: torch.Tensor, rows: Rows, tables: Tables) -> tuple[torch.Tensor, ...]:
        """Tells the batch where the rows are; returns what it points to beside its own room."""
        positions_1R = torch.from_numpy(rows.positions).to(torch.int64)[None]
        found = self._rotary(x_RH[:0], positions_1R)
        angles = tuple(angle[0].contiguous() for angle in found)
        batch = self._batch
        batch.cosine, batch.sine = map(bind.address, angles)
        batch.cache, batch.tables = bind.address(rows.cache), bind.address(tables.blocks)
        batch.starts, batch.slots = bind.address(rows.starts), bind.address(rows.slots)
        batch.lengths = bind.address(rows.lengths)
        batch.table_stride = tables.blocks.shape[1]
        batch.rows, batch.num_slots = len(x_RH), len(rows.slots)
        batch.block_size, batch.threads = self._block_size, torch.get_num_threads()
        return angles

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The last stage's logits [N, V], of all tensor ranks."""
        assert self._head is not None and self._norm is not None
        weight = self._norm.weight.detach()
        normed_NH = bind.normalise(hidden_NH.contiguous(), weight, self._norm.variance_epsilon)
        local_Nv = bind.multiply(normed_NH, self._head)
        return whole_vocabulary(local_Nv, self._model.vocab, self._mesh.tensor)


def _forget(layer: nn.Module) -> None:
    """Frees the weights of a layer: they live on in packed form."""
    for module in layer.modules():
        for name in list(module._parameters):
            module._parameters[name] = None
        for name in ("weight", "bias"):  # ours keeps them as plain attributes
            if isinstance(module.__dict__.get(name), torch.Tensor):
                setattr(module, name, torch.empty(0))
