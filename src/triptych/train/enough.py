"""Is there enough to train on? Counts, and what would be enough."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from triptych.errors import DataError, Problem
from triptych.train.samples import Counts, Samples, StreamSamples
from triptych.train.tokens import Tokens


def least_tokens(sequence_length: int, global_batch: int) -> int:
    """The fewest tokens that hold one global batch of samples cut from a stream."""
    return sequence_length * global_batch + 1


def require_enough(
    tokens: Tokens, samples: Samples, sequence_length: int, global_batch: int, batch_unit: int = 1
) -> None:
    """Returns if there is a global batch of whole samples. Raises DataError with the counts.

    A batch that works is a multiple of `batch_unit`: what plan and job fix of it.
    """
    require_targets(tokens, samples.counts, sequence_length)
    if samples.num_whole >= global_batch:
        return
    what = (
        f"the training data has {tokens.num_documents} documents with {tokens.num_tokens} tokens: "
        f"{samples.num_whole} samples of {sequence_length} tokens, "
        f"but the global batch is {global_batch}"
    )
    rule = "one global batch is at most the whole data set"
    shorter = _shorter(tokens, global_batch) if isinstance(samples, StreamSamples) else ()
    remedies = [*_smaller_batch(samples.num_whole, batch_unit), *shorter]
    raise DataError(Problem(what, rule, " | ".join([*remedies, "more text"])))


def require_targets(tokens: Tokens, counts: Counts, sequence_length: int) -> None:
    """Returns unless dialogues leave nothing to train. Raises DataError with what would."""
    if not tokens.has_mask or counts.samples:
        return
    what = (
        f"{counts.documents} dialogues have no answer within {sequence_length} tokens: "
        f"nothing of their {counts.tokens} tokens would be trained"
    )
    longest = _first_answer(tokens)
    works = f"[data] sequence_length = {longest} or more" if longest else "dialogues with answers"
    raise DataError(Problem(what, "answers are what is trained", works))


def require_labels(tokens: Tokens, samples: Samples, sequence_length: int) -> None:
    """Returns if evaluation text has a token to predict. Raises DataError otherwise."""
    require_targets(tokens, samples.counts, sequence_length)
    if samples.num_samples == 0:
        what = f"the evaluation data has {tokens.num_tokens} tokens"
        raise DataError(Problem(what, "evaluation needs a token to predict: 2 tokens", "more text"))


def _first_answer(tokens: Tokens) -> int:
    """The sequence length at which the first dialogue has a target; 0 if none ever has."""
    mask = tokens.open_mask()
    ends = tokens.open_ends()
    assert mask is not None
    starts = [0, *ends[:-1].tolist()]
    places = np.flatnonzero(mask)
    owners = np.searchsorted(ends, places, side="right")
    return min((int(p) - starts[o] for p, o in zip(places, owners, strict=True)), default=0)


def _smaller_batch(num_samples: int, unit: int) -> Iterator[str]:
    """The largest batch for these samples; what stands in its way if there is none."""
    largest = num_samples // unit * unit
    if largest:
        yield f"[train] global_batch = {largest}" + (" or less" if unit == 1 else "")
    elif num_samples:
        yield (
            f"[train] global_batch = {num_samples} under a plan and a job that divide it: "
            f"now it is a multiple of {unit}"
        )


def _shorter(tokens: Tokens, global_batch: int) -> Iterator[str]:
    """The longest samples for this batch."""
    longest = (tokens.num_tokens - 1) // global_batch
    if longest > 0:
        yield f"[data] sequence_length = {longest} or less"
