"""Boxes read from safetensors files: those in one piece without a copy between, the others too."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.checkpoint.safe import Entry, Reader, run_of, write_safetensors
from triptych.errors import CheckpointError


def drawn_box(chance: random.Random, shape: tuple[int, ...]) -> tuple[slice, ...]:
    bounds = [sorted(chance.choices(range(size + 1), k=2)) for size in shape]
    return tuple(
        slice(0, size) if chance.random() < 0.4 else slice(start, stop)
        for size, (start, stop) in zip(shape, bounds, strict=True)
    )


def drawn(seed: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    chance = random.Random(seed)
    shape = tuple(chance.choices(range(1, 5), k=chance.randrange(4)))
    return shape, drawn_box(chance, shape)


def test_a_run_is_what_the_indices_of_the_box_say() -> None:
    ones = 0
    for seed in range(2000):
        shape, at = drawn(seed)
        indices = np.arange(np.prod(shape, dtype=int)).reshape(shape)[at].reshape(-1)
        run = run_of(shape, at)
        is_run = not len(indices) or len(indices) == indices[-1] - indices[0] + 1
        if not len(indices):
            assert run is None or run[1] == 0
            continue
        assert (run is not None) == is_run, (shape, at)
        if run is not None:
            assert (indices[0], len(indices)) == run, (shape, at)
            ones += 1
    assert ones > 200


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_box_of_a_file_is_read_as_it_was_written(tmp_path: Path, dtype: str) -> None:
    cases = {f"t{seed}": drawn(seed) for seed in range(150)}
    tensors = {key: torch.randn(shape).to(torch.bfloat16) for key, (shape, _) in cases.items()}
    stored = {key: t.float() if dtype == "fp32" else t for key, t in tensors.items()}
    entries = [Entry(key, tuple(t.shape), dtype, lambda t=t: t) for key, t in stored.items()]
    write_safetensors(tmp_path / "a.safetensors", entries, {})
    with Reader(tmp_path) as reader:
        for key, (_, at) in cases.items():
            for into in (torch.float32, torch.bfloat16):
                wanted = tensors[key][at]
                found = torch.full(wanted.shape, 7.0, dtype=into)
                reader.read_into("a.safetensors", key, at, found)
                assert torch.equal(found, wanted.to(into)), key
                apart = torch.full((*wanted.shape, 2), 7.0, dtype=into)[..., 0]
                reader.read_into("a.safetensors", key, at, apart)
                assert torch.equal(apart, wanted.to(into)), key


def test_a_file_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [Entry("w", (1024,), "fp32", lambda: torch.ones(1024))], {})
    path.write_bytes(path.read_bytes()[:-8])
    with Reader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"a\.safetensors"):
        reader.read_into("a.safetensors", "w", (slice(0, 1024),), torch.empty(1024))
