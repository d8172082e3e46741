"""The order of samples: a permutation an epoch, a function of seed and position alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from triptych.train.order import SampleOrder


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 16, 17, 40, 255, 256, 257, 1000])
def test_every_epoch_has_every_sample_once(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=3)
    for epoch in range(3):
        positions = range(epoch * num_samples, (epoch + 1) * num_samples)
        assert sorted(order.take(positions)) == list(range(num_samples))


def test_epochs_differ_and_seeds_differ() -> None:
    order = SampleOrder(50, seed=0)
    first, second = order.take(range(50)), order.take(range(50, 100))
    assert first != second
    assert first != SampleOrder(50, seed=1).take(range(50))
    assert first != list(range(50))


def test_the_order_is_the_same_in_every_process_and_release() -> None:
    assert SampleOrder(10, seed=0).take(range(20)) == GOLDEN


def test_every_sample_is_first_about_as_often() -> None:
    firsts = Counter(SampleOrder(20, seed).at(0) for seed in range(4000))
    assert set(firsts) == set(range(20))
    assert max(firsts.values()) < 1.5 * 200 and min(firsts.values()) > 0.5 * 200


def test_neighbours_in_the_text_are_not_neighbours_in_the_order() -> None:
    taken = SampleOrder(10_000, seed=5).take(range(10_000))
    close = sum(abs(a - b) <= 10 for a, b in pairwise(taken))
    assert close < 2 * 20  # 20 in 10,000 by chance


def test_a_huge_data_set_needs_no_memory() -> None:
    order = SampleOrder(10**12, seed=1)
    assert all(0 <= order.at(10**14 + i) < 10**12 for i in range(100))


GOLDEN = [9, 5, 0, 8, 3, 1, 2, 6, 4, 7, 9, 5, 3, 2, 1, 0, 4, 7, 8, 6]
