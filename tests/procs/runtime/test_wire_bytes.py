"""Bytes on the wire of a step: ring-optimal, by our counters and by the kernel's.

The ranks run in a network namespace of their own, so that its loopback counter sees nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import batch_of, make_engine, split, tiny_config
from ranks import STRICT, run_ranks

from triptych.plan.plan import Plan

HIDDEN, LAYERS, VOCAB, LENGTH, SEQUENCES, WIDTH = 256, 2, 2048, 1024, 4, 512
CONFIG = tiny_config(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=LAYERS,
    vocab_size=VOCAB,
    max_position_embeddings=LENGTH,
)
CLONE_NEWNET = 0x40000000
HEADERS = 0.02
"""Allowed above the optimum; headers and acknowledgements are 1 % of it on loopback."""


def _own_network() -> None:
    """Moves this process into a fresh network namespace with its loopback up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise PermissionError("network namespaces need root")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, request)  # SIOCSIFFLAGS


def _loopback_bytes() -> int:
    line = next(row for row in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in row)
    return int(line.split(":")[1].split()[8])


def _step(plan: Plan) -> tuple[int, dict[str, int]]:
    """Loopback bytes of a step, and what this rank says it sent.

    The least of two steps: TCP repeats what a busy machine drops.
    """
    engine = make_engine(plan, CONFIG)
    rows = batch_of(0, SEQUENCES, LENGTH, VOCAB)
    microbatches = split(rows, plan, engine.mesh.coordinates)
    engine.step(microbatches, 1e-3)
    seen: list[int] = []
    for _ in range(2):
        dist.barrier()
        before = _loopback_bytes()
        dist.barrier()
        sent = engine.step(microbatches, 1e-3).bytes_sent
        dist.barrier()
        seen.append(_loopback_bytes() - before)
    return min(seen), sent


def in_own_network(plan: Plan) -> list[tuple[int, dict[str, int]]]:
    def body() -> Any:
        _own_network()
        return run_ranks(plan.world_size, _step, plan)

    return run_ranks(1, body, timeout_s=120.0)[0]  # the ranks' own failure comes first


def _parameters() -> int:
    attention = HIDDEN * HIDDEN * 2 + HIDDEN * (HIDDEN // 8 * 2) * 2
    return LAYERS * (attention + 3 * HIDDEN * WIDTH + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN


def _optimal_bytes(plan: Plan) -> dict[str, float]:
    """Bytes that all ranks together must send, by axis (domain.md sections 1-4; fp32)."""
    tp, pp, dp = plan.tp, plan.pp, plan.dp
    tokens = SEQUENCES * LENGTH  # of the global batch
    activation = tokens * HIDDEN * 4
    # Each of `dp` replicas all-reduces its share of the tokens over groups of `tp` ranks.
    all_reduces = 4 * LAYERS + 2  # two forward and two backward a layer, embedding, head
    softmax = 3 * tokens * 4
    # A backward gathers the inputs of both regions of a layer again: no rank keeps them whole.
    again = 2 * LAYERS * activation if plan.sequence_parallel else 0
    return {
        "tensor": (tp - 1) * (2 * (all_reduces * activation + softmax) + again),
        "pipeline": 2 * (pp - 1) * activation * (1 if plan.sequence_parallel else tp),
        "data": 2 * (dp - 1) * _parameters() * 4,
    }


@pytest.mark.sweep(2)
@pytest.mark.skipif(STRICT, reason="strict communication sends acknowledgements and checksums")
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 4},
        {"pp": 2},
        {"dp": 2},
        {"dp": 4},
        {"dp": 2, "zero": 1},
        {"dp": 4, "zero": 1},
        {"tp": 2, "pp": 2},
        {"pp": 2, "dp": 2, "zero": 1},
    ],
    ids=str,
)
def test_a_step_sends_what_rings_need_and_no_more(settings: dict[str, Any]) -> None:
    plan = Plan.uniform(LAYERS, **settings)
    answers = in_own_network(plan)
    optimal = _optimal_bytes(plan)
    for axis, expected in optimal.items():
        counted = sum(sent.get(axis, 0) for _, sent in answers)
        assert counted == pytest.approx(expected, rel=0.005, abs=2000), axis
    kernel = max(seen for seen, _ in answers)
    ratio = kernel / sum(optimal.values())
    print(f"{plan.short()}: kernel {kernel} B, optimal x {ratio:.4f}")
    assert ratio <= 1 + HEADERS
