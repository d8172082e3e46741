"""Vocabulary-parallel head and cross-entropy in one, chunk by chunk: logits are never whole.

For each chunk of tokens: local logits, their maximum over the ranks, then the sum of exponentials
and the logit of the target in one all-reduce (Megatron-LM's fused form). Gradients are made at
once, while the chunk's softmax is there, so nothing of size tokens x vocabulary is kept.

Shapes: T tokens, H hidden, v = this rank's rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triptych.runtime.comm import Communicator
from triptych.runtime.tensor.linear import Sink

CHUNK_TOKENS = 1024
IGNORED = -100


class Vocabulary(NamedTuple):
    """This rank's rows [start, stop) of the vocabulary and the ranks that hold the others."""

    start: int
    stop: int
    comm: Communicator


class Bending(NamedTuple):
    """What a family does to its logits: c x tanh(factor x logits / c), c being `softcap`."""

    factor: float = 1.0
    softcap: float | None = None

    def bend(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Bends in place; the slope by factor x logits, None if it is 1 everywhere."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1.0 - logits.square()
        logits.mul_(self.softcap)
        return slope


PLAIN = Bending()


def cross_entropy(
    hidden_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    labels_T: torch.Tensor,
    vocabulary: Vocabulary,
    scale: float | torch.Tensor = 1.0,
    sink: Sink | None = None,
    bending: Bending = PLAIN,
) -> torch.Tensor:
    """The sum over tokens of scale x cross-entropy, as a scalar; labels of -100 do not count.

    With a `sink` the gradient of `weight_vH` is added there during the forward: the scalar must
    then be what the backward starts from, with gradient 1. A frozen weight has no gradient.

    The gradient of `hidden_TH` covers this rank's rows only: sum it over the ranks (as
    `enter_region` does). Cost: 3 T fp32 all-reduced over the vocabulary's ranks.
    """
    options = _Options(vocabulary, scale, sink, torch.is_grad_enabled(), bending)
    loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_vH, labels_T, options
    )
    return loss


class _Options(NamedTuple):
    vocabulary: Vocabulary
    scale: float | torch.Tensor
    sink: Sink | None
    wanted: bool  # are gradients
    bending: Bending


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        labels_T: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        vocabulary, scale, sink, wanted, bending = options
        ctx.sink = sink
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_TH.device)
        grad_hidden = torch.empty_like(hidden_TH) if wanted else None
        has_own = wanted and sink is None and weight_vH.requires_grad
        grad_weight = torch.zeros_like(weight_vH) if has_own else None
        for start in range(0, len(labels_T), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            logits = (hidden_TH[rows] @ weight_vH.T).to(wide)
            slope = bending.bend(logits)
            factor = scale * bending.factor
            losses, gradient = softmax_loss(logits, labels_T[rows], vocabulary, factor)
            loss += losses.sum()
            if grad_hidden is None:
                continue
            if slope is not None:
                gradient.mul_(slope)
            gradient = gradient.to(hidden_TH.dtype)
            torch.mm(gradient, weight_vH, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(gradient.T, hidden_TH[rows])
            elif sink is not None:
                sink.add_product(gradient, hidden_TH[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.arrive()
            return grad_hidden, None, None, None
        factor = grads[0].to(grad_hidden.dtype)
        grad_weight = None if grad_weight is None else grad_weight.mul_(factor)
        return grad_hidden.mul_(factor), grad_weight, None, None


def softmax_loss(
    logits_Tv: torch.Tensor,
    labels_T: torch.Tensor,
    vocabulary: Vocabulary,
    factor: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [T], and factor x their gradient by the logits [T, v]; overwrites the logits."""
    comm = vocabulary.comm
    trained_T = labels_T != IGNORED
    largest_T = comm.all_reduce(logits_Tv.amax(dim=1), maximum=True)
    logits_Tv.sub_(largest_T[:, None])
    here_T = trained_T & (labels_T >= vocabulary.start) & (labels_T < vocabulary.stop)
    column_T = torch.where(here_T, labels_T - vocabulary.start, 0)[:, None]
    target_T = torch.where(here_T, logits_Tv.gather(1, column_T)[:, 0], 0)
    exp_Tv = logits_Tv.exp_()
    sums_2T = comm.all_reduce(torch.stack((exp_Tv.sum(dim=1), target_T)))
    losses_T = torch.where(trained_T, sums_2T[0].log() - sums_2T[1], 0)
    # The factor enters by token: no pass of its own over [T, v].
    weight_T = trained_T.to(exp_Tv.dtype) * factor
    gradient_Tv = exp_Tv.mul_((weight_T / sums_2T[0])[:, None])
    gradient_Tv.scatter_add_(1, column_T, -(weight_T * here_T)[:, None])
    return losses_T, gradient_Tv
