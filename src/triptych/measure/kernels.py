"""Kernels of a training step: products, attention, memory-bound operators, copies, the update.

The operators are those that run: the library's norms and rotary embeddings, our loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import cycle, product
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from triptych.measure.watch import Pool, Row, Watch, forth_and_back, in_rounds
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.data.optimizer import OptimizerSettings, update_rows
from triptych.runtime.tensor.loss import Vocabulary, softmax_loss

Found = tuple[list[Row], float]
"""Rows of points and what was measured of them, and the noise."""

ROWS, INNER, COLUMNS = (64, 256, 1024), (32, 128, 512, 2048), (32, 128, 512, 2048, 8192)
CUDA_ROWS = (256, 1024, 4096, 16384)
CUDA_INNER = CUDA_COLUMNS = (64, 256, 1024, 4096, 16384)

LENGTHS, HEAD_SIZES, HEADS = (64, 256, 1024), (16, 32, 64, 128), 8

ELEMENTS = tuple(float(1 << power) for power in (11, 14, 17, 20, 23))
CUDA_ELEMENTS = tuple(float(1 << power) for power in (11, 17, 20, 23, 26, 28))
UPDATED = tuple(float(1 << power) for power in (14, 17, 20, 23))
CUDA_UPDATED = tuple(float(1 << power) for power in (17, 20, 23, 26, 28))

WIDTH, HEAD, VOCABULARY = 256, 64, 8192
COPIED_BYTES = 64 << 20
UPDATED_TENSORS = 8


def products(watch: Watch, dtype: torch.dtype) -> Found:
    """Rows, inner dimension, columns: FLOP/s of x W^T."""
    on_gpu = watch.device.type == "cuda"
    axes = (CUDA_ROWS, CUDA_INNER, CUDA_COLUMNS) if on_gpu else (ROWS, INNER, COLUMNS)
    largest = axes[2][-1] * axes[1][-1] + axes[0][-1] * axes[1][-1]
    pool = Pool(dtype, watch.device, 2 * largest)

    def measured(point: Row) -> Row:
        m, k, n = map(int, point)
        count = watch.copies((m * k + k * n + m * n) * dtype.itemsize)
        places = cycle([(pool.take(m, k), pool.take(n, k)) for _ in range(count)])
        kept: deque[torch.Tensor] = deque(maxlen=count)

        def call() -> None:
            x, weight = next(places)
            kept.append(x @ weight.T)

        return [2.0 * m * k * n / watch.seconds(call)]

    return in_rounds([[float(x) for x in point] for point in product(*axes)], measured)


def attention(watch: Watch, dtype: torch.dtype) -> Found:
    """Tokens, head size: FLOP/s of the triangle's two products, forward and backward."""
    lengths = (256, 1024, 4096) if watch.device.type == "cuda" else LENGTHS
    pool = Pool(dtype, watch.device, 16 * HEADS * lengths[-1] * HEAD_SIZES[-1])

    def measured(point: Row) -> Row:
        length, size = map(int, point)
        count = min(8, watch.copies(8 * HEADS * length * size * dtype.itemsize))
        inputs = [tuple(pool.take(1, HEADS, length, size) for _ in range(3)) for _ in range(count)]
        flops = 2.0 * HEADS * 2 * size * length / 2 * length
        forward_s, backward_s = forth_and_back(watch, _causal, inputs)
        return [flops / forward_s, flops / backward_s]

    return in_rounds([[float(a), float(b)] for a, b in product(lengths, HEAD_SIZES)], measured)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


# --- memory-bound operators --------------------------------------------------------------------


class _Kind(NamedTuple):
    """An operator, what it is called with, and elements moved for one that is given."""

    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    inputs: Callable[[Pool, int], tuple[torch.Tensor, ...]]
    moved: float


def operator(watch: Watch, dtype: torch.dtype, name: str) -> Found:
    """Elements that one fused kernel would move: seconds forward and backward."""
    if name == "loss":
        return _loss(watch, dtype)
    if name == "embedding":
        return _embedding(watch, dtype)
    kind = _kinds(watch.device, dtype)[name]
    sizes = _sizes(watch)
    pool = Pool(dtype, watch.device, int(2 * sizes[-1]))

    def measured(point: Row) -> Row:
        given = int(point[0] / kind.moved)
        count = min(16, watch.copies(2 * point[0] * dtype.itemsize))
        inputs = [kind.inputs(pool, given) for _ in range(count)]
        forward_s, backward_s = forth_and_back(watch, kind.run, inputs)
        return [forward_s, forward_s if name == "residual" else backward_s]

    return in_rounds([[size] for size in sizes], measured)


def _sizes(watch: Watch) -> tuple[float, ...]:
    return CUDA_ELEMENTS if watch.device.type == "cuda" else ELEMENTS


