"""Ring attention over the zig-zag split = plain causal attention, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import STRICT, run_ranks
from torch.nn.functional import scaled_dot_product_attention

from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.context.ring import ring_attention
from triptych.runtime.context.zigzag import zigzag_positions
from triptych.runtime.strict import StrictCommunicator

BATCH, QUERY_HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 48, 8


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
    shapes.append((BATCH, QUERY_HEADS, LENGTH, DIM))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _plain() -> list[Any]:
    *inputs, weight = _tensors()
    for tensor in inputs:
        tensor.requires_grad_()
    out = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    (out * weight).sum().backward()
    return [out.detach().numpy(), *(t.grad.numpy() for t in inputs if t.grad is not None)]


def _ring() -> tuple[Any, list[Any], int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    counters = Counters()
    kind = StrictCommunicator if STRICT else Communicator
    comm = kind("context", range(size), rank, dist.group.WORLD, counters)
    positions = zigzag_positions(LENGTH, size, rank)
    *inputs, weight = (t[:, :, positions].contiguous() for t in _tensors())
    for tensor in inputs:
        tensor.requires_grad_()
    out = ring_attention(*inputs, 0.3, comm)
    sent = counters.axis("context").bytes_sent
    (out * weight).sum().backward()
    found = [out.detach().numpy(), *(t.grad.numpy() for t in inputs if t.grad is not None)]
    return positions.numpy(), found, sent


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring_attention_equals_plain_attention(size: int) -> None:
    expected = run_ranks(1, _plain)[0]
    for positions, found, _ in run_ranks(size, _ring):
        for mine, whole in zip(found, expected, strict=True):
            part = torch.from_numpy(whole[:, :, positions])
            torch.testing.assert_close(torch.from_numpy(mine), part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_the_forward_sends_keys_and_values_once_round(size: int) -> None:
    keys_and_values = 2 * BATCH * KV_HEADS * (LENGTH // size) * DIM * 8
    for _, _, sent in run_ranks(size, _ring):
        assert sent == (size - 1) * keys_and_values


def test_every_token_is_on_one_rank() -> None:
    positions = torch.cat([zigzag_positions(48, 4, rank) for rank in range(4)])
    assert sorted(positions.tolist()) == list(range(48))
