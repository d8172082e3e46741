"""SwiGLU and its backward: silu(gate) * up."""

from __future__ import annotations

import torch
from torch.nn import functional

from triptych.runtime.decoder.tape import Call, Tape

_aten = torch.ops.aten


class SwiGlu:
    """From [T, gate | up] to [T, F]."""

    trains = False

    def forward(self, both_TN: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """silu(gate) * up."""
        tape.keep(both_TN)
        gate_TF, up_TF = both_TN.chunk(2, 1)
        return functional.silu(gate_TF).mul_(up_TF)

    def backward(self, grad_TF: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, gradient of gate | of up]."""
        both_TN = tape.take()
        gate_TF, up_TF = both_TN.chunk(2, 1)
        made_TN = torch.empty_like(both_TN)
        made_gate_TF, made_up_TF = made_TN.chunk(2, 1)
        torch.mul(grad_TF, functional.silu(gate_TF), out=made_up_TF)
        _aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=made_gate_TF)
        return made_TN