def _kinds(device: torch.device, dtype: torch.dtype) -> Mapping[str, _Kind]:
    """The kinds that autograd runs back. A residual's backward is an addition too."""
    norm = LlamaRMSNorm(WIDTH).to(device=device, dtype=dtype)

    def rows(pool: Pool, given: int) -> tuple[torch.Tensor, ...]:
        return (pool.take(max(1, given // WIDTH), WIDTH),)

    def two(pool: Pool, given: int) -> tuple[torch.Tensor, ...]:
        count = max(1, given // 2 // WIDTH)
        return pool.take(count, WIDTH), pool.take(count, WIDTH)

    def heads(pool: Pool, given: int) -> tuple[torch.Tensor, ...]:
        length = max(1, given // 2 // HEADS // HEAD)
        return tuple(pool.take(1, HEADS, length, HEAD) for _ in range(2))

    def turned(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.ones(1, query.shape[2], HEAD, device=device, dtype=dtype)
        turned: tuple[torch.Tensor, torch.Tensor]
        turned = apply_rotary_pos_emb(query, key, angles, angles)
        return turned

    def dealt(x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(len(x) - 1, -1, -1, device=device)]

    return {
        "norm": _Kind(norm, rows, 2.0),
        "activation": _Kind(lambda gate, up: silu(gate) * up, two, 1.5),
        "rotary": _Kind(turned, heads, 2.0),
        "residual": _Kind(torch.add, two, 1.5),
        "rows": _Kind(dealt, rows, 2.0),
    }


def _embedding(watch: Watch, dtype: torch.dtype) -> Found:
    """The lookup, and the sum of the rows' gradients into the table, as the runtime does it."""
    table = torch.zeros(VOCABULARY, WIDTH, device=watch.device, dtype=dtype)
    gradient = torch.zeros(VOCABULARY, WIDTH, device=watch.device)

    def measured(point: Row) -> Row:
        ids = torch.randint(VOCABULARY, (max(1, int(point[0]) // 2 // WIDTH),), device=watch.device)
        rows = torch.ones(len(ids), WIDTH, device=watch.device)

        def back() -> None:
            gradient.index_put_((ids,), rows, accumulate=True)

        return [watch.seconds(lambda: table[ids]), watch.seconds(back)]

    return in_rounds([[size] for size in _sizes(watch)[:-1]], measured)


def _loss(watch: Watch, dtype: torch.dtype) -> Found:
    """Logits: seconds of softmax, loss and gradient in place (all in the forward)."""
    vocabulary = Vocabulary(0, VOCABULARY, Communicator("tensor", (0,), 0, None, Counters()))

    def measured(point: Row) -> Row:
        tokens = max(1, int(point[0]) // VOCABULARY)
        logits = torch.zeros(tokens, VOCABULARY, device=watch.device)
        labels = torch.randint(VOCABULARY, (tokens,), device=watch.device)
        seconds = watch.seconds(lambda: softmax_loss(logits.fill_(0.1), labels, vocabulary, 1.0))
        seconds -= watch.seconds(lambda: logits.fill_(0.1))
        return [max(seconds, 1e-9), max(seconds, 1e-9)]

    return in_rounds([[size] for size in _sizes(watch)[1:]], measured)


# --- the rest ----------------------------------------------------------------------------------


def copied(watch: Watch) -> Found:
    """Bytes of a tensor: bytes read and written per second by a copy."""
    source = torch.ones(COPIED_BYTES // 4, device=watch.device)
    target = torch.zeros_like(source)

    def measured(point: Row) -> Row:
        return [2.0 * point[0] / watch.seconds(lambda: target.copy_(source))]

    return in_rounds([[float(COPIED_BYTES)]], measured)


def read(watch: Watch) -> Found:
    """Bytes of a tensor: bytes read per second by a sum."""
    source = torch.ones(COPIED_BYTES // 4, device=watch.device)

    def measured(point: Row) -> Row:
        return [point[0] / watch.seconds(source.sum)]

    return in_rounds([[float(COPIED_BYTES)]], measured)


def optimizer(watch: Watch) -> Found:
    """Elements: seconds of the gradients' norm and of the fused update in fp32."""
    sizes = CUDA_UPDATED if watch.device.type == "cuda" else UPDATED

    def measured(point: Row) -> Row:
        count = int(point[0]) // UPDATED_TENSORS
        states = [
            [torch.ones(count, device=watch.device) for _ in range(UPDATED_TENSORS)]
            for _ in range(4)
        ]
        steps = [torch.zeros((), device=watch.device) for _ in range(UPDATED_TENSORS)]
        return [watch.seconds(lambda: _update(states, steps))]

    return in_rounds([[size] for size in sizes], measured)


def _update(states: list[list[torch.Tensor]], steps: list[torch.Tensor]) -> None:
    gradients, settings = states[1], OptimizerSettings()
    norms = torch._foreach_norm(gradients, 2.0, torch.float64)
    norm = torch.stack(norms).square().sum().sqrt()
    rows = list(zip(*states, steps, strict=True))
    is_bad = (~torch.isfinite(norm)).float()
    divisor = norm.clamp_min(settings.clip_norm).float()
    update_rows(rows, settings, 1e-5, settings.weight_decay, divisor, is_bad)
