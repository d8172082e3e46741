"""Compiled kernels: what torch computes, and the same bits whatever else a call has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triptych.runtime.context.block import Scores
from triptych.serve.core.limits import Limits
from triptych.serve.core.tables import Rows, Tables
from triptych.serve.engine.cache import Heads, Pool
from triptych.serve.engine.native import bind

pytestmark = pytest.mark.skipif(not bind.available(), reason="no C++ compiler")

CPU, BLOCK = torch.device("cpu"), 16


@pytest.mark.parametrize("n", [16, 40, 7])
@pytest.mark.parametrize("m", [1, 5, 13, 100])
def test_products_are_those_of_torch(m: int, n: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(m, 37), torch.randn(n, 37), torch.randn(n)
    found = bind.multiply(x, bind.pack(weight, bias))
    torch.testing.assert_close(found, x @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(250, 96), bind.pack(torch.randn(48, 96))
    whole = bind.multiply(x, packed)
    for start, stop in ((0, 1), (3, 9), (5, 21), (95, 98), (100, 250)):
        assert (bind.multiply(x[start:stop], packed) == whole[start:stop]).all()


def rows_of(lengths: list[int], news: list[int]) -> tuple[Rows, Tables]:
    """Sequences of some lengths whose last rows are new, in blocks in random order."""
    limits = Limits(num_blocks=300, model_context=700, max_running=8, token_budget=2048)
    tables, free = Tables(limits), np.random.default_rng(0).permutation(300).tolist()
    places, positions = [], []
    for slot, (length, new) in enumerate(zip(lengths, news, strict=True)):
        for index in range(-(-length // BLOCK)):
            tables.blocks[slot, index] = free.pop()
        at = np.arange(length - new, length, dtype=np.int32)
        positions.append(at)
        places.append(tables.blocks[slot, at // BLOCK] * BLOCK + at % BLOCK)
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    slots = np.arange(len(lengths), dtype=np.int32)
    last = (starts[1:] - 1).astype(np.int32)
    flat = np.concatenate(positions).astype(np.int32)
    cache = np.concatenate(places).astype(np.int32)
    sizes = np.array(lengths, np.int32)
    return Rows(np.zeros_like(flat), flat, cache, starts, slots, sizes, slots, last), tables


@pytest.mark.parametrize("heads", [Heads(3, 8, 8), Heads(3, 64, 64), Heads(2, 24, 10)])
def test_a_row_of_attention_does_not_depend_on_how_its_prompt_is_cut(heads: Heads) -> None:
    """Pieces of 1 to 19 rows: the same bits as all rows at once."""
    torch.manual_seed(0)
    length, scores = 90, Scores(heads.key_dim**-0.5)
    pool = Pool({0: heads}, 300, BLOCK, torch.float32, CPU, True)
    rows, tables = rows_of([length], [length])
    q = torch.randn(length, 6, heads.key_dim)
    k = torch.randn(length, heads.kv_heads, heads.key_dim)
    v = torch.randn(length, heads.kv_heads, heads.value_dim)
    whole = pool.attend(0, q, k, v, scores, rows, tables)
    for size in range(1, 20):
        for start in range(0, length, size):
            cut = slice(start, min(length, start + size))
            piece = piece_of(rows, cut)
            found = pool.attend(0, q[cut], k[cut], v[cut], scores, piece, tables)
            assert (found == whole[cut]).all(), (size, start)


def piece_of(rows: Rows, cut: slice) -> Rows:
    """Some rows of one sequence, those before them being in the cache."""
    positions, count = rows.positions[cut], cut.stop - cut.start
    slot, ends = np.zeros(1, np.int32), np.array([0, count], np.int32)
    length, last = np.array([cut.stop], np.int32), np.array([count - 1], np.int32)
    ids = np.zeros_like(positions)
    return Rows(ids, positions, rows.cache[cut], ends, slot, length, slot, last)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, 6)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [Heads(2, 24, 10), Heads(1, 64, 64), Heads(6, 16, 16)])
def test_attention_over_blocks_is_that_of_torch(kind: str, heads: Heads) -> None:
    """Decodes and chunks of several sequences, longer than a segment of keys."""
    torch.manual_seed(0)
    lengths = [300, 1, 40, 520]
    pools = [Pool({0: heads}, 300, BLOCK, torch.float32, CPU, kernels) for kernels in (True, False)]
    scores = Scores(heads.key_dim**-0.5, **KINDS[kind])
    for news in (lengths, [1, 1, 40, 7]):
        rows, tables = rows_of(lengths, news)
        shape = (int(rows.starts[-1]), 6, heads.key_dim)
        q = torch.randn(shape)
        k = torch.randn(shape[0], heads.kv_heads, heads.key_dim)
        v = torch.randn(shape[0], heads.kv_heads, heads.value_dim)
        ours, theirs = (pool.attend(0, q, k, v, scores, rows, tables) for pool in pools)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
