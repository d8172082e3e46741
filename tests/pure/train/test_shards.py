"""A data set that becomes tokens file by file: a fixed order, each file made when it is needed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from job_samples import write_text
from token_samples import stream

from triptych.errors import DataError
from triptych.plan.share import Share
from triptych.tokenizer.load import load_tokenizer
from triptych.train.corpus import Corpus
from triptych.train.data import TrainingData
from triptych.train.encode import TextEncoder
from triptych.train.samples import Samples, StreamSamples
from triptych.train.shards import ShardedSamples, first_shard, shard_of, shard_tokens
from triptych.train.tokenizer_training import train_tokenizer

SIZES = (3, 0, 5, 1, 2)  # whole samples of two tokens


class Files:
    """Counts which files are made, and when."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes, self.made = sizes, list[int]()

    def __call__(self, shard: int) -> Samples:
        self.made.append(shard)
        first = 100 * shard
        return StreamSamples(stream(list(range(first, first + 2 * self.sizes[shard] + 1))), 2)


def taken(rows: ShardedSamples, positions: range) -> list[int]:
    """The first token of each sample."""
    return [int(rows.row(index).input_ids[0]) for index in positions]


def sharded(files: Files, seed: int = 4) -> ShardedSamples:
    return ShardedSamples(files, len(files.sizes), seed, ahead=False)


def test_every_epoch_has_every_sample_once_and_files_one_after_the_other() -> None:
    found = taken(sharded(Files()), range(33))
    everything = sorted(100 * f + 2 * s for f, size in enumerate(SIZES) for s in range(size))
    for epoch in range(3):
        own = found[11 * epoch : 11 * (epoch + 1)]
        assert sorted(own) == everything
        files = [token // 100 for token in own]
        assert len([1 for a, b in pairwise(files) if a != b]) == 3
    assert found[:11] != found[11:22], "each epoch has an order of its own"


def test_a_place_in_the_middle_is_found_without_what_was_before() -> None:
    whole = taken(sharded(Files()), range(40))
    assert taken(sharded(Files()), range(17, 40)) == whole[17:]
    assert taken(sharded(Files(), seed=5), range(40)) != whole


def test_training_begins_with_one_file() -> None:
    files = Files((4, 4, 4, 4))
    taken(sharded(files), range(2))
    assert files.made == [first_shard(4, 4)]


def test_files_without_a_whole_sample_are_refused() -> None:
    with pytest.raises(DataError, match="none of 2 files"):
        sharded(Files((0, 0))).row(0)


def test_it_is_a_source_of_a_mixture_in_every_layout() -> None:
    def tokens(dp: int) -> list[int]:
        found = []
        ranks = [
            TrainingData(
                [sharded(Files()), StreamSamples(stream(list(range(900, 941))), 2)],
                weights=[1, 1],
                global_batch=4,
                share=Share(microbatch=1, dp=dp, dp_index=index),
                seed=1,
            )
            for index in range(dp)
        ]
        for position in range(0, 1000, 4):
            parts = [rank.microbatches(position) for rank in ranks]
            found += [int(p[i].input_ids[0, 0]) for i in range(4 // dp) for p in parts]
        return found

    one = tokens(1)
    assert one == tokens(2) == tokens(4)
    assert Counter(token >= 900 for token in one) == {True: 500, False: 500}


def test_a_file_becomes_tokens_once(tmp_path: Path) -> None:
    paths = write_text(tmp_path / "text")
    encoder = TextEncoder(load_tokenizer(train_tokenizer([*paths], 290, tmp_path / "tokenizer")))

    def made() -> int:
        corpus = Corpus(files=(shard_of(paths[0]),))
        return shard_tokens(tmp_path / "cache", corpus, encoder).path.stat().st_mtime_ns

    first = made()
    assert made() == first
    paths[0].write_text("alpha")
    assert made() != first
    paths[0].write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        made()
