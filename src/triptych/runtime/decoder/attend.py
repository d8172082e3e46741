"""The attention of a written layer, between its projections.

The fused kernel of CPUs is called as it is, with its own backward. All else (windows, documents,
context ranks, attention that runs again, the kernels of GPUs, of which the library chooses one) is
a graph of autograd inside the layer's node.

Shapes: B batch, S sequence, T = B x S tokens, H query heads, K key/value heads, h = H + K,
n = H + 2K, D head size, N = n x D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triptych.runtime.attention import causal_attention, is_plain
from triptych.runtime.context.block import Attended, flash, flash_backward
from triptych.runtime.decoder.norm import Norm
from triptych.runtime.decoder.rotary import Rotary
from triptych.runtime.decoder.tape import Call, Tape


class Heads(NamedTuple):
    """This rank's heads and how their scores are scaled."""

    query: int
    key: int
    size: int
    scale: float


class HeadNorms(NamedTuple):
    """Norms of each query head and of each key head."""

    query: Norm
    key: Norm


class _Graph(NamedTuple):
    output: torch.Tensor
    grads: list[torch.Tensor]


class Attend:
    """From [T, queries | keys | values] to [T, H x D].

    Args:
        module: the library's, with what our attention function reads there.
        rotary: None if the layer has no positions.
        window: tokens that a query sees, if not all before it.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        heads: Heads,
        norms: HeadNorms | None,
        rotary: Rotary | None,
        window: int | None,
    ) -> None:
        self._module, self._norms, self._rotary, self._window = module, norms, rotary, window
        self._is_plain = is_plain(module)
        self._query, self._size, self._scale = heads.query, heads.size, heads.scale
        self._heads = (heads.query, heads.key)
        self._parts = (heads.query + heads.key, heads.key)
        self._all = sum(self._parts)

    @property
    def trains(self) -> bool:
        """True if its norms do."""
        return self._norms is not None and (self._norms.query.trains or self._norms.key.trains)

    def forward(self, made_TN: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """Causal attention."""
        whole = made_TN.view(call.batch, -1, self._all, self._size)
        turned, values = whole.split_with_sizes(self._parts, 2)
        if self._norms is not None:
            turned = self._normed(turned, tape)
        if self._rotary is not None:
            self._rotary.turn(turned, call.rotary)
        q_BHSD, k_BKSD = turned.transpose(1, 2).split_with_sizes(self._heads, 1)
        v_BKSD = values.transpose(1, 2)
        if self._needs_graph(q_BHSD, call):
            out_BSHD = self._with_graph(q_BHSD, k_BKSD, v_BKSD, call, tape)
        else:
            out_BHSD, log_sums = flash(q_BHSD, k_BKSD, v_BKSD, True, self._scale)
            for tensor in (q_BHSD, k_BKSD, v_BKSD, out_BHSD, log_sums):
                tape.keep(tensor)
            out_BSHD = out_BHSD.transpose(1, 2)
        return out_BSHD.reshape(made_TN.shape[0], -1)

    def backward(self, grad_TM: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, N], of queries, keys and values."""
        grad_BSHD = grad_TM.view(call.batch, -1, self._query, self._size)
        grads = self._core_backward(grad_BSHD, tape)
        made = torch.cat([grad.transpose(1, 2) for grad in grads], dim=2)
        turned = made.narrow(2, 0, self._parts[0])
        if self._rotary is not None:
            self._rotary.turn_back(turned, call.rotary)
        if self._norms is not None:
            self._normed_backward(turned, tape)
        return made.view(grad_TM.shape[0], -1)

    # ---- norms of heads ----------------------------------------------------------------------

    def _normed(self, x_BShD: torch.Tensor, tape: Tape) -> torch.Tensor:
        assert self._norms is not None
        parts = zip(self._norms, x_BShD.split_with_sizes(self._heads, 2), strict=True)
        made = [norm.forward(x.reshape(-1, self._size), tape).view(x.shape) for norm, x in parts]
        return torch.cat(made, dim=2)

    def _normed_backward(self, grad_BShD: torch.Tensor, tape: Tape) -> None:
        """In place."""
        assert self._norms is not None
        parts = zip(self._norms, grad_BShD.split_with_sizes(self._heads, 2), strict=True)
        for norm, grad in reversed(list(parts)):
            grad.copy_(norm.backward(grad.reshape(-1, self._size), tape).view(grad.shape))

    # ---- attention ---------------------------------------------------------------------------

    def _needs_graph(self, q_BHSD: torch.Tensor, call: Call) -> bool:
        is_local = self._window is not None and self._window < q_BHSD.shape[2]
        is_whole = call.documents is None and not is_local
        return not (self._is_plain and is_whole) or q_BHSD.is_cuda

    def _with_graph(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, tape: Tape
    ) -> torch.Tensor:
        grads: list[torch.Tensor] = []
        with torch.set_grad_enabled(tape.is_kept):
            if tape.is_kept:
                anchor = torch.empty(0, device=q.device, requires_grad=True)
                q, k, v = _Start.apply(anchor, grads, q, k, v)  # type: ignore[no-untyped-call]
            out_BSHD, _ = causal_attention(
                self._module,
                q,
                k,
                v,
                None,
                scaling=self._scale,
                sliding_window=self._window,
                documents=call.documents,
                positions=call.positions,
            )
        if tape.is_kept:
            tape.graphs.append(_Graph(out_BSHD, grads))
        return out_BSHD.detach()

    def _core_backward(self, grad_BSHD: torch.Tensor, tape: Tape) -> Any:
        """Gradients [B, heads, S, D] of queries, keys, values."""
        if tape.graphs:
            graph: _Graph = tape.graphs.pop()
            torch.autograd.backward(graph.output, grad_BSHD)
            return graph.grads
        log_sums, out, v, k, q = (tape.take() for _ in range(5))
        grad_BHSD = grad_BSHD.transpose(1, 2)
        return flash_backward(grad_BHSD, q, k, v, Attended(out, log_sums), True, self._scale)


class _Start(torch.autograd.Function):
    """Where a graph begins: hands gradients over, and holds no tensor that the graph does not."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, grads: list[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.grads = grads
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.grads.extend(grads)
        return (None,) * (2 + len(grads))
