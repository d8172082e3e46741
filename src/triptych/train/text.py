"""From the data that a job names to the tokens that its ranks read."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from triptych.errors import DataError, InputError, Problem
from triptych.tokenizer.load import TextTokenizer
from triptych.train.corpus import Corpus, read_corpus
from triptych.train.encode import ChatEncoder, Encoder, TextEncoder
from triptych.train.enough import least_tokens, require_enough, require_labels
from triptych.train.files import DataFile, find_files
from triptych.train.folder import RunFolder, write_json
from triptych.train.job import Job
from triptych.train.job_data import DataFormat
from triptych.train.order import block_counts, mix
from triptych.train.samples import Counts, Samples, make_samples
from triptych.train.shards import (
    ShardedSamples,
    digest_of,
    first_shard,
    shard_of,
    shard_tokens,
)
from triptych.train.tokens import (
    Tokens,
    build_tokens,
    cached_tokens,
    from_json,
    remove_tokens,
    to_json,
)
from triptych.units import format_bytes, format_count, format_seconds

SCHEMA_VERSION = 2
_CHAT = "triptych.tokenizer.chat"  # imports transformers and jinja2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The corpora of a job. A file that is named for both is for evaluation only."""

    train: tuple[Corpus, ...]
    eval: Corpus | None

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """All of them."""
        return (*self.train, *([self.eval] if self.eval else []))

    def is_surely_enough(self, job: Job) -> bool:
        """True if the training text cannot be too little: no token has as many as 64 bytes on
        average.
        """
        needed = least_tokens(job.data.sequence_length, job.train.global_batch)
        sources = zip(self.train, job.data.sources, strict=True)
        return all(
            (source.streaming or source.packing in ("stream", "documents"))
            and corpus.size_bytes > 64 * needed
            for corpus, source in sources
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One data set of a run: its tokens on disk, how they make rows, and its weight."""

    tokens: Tokens  # of the first file, if files become tokens one by one
    rows: DataFormat
    weight: float = 1.0
    counts: Counts = field(compare=False)
    shards: tuple[Path, ...] = ()  # files that become tokens one by one

    @property
    def pack(self) -> str:
        """How documents share rows."""
        return self.rows.packing

    def samples(self, sequence_length: int) -> Samples:
        """Its rows; those of the first file if files become tokens one by one."""
        return make_samples(self.tokens, sequence_length, self.pack)

    def stream(
        self, tokenizer: TextTokenizer, sequence_length: int, seed: int, *, ahead: bool
    ) -> ShardedSamples:
        """Its rows in the order of training, file by file."""
        encoder, folder = _encoder(self.rows, tokenizer), self.tokens.path.parent

        def make(shard: int) -> Samples:
            corpus = _corpus_of([shard_of(self.shards[shard])], self.rows)
            tokens = shard_tokens(folder, corpus, encoder)
            return make_samples(tokens, sequence_length, self.pack)

        return ShardedSamples(make, len(self.shards), seed, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The tokens of a run on disk."""

    train: tuple[Part, ...]
    eval: Part | None

    @property
    def weights(self) -> list[float]:
        """Of the training data sets."""
        return [part.weight for part in self.train]

    @property
    def digest(self) -> str:
        """Of what decides which sample stands where, but for sequence length and seed."""
        (first, *more) = self.train
        if not more and not first.shards and first.pack in ("stream", "documents"):
            return first.tokens.digest
        counts = block_counts(self.weights)
        words = [
            (digest_of(p.shards) if p.shards else p.tokens.digest, p.pack, n)
            for p, n in zip(self.train, counts, strict=True)
        ]
        return hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()


def read_text(job: Job) -> Text:
    """Finds and checks the files of a job. Raises DataError with what is missing or not data."""
    data = job.data
    held_out = find_files(data.eval, data.exclude) if data.eval else []
    evaluation = _corpus(data.eval, _at_once(data), data.exclude) if data.eval else None
    excluded = [*data.exclude, *map(str, held_out)]
    training = tuple(_corpus(source.train, source, excluded) for source in data.sources)
    if held_out and not all(corpus.files for corpus in training):
        rule = "a file named for training and for evaluation is for evaluation only"
        raise DataError(Problem("no file is left for training", rule, "other files in [data] eval"))
    return Text(train=training, eval=evaluation)


def _corpus(patterns: Sequence[str], rows: DataFormat, exclude: Sequence[str]) -> Corpus:
    if rows.streaming:
        return _corpus_of([shard_of(path) for path in find_files(patterns, exclude)], rows)
    key = rows.messages_key if rows.format == "chat" else None
    return read_corpus(patterns, exclude=exclude, text_key=rows.text_key, messages_key=key)


def _corpus_of(files: Sequence[DataFile], rows: DataFormat) -> Corpus:
    key = rows.messages_key if rows.format == "chat" else None
    return Corpus(files=tuple(files), text_key=rows.text_key, messages_key=key)


def build_data(
    text: Text, job: Job, tokenizer: TextTokenizer, say: Say, batch_unit: int = 1
) -> DataSet:
    """The tokens of a job, from the cache or newly made.

    Raises DataError, with nothing left written, if there are too few for one global batch; the
    batch that it offers instead is a multiple of `batch_unit`.
    """
    folder, length = Path(job.data.cache or ""), job.data.sequence_length
    batch = job.train.global_batch if len(text.train) == 1 else 1
    with _nothing_left_if_refused(folder) as made:

        def part(corpus: Corpus, rows: DataFormat, **more: Any) -> tuple[Part, Samples]:
            tokens = _built(folder, corpus, _encoder(rows, tokenizer), say, made)
            samples = make_samples(tokens, length, rows.packing)
            return Part(tokens=tokens, rows=_at_once(rows), counts=samples.counts, **more), samples

        parts = []
        for index, (corpus, source) in enumerate(zip(text.train, job.data.sources, strict=True)):
            if source.streaming:
                shards = tuple(file.path for file in corpus.files)
                begin = first_shard(len(shards), source_seed(job.train.seed, index))
                first = _corpus_of(corpus.files[begin : begin + 1], source)
                parts.append(part(first, source, weight=source.weight, shards=shards)[0])
                continue
            own, samples = part(corpus, source, weight=source.weight)
            require_enough(own.tokens, samples, length, batch, batch_unit)
            parts.append(own)
        evaluation = None
        if text.eval is not None:
            evaluation, samples = part(text.eval, _at_once(job.data))
            require_labels(evaluation.tokens, samples, length)
    return DataSet(train=tuple(parts), eval=evaluation)


def _at_once(rows: DataFormat) -> DataFormat:
    """Evaluation data become tokens as a whole."""
    names = ("format", "text_key", "messages_key", "pack")
    return DataFormat(**{name: getattr(rows, name) for name in names})


def source_seed(seed: int, index: int) -> int:
    """The seed of a data set whose files become tokens one by one."""
    return mix(seed ^ mix(index + 1))


def _encoder(rows: DataFormat, tokenizer: TextTokenizer) -> Encoder:
    if rows.format == "text":
        return TextEncoder(tokenizer)
    return ChatEncoder(import_module(_CHAT).load_chat_template(tokenizer))


def _built(folder: Path, corpus: Corpus, encoder: Encoder, say: Say, made: list[Tokens]) -> Tokens:
    """The tokens of a corpus; those that were not in the cache are added to `made`."""
    cached = cached_tokens(folder, corpus, encoder)
    if cached is not None:
        return cached
    tokens = build_tokens(folder, corpus, encoder, _progress(say))
    made.append(tokens)
    return tokens


@contextmanager
def _nothing_left_if_refused(folder: Path) -> Iterator[list[Tokens]]:
    """If what happens inside ends as bad input, the cache is as before but for older entries."""
    parents = [p for p in (folder, *folder.parents) if not p.exists()]
    made: list[Tokens] = []
    try:
        yield made
    except InputError:
        for tokens in made:
            remove_tokens(tokens)
        for parent in parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def data_lines(text: Text, data: DataSet, job: Job) -> list[str]:
    """What the run trains and evaluates on, in words."""
    length = job.data.sequence_length
    lines = []
    for corpus, part, share in zip(text.train, data.train, _shares(data), strict=True):
        if part.shards:
            lines.append(_stream_line(part, share))
            continue
        epochs = job.train.steps * job.train.global_batch * share / part.counts.samples
        weight = f", {share:.1%} of all sequences" if len(data.train) > 1 else ""
        lines.append(
            f"training data: {len(corpus.files)} files, {format_count(part.counts.tokens)} tokens, "
            f"{part.counts.samples} samples of {length}{weight}; read {epochs:.2f} times"
        )
        lines += count_lines(part.counts)
    if text.eval is not None and data.eval is not None:
        lines.append(
            f"evaluation data: {len(text.eval.files)} files, "
            f"{format_count(data.eval.counts.tokens)} tokens"
        )
        lines += count_lines(data.eval.counts) if data.eval.tokens.has_mask else []
    skipped = sum(corpus.num_skipped for corpus in text.corpora)
    if skipped:
        lines.append(f"left out: {skipped} files that are not data")
    return lines


def _stream_line(part: Part, share: float) -> str:
    first = f"the first has {format_count(part.counts.tokens)} tokens"
    return (
        f"training data: {len(part.shards)} files, {share:.1%} of all sequences, that become "
        f"tokens as training comes to them; {first}, {part.counts.samples} samples"
    )


def _shares(data: DataSet) -> list[float]:
    return [weight / sum(data.weights) for weight in data.weights]


def count_lines(counts: Counts) -> list[str]:
    """What becomes of the tokens, in words; a warning if documents lose some."""
    words = f"  tokens: {counts.trained} trained, {counts.masked} masked"
    lines = [f"{words}, {counts.truncated_tokens} truncated, {counts.dropped_tokens} dropped"]
    if counts.padding:
        full = 1 - counts.padding / (counts.trained + counts.masked + counts.padding)
        lines.append(f"  rows: {full:.1%} full, {counts.padding} positions of padding")
    lost = [
        f"{counts.truncated_documents} lose their end" if counts.truncated_documents else "",
        f"{counts.dropped_documents} have nothing to train and are left out"
        if counts.dropped_documents
        else "",
    ]
    if any(lost):
        lines.append(f"warning: of {counts.documents} documents {', '.join(filter(None, lost))}")
    return lines


def write_data(run: RunFolder, data: DataSet, tokenizer_folder: Path) -> None:
    """`data.json` says where the tokens and the tokenizer are, and what became of the tokens."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "tokenizer": str(tokenizer_folder),
        "train": [_part_json(part) for part in data.train],
        "eval": _part_json(data.eval) if data.eval else None,
    }
    write_json(run.data, document)


def read_data(run: RunFolder) -> tuple[DataSet, Path]:
    """What `write_data` wrote: the tokens, and the folder of the tokenizer."""
    values = json.loads(run.data.read_text("utf-8"))
    evaluation = _part_of(values["eval"]) if values["eval"] else None
    training = tuple(_part_of(part) for part in values["train"])
    return DataSet(train=training, eval=evaluation), Path(values["tokenizer"])


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "tokens": to_json(part.tokens),
        "rows": part.rows.model_dump(exclude_none=True),
        "weight": part.weight,
        "counts": part.counts.to_json(),
        "shards": [str(path) for path in part.shards],
    }


def _part_of(values: dict[str, Any]) -> Part:
    return Part(
        tokens=from_json(values["tokens"]),
        rows=DataFormat(**values["rows"]),
        weight=float(values["weight"]),
        counts=Counts(**values["counts"]),
        shards=tuple(Path(path) for path in values["shards"]),
    )


def _progress(say: Say) -> Callable[[int, int], None]:
    """Says every tenth or so of a long text that it is being read, and how long it takes."""
    said, begun_s = 0, time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if done - said < max(total // 10, 1 << 24):
            return
        said = done
        left_s = (time.monotonic() - begun_s) * max(0, total - done) / done
        left = f", {format_seconds(left_s)} left" if left_s else ""
        say(f"tokens: {format_bytes(done)} of {format_bytes(total)} of text{left}")

    return tell
