"""Samples and micro-batches: every token is trained once, in the same portions in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triptych.errors import DataError
from triptych.plan.share import Share
from triptych.train.data import (
    IGNORED,
    EvaluationData,
    Samples,
    TrainingData,
    least_tokens,
    require_enough,
)
from triptych.train.tokens import Tokens

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1)]  # (microbatch, dp)
BATCH = 8


def samples(num_tokens: int, length: int = 4) -> Samples:
    return Samples(np.arange(num_tokens, dtype=np.uint16), length, end_id=0)


def chunks(microbatch: int, dp: int, position: int, data: Samples) -> list[list[list[int]]]:
    """The micro-batches of a global batch in the order of chunks, first tokens of their samples."""
    ranks = [
        TrainingData(
            data,
            global_batch=BATCH,
            share=Share(microbatch=microbatch, dp=dp, dp_index=index),
            seed=1,
        ).microbatches(position)
        for index in range(dp)
    ]
    rounds = len(ranks[0])
    return [ranks[r][j].input_ids.tolist() for j in range(rounds) for r in range(dp)]


def test_labels_are_the_next_tokens_and_every_token_is_a_label_once() -> None:
    data = samples(13)
    batch = data.batch([0, 1, 2])
    assert batch.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert data.num_whole == 3


def test_documents_that_are_kept_apart_predict_nothing_of_each_other() -> None:
    """Each ends with token 0, which belongs to it; what is left empty is one more."""
    tokens = np.array([5, 6, 0, 7, 8, 9, 1, 2, 0, 0, 3], dtype=np.uint16)
    batch = Samples(tokens, 4, end_id=0, keeps_apart=True).batch([0, 1, 2, None])
    assert batch.input_ids.tolist() == [[5, 6, 0, 7], [8, 9, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    none = IGNORED
    assert batch.labels.tolist() == [[6, 0, none, 8], [9, 1, 2, 0], [none] * 4, [none] * 4]
    assert batch.documents == ((3, 1), (4,), (1, 1, 2), (4,))


def test_documents_see_each_other_unless_they_are_kept_apart() -> None:
    batch = samples(13).batch([0])
    assert batch.documents is None and batch.labels[0, 0] == 1


@pytest.mark.parametrize(
    ("num_tokens", "whole", "all_"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (5, 1, 1), (6, 1, 2), (9, 2, 2)],
)
def test_samples_are_counted(num_tokens: int, whole: int, all_: int) -> None:
    data = samples(num_tokens)
    assert (data.num_whole, data.num_samples) == (whole, all_)


@pytest.mark.parametrize(("microbatch", "dp"), LAYOUTS)
def test_the_global_batch_is_the_same_in_every_layout(microbatch: int, dp: int) -> None:
    """User case pub_015."""
    data = samples(200)
    flat = [row for chunk in chunks(microbatch, dp, 24, data) for row in chunk]
    assert flat == [row for chunk in chunks(1, 1, 24, data) for row in chunk]


def test_micro_batches_of_one_size_are_the_same_for_every_dp() -> None:
    data = samples(200)
    assert chunks(2, 1, 8, data) == chunks(2, 2, 8, data) == chunks(2, 4, 8, data)


@pytest.mark.parametrize(("microbatch", "dp"), LAYOUTS)
def test_an_epoch_consumes_every_sample_once_whatever_the_layout(microbatch: int, dp: int) -> None:
    data = samples(4 * 40 + 1)
    taken = [
        row[0]
        for position in range(0, 40, BATCH)
        for chunk in chunks(microbatch, dp, position, data)
        for row in chunk
    ]
    assert sorted(taken) == list(range(0, 160, 4))


def test_a_batch_may_cross_the_end_of_an_epoch() -> None:
    data = samples(4 * 10 + 1)
    first = [row[0] for p in (0, 8, 16, 24, 32) for c in chunks(1, 1, p, data) for row in c]
    assert sorted(first) == sorted(list(range(0, 40, 4)) * 4)


@pytest.mark.parametrize("num_tokens", [6, 30, 86, 200])
@pytest.mark.parametrize(("microbatch", "dp"), LAYOUTS)
def test_evaluation_counts_every_token_once_in_every_layout(
    microbatch: int, dp: int, num_tokens: int
) -> None:
    labels: list[int] = []
    counts = set()
    for index in range(dp):
        data = EvaluationData(
            samples(num_tokens),
            global_batch=BATCH,
            share=Share(microbatch=microbatch, dp=dp, dp_index=index),
        )
        batches = list(data.batches())
        counts.add(tuple(len(batch) for batch in batches))
        for batch in batches:
            for arrays in batch:
                labels += arrays.labels[arrays.labels != IGNORED].tolist()
    assert sorted(labels) == list(range(1, num_tokens))
    assert len(counts) == 1, "all ranks run as many micro-batches"


def test_evaluation_can_be_limited_to_some_batches() -> None:
    data = EvaluationData(
        samples(401), global_batch=BATCH, share=Share(microbatch=2), num_batches=3
    )
    assert data.num_samples == 24
    assert len(list(data.batches())) == 3


def tokens(num_tokens: int, num_documents: int = 3) -> Tokens:
    return Tokens(
        path=Path("none"),
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=num_documents,
        end_id=0,
        digest="",
    )


def test_exactly_one_global_batch_is_enough() -> None:
    require_enough(tokens(least_tokens(16, 8)), 16, 8)


@pytest.mark.parametrize(("num_tokens", "count"), [(128, 7), (49, 3), (17, 1), (16, 0), (0, 0)])
def test_too_little_data_is_refused_with_counts_and_what_works(num_tokens: int, count: int) -> None:
    """User case pub_063."""
    with pytest.raises(DataError) as caught:
        require_enough(tokens(num_tokens), 16, 8)
    text = str(caught.value)
    assert f"{num_tokens} tokens: {count} samples of 16 tokens" in text
    assert "3 documents" in text and "global batch is 8" in text
    assert ("global_batch = " in text) is (count > 0)


def test_the_remedies_for_too_little_data_work() -> None:
    """User case pub_063."""
    require_enough(tokens(49), 16, 3)  # "global_batch = 3 or less"
    require_enough(tokens(49), 6, 8)  # "sequence_length = 6 or less"
