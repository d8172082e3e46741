"""The routed experts of a layer: each a gated MLP of its own, named as on the hub's disks.

The library keeps all experts of a layer in two fused tensors. Apart, they are ordinary linears:
gradient sinks, deferred weight gradients, buckets and checkpoints need no special case, and a rank
under expert parallelism simply has fewer of them. Routers stay the library's own.

Shapes: T tokens, K experts a token, E experts, N = T x K rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from triptych.plan.families import Family
from triptych.plan.layout import expert_range
from triptych.runtime.comm import Communicator
from triptych.runtime.expert.exchange import Exchange
from triptych.runtime.expert.gate import Gate, gate_of
from triptych.runtime.expert.grouped import GroupedExperts, Kernel
from triptych.runtime.expert.scaled import ScaledExperts


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), as a dense gated MLP."""

    def __init__(self, hidden: int, width: int, bias: bool, gate: Gate) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.gate = gate

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] to [N, H]; N may be zero."""
        y: torch.Tensor = self.down_proj(self.gate(self.gate_proj(x_NH), self.up_proj(x_NH)))
        return y


class Experts(nn.Module):
    """All experts of a layer, or those of this rank, under their numbers in the whole layer.

    An expert without a token runs on an empty input: its gradient is then zero, not missing, and
    its bucket is told. With `scales_input` a token's weight multiplies what its expert sees, not
    what it gives.
    """

    def __init__(self, fused: Any, scales_input: bool = False) -> None:
        super().__init__()
        self.count: int = fused.num_experts
        hidden = getattr(fused, "hidden_dim", None) or fused.hidden_size
        width = getattr(fused, "intermediate_dim", None) or fused.intermediate_size
        has_bias, gate = hasattr(fused, "down_proj_bias"), gate_of(fused)
        for index in range(self.count):
            self.add_module(str(index), Expert(hidden, width, has_bias, gate))
        self._scales_input = scales_input
        self._exchange: Exchange | None = None
        self._grouped: GroupedExperts | None = None
        self.may_drop = False  # an index may stand for no expert

    @property
    def held(self) -> list[Expert]:
        """Those of this rank, in order."""
        return [expert for expert in self._modules.values() if isinstance(expert, Expert)]

    def keep(self, comm: Communicator) -> None:
        """Drops the experts of other ranks; tokens for those travel from now on."""
        if comm.size == 1:
            return
        held = range(*expert_range(self.count, comm.size, comm.index))
        for index in range(self.count):
            if index not in held:
                del self._modules[str(index)]
        self._exchange = Exchange(comm, self.count)

    def group(self, kernel: Kernel) -> bool:
        """Runs all experts in one product each from now on, if their weights lie for it."""
        held: Any = self.held
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = ([getattr(expert, name) for expert in held] for name in names)
        grouped = GroupedExperts(gate, up, down, held[0].gate, kernel)
        self._grouped = grouped if grouped.is_possible else None
        return grouped.is_possible

    def forward(
        self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """The sum over a token's experts, by weight; [T, H]. An index of E stands for none."""
        top_k = index_TK.shape[1]
        index_N = index_TK.flatten()
        order_N = index_N.argsort(stable=True)
        count_E = index_N.new_zeros(self.count + 1)  # the last: of rows that go nowhere
        count_E = count_E.scatter_add_(0, index_N, torch.ones_like(index_N))[: self.count]
        if self._exchange is None:
            counts = None
            if self._grouped is None or self.may_drop:
                counts = count_E.tolist()  # the one wait for the device: how the rows are divided
                order_N = order_N[: sum(counts)]
            out_NH = self._run(self._seen(hidden_TH, order_N, weight_TK), count_E, counts)
        else:
            routes = self._exchange.routes(count_E)
            order_N = order_N[: sum(routes.sent)]
            arrived_NH = routes.dispatch(self._seen(hidden_TH, order_N, weight_TK))
            out_NH = routes.combine(self._run(arrived_NH, routes.count_e, routes.counts))
        back_NH = out_NH.new_zeros(index_TK.numel(), hidden_TH.shape[1])
        spread_TKH = back_NH.index_copy(0, order_N, out_NH).view(-1, top_k, hidden_TH.shape[1])
        if not self._scales_input:
            spread_TKH = spread_TKH * weight_TK[..., None]
        return spread_TKH.sum(1).to(hidden_TH.dtype)

    def _seen(
        self, hidden_TH: torch.Tensor, order_N: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """What experts see, ordered as `order_N` orders all choices; [N, H]."""
        rows_NH = hidden_TH[order_N // weight_TK.shape[1]]
        return rows_NH * weight_TK.flatten()[order_N, None] if self._scales_input else rows_NH

    def _run(
        self, rows_NH: torch.Tensor, count_e: torch.Tensor, counts: list[int] | None
    ) -> torch.Tensor:
        """Rows ordered by expert through those of this rank; how many of each, if the host knows
        too.
        """
        if self._grouped is not None:
            return self._grouped(rows_NH, count_e)
        assert counts is not None
        parts = zip(self.held, torch.split(rows_NH, counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def separate_experts(causal_lm: nn.Module, model_family: Family) -> None:
    """Puts ours in the place of the library's fused experts, in place, on the meta device."""
    if model_family.experts is None:
        return
    layers = causal_lm.get_submodule(f"{model_family.trunk}.{model_family.layers}")
    for layer in layers.children():
        block = layer.get_submodule(model_family.experts)
        fused = getattr(block, "experts", None)
        if fused is not None:  # else a dense layer
            with torch.device("meta"):
                block.add_module("experts", Experts(fused, model_family.scales_input))
            if model_family.scales_input:
                layer.add_module(model_family.experts, ScaledExperts(block))


def experts_of(layer: nn.Module, family: Family) -> Experts | None:
    """The experts of a decoder layer, None if it is dense."""
    if family.experts is None:
        return None
    found = getattr(layer.get_submodule(family.experts), "experts", None)
    return found if isinstance(found, Experts) else None
