"""One rank's part of a model for inference: weights and nothing else, a KV cache a sequence.

Shapes: B = 1 sequence, S new tokens, H hidden, v this rank's rows of the vocabulary, V all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from triptych.model.model import Model
from triptych.plan.layout import box_shape
from triptych.plan.plan import Plan, part
from triptych.runtime.build.slots import collect_slots
from triptych.runtime.build.stage import StageModule
from triptych.runtime.build.zoo import skeleton
from triptych.runtime.mesh import Mesh
from triptych.runtime.precision import torch_dtype
from triptych.runtime.shard import Shard
from triptych.runtime.tensor.linear import Deferral


class StageCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of one stage's layers; its length is that of the first of them."""

    def __init__(self, first_layer: int) -> None:
        super().__init__()
        self._first_layer = first_layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache."""
        return int(super().get_seq_length(max(layer_idx, self._first_layer)))


class InferenceStage:
    """The layers of this rank under a plan; `shards` are its weights, to be loaded."""

    def __init__(self, config: dict[str, Any], model: Model, plan: Plan, mesh: Mesh) -> None:
        self._mesh = mesh
        self._model = model
        self._dtype = torch_dtype(plan.precision.parameter)
        self._first_layer = plan.stages[mesh.coordinates.pp].start
        self._stage = StageModule(
            skeleton(config), model, plan, mesh, mesh.coordinates.pp, Deferral()
        )
        self.shards = self._allocate(plan)
        self._stage.to_device(mesh.device)
        self.shards += self._stage.buffer_shards(saved=False)
        self._stage.eval()

    def _allocate(self, plan: Plan) -> list[Shard]:
        shards = []
        for slot in collect_slots([self._stage], self._model, plan, self._mesh):
            values = torch.empty(box_shape(slot.box), dtype=self._dtype, device=self._mesh.device)
            parameter = nn.Parameter(values, requires_grad=False)
            for module, attribute in slot.places:
                setattr(module, attribute, parameter)
            shard = Shard(
                kind="weight",
                name=slot.name,
                shape=slot.shape,
                box=slot.box,
                tensor=values,
                saved=False,
            )
            shards.append(shard)
        return shards

    def new_cache(self) -> StageCache:
        """An empty cache for one sequence."""
        return StageCache(self._first_layer)

    def forward(self, ids_S: torch.Tensor, cache: StageCache) -> torch.Tensor | None:
        """The logits [V] after the last of S tokens, on the last stage's ranks; None elsewhere.

        Collective over the ranks of the plan. Cost: hidden states [1, S, H] from stage to stage.
        """
        pipeline = self._mesh.forward[0]
        received = None
        if not self._stage.is_first:
            shape = (1, len(ids_S), self._model.hidden)
            empty = torch.empty(shape, dtype=self._dtype, device=self._mesh.device)
            received = pipeline.start_receive(empty, pipeline.index - 1).wait()
        hidden_1SH: torch.Tensor = self._stage(ids_S[None], received, cache=cache)
        if not self._stage.is_last:
            pipeline.start_send(hidden_1SH.contiguous(), pipeline.index + 1).wait()
            return None
        return self._whole_vocabulary(self._stage.local_logits(hidden_1SH[:, -1:])[0, 0])

    def _whole_vocabulary(self, logits_v: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in one; rows may be uneven, messages may not."""
        tensor = self._mesh.tensor
        if tensor.size == 1:
            return logits_v
        bounds = [part(self._model.vocab, tensor.size, index) for index in range(tensor.size)]
        widest = max(stop - start for start, stop in bounds)
        padded = logits_v.new_zeros(widest)
        padded[: len(logits_v)] = logits_v
        rows = tensor.all_gather(padded).view(tensor.size, widest)
        pieces = [row[: stop - start] for row, (start, stop) in zip(rows, bounds, strict=True)]
        return torch.cat(pieces)
