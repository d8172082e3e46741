"""Samples and micro-batches: every token is trained once, in the same portions in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from token_samples import Made, dialogues, stream

from triptych.errors import DataError
from triptych.plan.share import Share
from triptych.train.data import EvaluationData, TrainingData
from triptych.train.enough import least_tokens, require_enough
from triptych.train.samples import IGNORED, PackedSamples, Samples, StreamSamples

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1)]  # (microbatch, dp)
BATCH = 8


def samples(num_tokens: int, length: int = 4) -> StreamSamples:
    return StreamSamples(stream(list(range(num_tokens))), length)


def chunks(microbatch: int, dp: int, position: int, data: StreamSamples) -> list[list[list[int]]]:
    """The micro-batches of a global batch in the order of chunks, first tokens of their samples."""
    ranks = [
        TrainingData(
            [data],
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
    rows = [data.row(index) for index in range(3)]
    assert [row.input_ids.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [row.labels.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert data.num_whole == 3 and data.counts.trained == 12


def test_documents_that_are_kept_apart_predict_nothing_of_each_other() -> None:
    """What is left empty is one more; an end token inside a document (0) is a label of it."""
    data = StreamSamples(stream([5, 6, 0], [7, 8, 0, 9, 1, 2, 0], [0], [3]), 4, apart=True)
    rows = [data.row(index) for index in range(3)]
    none = IGNORED
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 0, 7], [8, 0, 9, 1], [2, 0, 0, 0]]
    assert [row.labels.tolist() for row in rows] == [
        [6, 0, none, 8],
        [0, 9, 1, 2],
        [0, none, none, none],
    ]
    assert [row.documents for row in rows] == [(3, 1), (4,), (2, 1, 1)]
    assert (data.counts.trained, data.counts.masked, data.counts.dropped_tokens) == (7, 1, 3)


def test_documents_see_each_other_unless_they_are_kept_apart() -> None:
    row = StreamSamples(stream([0, 1], [2, 3, 4]), 4).row(0)
    assert row.documents is None and row.labels.tolist() == [1, 2, 3, 4]


def test_a_packed_row_holds_whole_documents_and_ends_with_padding() -> None:
    """Longer documents are truncated; those of one token have nothing to predict."""
    data = PackedSamples(stream([1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14]), 6)
    rows = [data.row(index) for index in range(data.num_samples)]
    none = IGNORED
    assert [row.input_ids.tolist() for row in rows] == [[1, 2, 13, 0, 0, 0], [4, 5, 6, 7, 8, 9]]
    assert [row.labels.tolist() for row in rows] == [
        [2, 3, 14, none, none, none],
        [5, 6, 7, 8, 9, 10],
    ]
    assert [row.documents for row in rows] == [(2, 1, 3), (6,)]
    counts = data.counts
    assert (counts.trained, counts.masked, counts.padding) == (9, 0, 3)
    assert (counts.truncated_documents, counts.truncated_tokens) == (1, 1)
    assert (counts.dropped_documents, counts.dropped_tokens) == (1, 1)


@pytest.mark.parametrize("last", [True, False])
def test_only_targets_are_labels_and_a_document_that_loses_all_is_dropped(last: bool) -> None:
    """User case pub_067: one loses its answer, token 6, at length 4."""
    kept, lost = ([1, 2, 3], [0, 0, 1]), ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])
    data = PackedSamples(dialogues(*([kept, lost] if last else [lost, kept])), 4)
    assert data.num_samples == 1
    assert data.row(0).labels.tolist() == [IGNORED, 3, IGNORED, IGNORED]
    counts = data.counts
    assert (counts.trained, counts.masked, counts.padding) == (1, 1, 2)
    assert (counts.dropped_documents, counts.dropped_tokens) == (1, 6)


def test_single_documents_have_rows_of_their_own() -> None:
    data = PackedSamples(stream([1, 2], [3], [4, 5]), 4, shared=False)
    assert [data.row(i).input_ids.tolist() for i in range(2)] == [[1, 0, 0, 0], [4, 0, 0, 0]]
    assert data.num_samples == 2 and data.counts.padding == 6


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


def few(num_tokens: int) -> Made:
    return stream(*([list(range(num_tokens - 2)), [1], [1]] if num_tokens > 2 else []))


def enough(num_tokens: int, length: int, batch: int) -> None:
    tokens = few(num_tokens)
    require_enough(tokens, StreamSamples(tokens, length), length, batch)


def test_exactly_one_global_batch_is_enough() -> None:
    enough(least_tokens(16, 8), 16, 8)


@pytest.mark.parametrize(("num_tokens", "count"), [(128, 7), (49, 3), (17, 1), (16, 0), (0, 0)])
def test_too_little_data_is_refused_with_counts_and_what_works(num_tokens: int, count: int) -> None:
    """User case pub_063."""
    with pytest.raises(DataError) as caught:
        enough(num_tokens, 16, 8)
    text = str(caught.value)
    assert f"{num_tokens} tokens: {count} samples of 16 tokens" in text
    assert f"{few(num_tokens).num_documents} documents" in text and "global batch is 8" in text
    assert ("global_batch = " in text) is (count > 0)


def test_the_remedies_for_too_little_data_work() -> None:
    """User case pub_063."""
    enough(49, 16, 3)  # "global_batch = 3 or less"
    enough(49, 6, 8)  # "sequence_length = 6 or less"


def test_dialogues_without_any_answer_in_reach_are_refused_with_the_length_that_has_one() -> None:
    """User case pub_067."""
    tokens = dialogues(([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1]), ([1] * 9, [0] * 8 + [1]))
    with pytest.raises(DataError, match=r"2 dialogues .* 15 tokens .*") as caught:
        require_enough(tokens, PackedSamples(tokens, 4), 4, 1)
    assert "sequence_length = 5 or more" in str(caught.value)
    require_enough(tokens, PackedSamples(tokens, 5), 5, 1)


def mixture(dp: int = 1, index: int = 0) -> TrainingData:
    """Of 10 samples with weight 1 and 999 with weight 3."""
    sources: list[Samples] = [samples(4 * 10 + 1), samples(4 * 999 + 1)]
    share = Share(microbatch=2, dp=dp, dp_index=index)
    return TrainingData(sources, weights=[1, 3], global_batch=BATCH, share=share, seed=5)


def test_a_mixture_is_the_same_in_every_layout() -> None:
    whole = mixture().microbatches(48)
    halves = [mixture(2, index).microbatches(48) for index in (0, 1)]
    assert [a.input_ids.tolist() for a in whole] == [
        halves[rank][j].input_ids.tolist() for j in range(2) for rank in range(2)
    ]


def test_a_mixture_takes_by_weight_and_each_data_set_goes_through_all_of_its_samples() -> None:
    taken = [t for position in range(0, 4000, BATCH) for t in mixture().taken(position)]
    for block in range(0, 4000, 1000):
        assert sum(t.source == 0 for t in taken[block : block + 1000]) == 250
    of_small, of_large = ([t.sample for t in taken if t.source == i] for i in (0, 1))
    assert all(sorted(of_small[i : i + 10]) == list(range(10)) for i in range(0, 1000, 10))
    for epoch in range(3):
        assert sorted(of_large[999 * epoch : 999 * (epoch + 1)]) == list(range(999))
    assert np.diff(np.flatnonzero([t.source == 0 for t in taken])).max() < 60, "spread out"
