"""Losses that keep routers balanced and their logits small, and what a capacity drops.

With N trained tokens in the global batch, n of them in a sequence, E experts, K a token:

    load balance   aux_loss x sum over layers and sequences of  n/N x E x sum over experts of f P
    z              z_loss x sum over layers and tokens of  1/N x logsumexp(logits)^2

f is the share of an expert in the sequence's K n choices, P its mean probability there, so that
even routing gives the coefficient, once a layer. Both are sums over sequences or tokens of the
global batch: the same in every layout. f takes no gradient. Their gradient enters with that of the
router's weights (`_Attach`), whatever schedule or recomputation runs the backward.

A capacity lets an expert take at most factor x K x S / E tokens of a sequence of S, the first ones;
the others pass by it and count as dropped. Without one nothing is dropped.

Source: DeepSeek-AI 2024 (V3), eq. 17-20; Zoph et al. 2022 (ST-MoE), eq. 5; Fedus et al. 2021, 2.2.
Shapes: B sequences, S tokens of each on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from triptych.errors import PlanError
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.routing import routing_problems
from triptych.runtime.comm import Communicator
from triptych.runtime.tensor.loss import IGNORED

ROUTED = "routed"
"""The keyword under which a `Routed` reaches the decoder layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Coefficients of the two losses and the capacity factor; `aux_loss` None: as the config says.

    A configuration says it with `output_router_logits`, like the library.
    """

    aux_loss: float | None = None
    z_loss: float = 0.0
    capacity_factor: float | None = None

    def require_possible(self, plan: Plan, model: Model) -> None:
        """Returns if a model has routers and a plan allows it. Raises PlanError otherwise."""
        problems = routing_problems(
            plan,
            model,
            has_losses=bool(self.aux_loss or self.z_loss),
            capacity_factor=self.capacity_factor,
        )
        if found := list(problems):
            raise PlanError(found)

    def aux_coefficient(self, config: Any) -> float:
        """The coefficient of load balancing for a model of the library."""
        if self.aux_loss is not None:
            return self.aux_loss
        applies = getattr(config, "output_router_logits", False)
        return float(getattr(config, "router_aux_loss_coef", 0.0)) if applies else 0.0


class RouterResult(NamedTuple):
    """What the routers of all layers gave in a step: both losses, and choices dropped."""

    aux_loss: float
    z_loss: float
    dropped_tokens: int


@dataclass(slots=True, eq=False)
class Routed:
    """A micro-batch on its way through a stage.

    `trained_BS` says which tokens count, `scale` multiplies their losses. Routers leave their parts
    of a `RouterResult` by layer, so that one that is recomputed does not count twice.
    """

    trained_BS: torch.Tensor
    scale: float | torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class RouterLog:
    """What the routers of a rank left in a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._routed: list[Routed] = []

    def begin(self) -> None:
        """Forgets the last step."""
        self._routed.clear()

    def follow(self, labels_BS: torch.Tensor, scale: float | torch.Tensor) -> Routed:
        """A micro-batch that begins a stage."""
        self._routed.append(Routed(labels_BS != IGNORED, scale))
        return self._routed[-1]

    def total(self, loss_scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """This rank's part of a `RouterResult` [3], its losses without the scale that they have.

        Parts add up over all ranks.
        """
        parts = [part for routed in self._routed for part in routed.parts.values()]
        if not parts:
            return torch.zeros(3, dtype=torch.float64, device=self._device)
        total = torch.stack(parts).double().sum(0)
        return torch.cat((total[:2] / loss_scale, total[2:]))


class Balancer:
    """Watches the router of one layer.

    On one tensor rank alone are losses counted and given gradients: all see the same tokens.
    """

    def __init__(
        self,
        layer_index: int,
        settings: RouterSettings,
        config: Any,
        *,
        is_sigmoid: bool,
        tensor: Communicator,
        context: Communicator,
    ) -> None:
        self._layer_index = layer_index
        self._aux, self._z = settings.aux_coefficient(config), settings.z_loss
        self._capacity_factor = settings.capacity_factor
        self._is_sigmoid = is_sigmoid
        self._is_counted = tensor.index == 0
        self._context = context
        self._routed: Routed | None = None

    def attach(self, attention: nn.Module, router: nn.Module) -> None:
        """From now on a layer's router is balanced in training.

        The layer hands what it is told to its attention, which comes first, and does so again when
        it is recomputed: hooks of the layer itself do not run then.
        """
        attention.register_forward_pre_hook(self._take, with_kwargs=True)
        router.register_forward_hook(self._balance)

    def _take(self, _: nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        self._routed = kwargs.get(ROUTED)

    def _balance(self, _: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> Any:
        routed = self._routed
        if routed is None:  # evaluation, inference
            return None
        logits_TE, weight_TK, index_TK = output
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        parts = torch.zeros(3, dtype=wide, device=logits_TE.device)
        if self._is_counted and (self._aux or self._z):
            losses = self._losses(logits_TE.to(wide), index_TK, routed)
            weight_TK = _attach(weight_TK, losses.sum())
            parts[:2] = losses.detach()
        if self._capacity_factor is not None:
            fits_TK = self._fits(index_TK, logits_TE.shape[1], len(routed.trained_BS))
            index_TK = index_TK.masked_fill(~fits_TK, logits_TE.shape[1])
            parts[2] = (~fits_TK).sum() if self._is_counted else 0.0
        routed.parts[self._layer_index] = parts
        return logits_TE, weight_TK, index_TK

    def _losses(
        self, logits_TE: torch.Tensor, index_TK: torch.Tensor, routed: Routed
    ) -> torch.Tensor:
        """Load balance and z, [2]."""
        trained_BS = routed.trained_BS
        shape = (*trained_BS.shape, -1)
        losses = logits_TE.new_zeros(2)
        if self._aux:
            scores = logits_TE.sigmoid() if self._is_sigmoid else logits_TE.softmax(-1)
            probability_TE = scores / scores.sum(-1, keepdim=True)
            balance = load_balance(
                probability_TE.view(shape), index_TK.view(shape), trained_BS, self._context
            )
            losses[0] = self._aux * routed.scale * balance
        if self._z:
            squares_BS = logits_TE.logsumexp(-1).square().view(trained_BS.shape)
            losses[1] = self._z * routed.scale * (squares_BS * trained_BS).sum()
        return losses

    def _fits(self, index_TK: torch.Tensor, num_experts: int, sequences: int) -> torch.Tensor:
        assert self._capacity_factor is not None and self._context.size == 1
        index_BSK = index_TK.view(sequences, -1, index_TK.shape[1])
        return within_capacity(index_BSK, num_experts, self._capacity_factor).view_as(index_TK)


def load_balance(
    probability_BSE: torch.Tensor,
    index_BSK: torch.Tensor,
    trained_BS: torch.Tensor,
    context: Communicator,
) -> torch.Tensor:
    """Sum over sequences of n x E x sum f P; of this rank's tokens, f being the whole sequence's.

    Cost: B (E + 1) elements all-reduced over the context ranks.
    """
    experts, top_k = probability_BSE.shape[2], index_BSK.shape[2]
    trained_BS1 = trained_BS[..., None].to(probability_BSE.dtype)
    chosen_BSE = torch.zeros_like(probability_BSE).scatter_(2, index_BSK, 1.0)
    choices_BE = (chosen_BSE * trained_BS1).sum(1)
    seen = context.all_reduce(torch.cat((choices_BE, trained_BS1.sum(1)), dim=1))
    share_BE = seen[:, :-1] / (top_k * seen[:, -1:]).clamp_min(1.0)
    return experts * (share_BE * (probability_BSE * trained_BS1).sum(1)).sum()


def within_capacity(index_BSK: torch.Tensor, num_experts: int, factor: float) -> torch.Tensor:
    """True for the choices that an expert takes, in the order of the tokens; [B, S, K]."""
    batch, length, top_k = index_BSK.shape
    capacity = max(1, math.ceil(factor * length * top_k / num_experts))
    chosen_BSE = index_BSK.new_zeros(batch, length, num_experts).scatter_(2, index_BSK, 1)
    return chosen_BSE.cumsum(1).gather(2, index_BSK) <= capacity


class _Attach(torch.autograd.Function):
    """Lets a loss have its gradient when the weights have theirs."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


def _attach(weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Attach.apply(weights, loss)  # type: ignore[no-untyped-call]
    return result
