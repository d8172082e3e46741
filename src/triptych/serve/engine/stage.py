"""One rank's part of a model for inference: its weights, and the rows of a step through them.

Shapes: R rows (tokens of several sequences, packed), H hidden, v this rank's rows of the
vocabulary, V all of them; Q query heads, K key/value heads, D and E their dims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.families import family_of
from triptych.plan.layout import box_shape
from triptych.plan.plan import Plan, part
from triptych.runtime.attention import attend_with
from triptych.runtime.build.slots import collect_slots
from triptych.runtime.build.stage import StageModule
from triptych.runtime.build.zoo import skeleton
from triptych.runtime.comm import Communicator
from triptych.runtime.context.block import Scores
from triptych.runtime.mesh import Mesh
from triptych.runtime.precision import torch_dtype
from triptych.runtime.shard import Shard
from triptych.runtime.tensor.linear import Deferral
from triptych.serve.core.tables import Rows, Tables
from triptych.serve.engine.cache import Heads, Pool


class Stage(Protocol):
    """What a worker drives."""

    def use(self, pool: Pool) -> None:
        """Takes the caches of its layers."""

    def forward(
        self, ids_R: torch.Tensor, received_RH: torch.Tensor | None, rows: Rows, tables: Tables
    ) -> torch.Tensor:
        """Token ids or received hidden states to hidden states [R, H], as `logits` takes them."""
        ...

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The last stage's logits [N, V], of all tensor ranks."""
        ...


class ModelStage:
    """The library's modules of this rank under a plan; `shards` are its weights, to be loaded."""

    def __init__(self, config: dict[str, Any], model: Model, plan: Plan, mesh: Mesh) -> None:
        self.mesh = mesh
        self.model = model
        self.dtype = torch_dtype(plan.precision.parameter)
        self.module = StageModule(
            skeleton(config), model, plan, mesh, mesh.coordinates.pp, Deferral()
        )
        self.shards = self._allocate(plan)
        self.module.to_device(mesh.device)
        self.shards += self.module.buffer_shards(saved=False)
        self.module.eval()

    def _allocate(self, plan: Plan) -> list[Shard]:
        shards = []
        for slot in collect_slots([self.module], self.model, plan, self.mesh):
            values = torch.empty(box_shape(slot.box), dtype=self.dtype, device=self.mesh.device)
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

    def heads(self) -> dict[int, Heads]:
        """What each layer keeps of a token here: found by sending one through. Collective."""
        found: dict[int, Heads] = {}

        def note(
            index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Scores
        ) -> torch.Tensor:
            found[index] = Heads(k.shape[1], k.shape[3], v.shape[3])
            return q.new_zeros(*q.shape[:3], v.shape[3])

        self._attend_with(note)
        ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.mesh.device)
        shape = (1, 1, self.model.hidden)
        received = None
        if not self.module.is_first:
            received = torch.zeros(shape, dtype=self.dtype, device=self.mesh.device)
        with torch.inference_mode():
            self.module(ids_11, received, torch.zeros_like(ids_11))
        return found

    def use(self, pool: Pool) -> None:
        """Takes the caches of its layers."""
        self._pool = pool
        self._attend_with(self._attend)

    def _attend_with(self, attend: Callable[..., torch.Tensor]) -> None:
        for index, layer in self.module.layers():
            attention = layer.get_submodule(family_of(self.model.family).attention)
            attend_with(attention, partial(attend, index))

    def _attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """[1, Q, R, D], [1, K, R, D], [1, K, R, E] -> [1, Q, R, E]."""
        q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
        seen = self._pool.attend(index, q, k, v, scores, self._rows, self._tables)
        return seen.transpose(0, 1)[None]

    def forward(
        self, ids_R: torch.Tensor, received_RH: torch.Tensor | None, rows: Rows, tables: Tables
    ) -> torch.Tensor:
        """Token ids or received hidden states to hidden states [R, H], as `logits` takes them."""
        self._rows, self._tables = rows, tables
        positions_1R = torch.from_numpy(rows.positions).to(self.mesh.device, torch.int64)[None]
        received = None if received_RH is None else received_RH[None]
        hidden_1RH: torch.Tensor = self.module(ids_R[None], received, positions_1R)
        return hidden_1RH[0]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The last stage's logits [N, V], of all tensor ranks."""
        local_Nv = self.module.local_logits(hidden_NH[None])[0]
        return whole_vocabulary(local_Nv, self.model.vocab, self.mesh.tensor)


def whole_vocabulary(local_Nv: torch.Tensor, vocab: int, tensor: Communicator) -> torch.Tensor:
    """All ranks' columns in one; they may be uneven, messages may not."""
    if tensor.size == 1:
        return local_Nv
    bounds = [part(vocab, tensor.size, index) for index in range(tensor.size)]
    widest = max(stop - start for start, stop in bounds)
    padded = local_Nv.new_zeros(len(local_Nv), widest)
    padded[:, : local_Nv.shape[1]] = local_Nv
    parts = tensor.all_gather(padded).view(tensor.size, len(local_Nv), widest)
    pieces = [p[:, : stop - start] for p, (start, stop) in zip(parts, bounds, strict=True)]
    return torch.cat(pieces, dim=1)
