"""From the text that a job names to the tokens that its ranks read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import DataError, Problem
from triptych.train.corpus import Corpus, find_files, read_corpus
from triptych.train.data import least_tokens, require_enough, require_labels
from triptych.train.folder import RunFolder, write_json
from triptych.train.job import Job
from triptych.train.tokenizer import TextTokenizer
from triptych.train.tokens import Tokens, build_tokens, from_json, to_json
from triptych.units import format_bytes, format_count

SCHEMA_VERSION = 1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The corpora of a job. A file that is named for both is for evaluation only."""

    train: Corpus
    eval: Corpus | None

    def is_surely_enough(self, job: Job) -> bool:
        """True if the training text cannot be too little: no token has as many as 64 bytes on
        average.
        """
        needed = least_tokens(job.data.sequence_length, job.train.global_batch)
        return self.train.size_bytes > 64 * needed


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The tokens of a run on disk."""

    train: Tokens
    eval: Tokens | None


def read_text(job: Job) -> Text:
    """Finds and checks the files of a job. Raises DataError with what is missing or not text."""
    options: dict[str, Any] = {"exclude": job.data.exclude, "text_key": job.data.text_key}
    if not job.data.eval:
        return Text(train=read_corpus(job.data.train, **options), eval=None)
    held_out = find_files(job.data.eval, job.data.exclude)
    evaluation = read_corpus(job.data.eval, **options)
    options["exclude"] = [*job.data.exclude, *map(str, held_out)]
    training = read_corpus(job.data.train, **options)
    if not training.files:
        rule = "a file named for training and for evaluation is for evaluation only"
        raise DataError(Problem("no file is left for training", rule, "other files in [data] eval"))
    return Text(train=training, eval=evaluation)


def build_data(
    text: Text, job: Job, tokenizer: TextTokenizer, say: Say, batch_unit: int = 1
) -> DataSet:
    """The tokens of a job, from the cache or newly made.

    Raises DataError, with nothing written, if there are too few for one global batch; the batch
    that it offers instead is a multiple of `batch_unit`.
    """
    folder = Path(job.data.cache or "")
    length, batch = job.data.sequence_length, job.train.global_batch
    train = build_tokens(
        folder,
        text.train,
        tokenizer,
        least_tokens=least_tokens(length, batch),
        progress=_progress(say),
    )
    require_enough(train, length, batch, batch_unit)
    evaluation = None
    if text.eval is not None:
        evaluation = build_tokens(folder, text.eval, tokenizer, least_tokens=2)
        require_labels(evaluation)
    return DataSet(train=train, eval=evaluation)


def data_lines(text: Text, data: DataSet, job: Job) -> list[str]:
    """What the run trains and evaluates on, in words."""
    samples = (data.train.num_tokens - 1) // job.data.sequence_length
    epochs = job.train.steps * job.train.global_batch / samples
    lines = [
        f"training text: {len(text.train.files)} files, {format_count(data.train.num_tokens)} "
        f"tokens, {samples} samples of {job.data.sequence_length}; the run reads it "
        f"{epochs:.2f} times"
    ]
    if text.eval is not None and data.eval is not None:
        lines.append(
            f"evaluation text: {len(text.eval.files)} files, "
            f"{format_count(data.eval.num_tokens)} tokens"
        )
    skipped = text.train.num_skipped + (text.eval.num_skipped if text.eval else 0)
    if skipped:
        lines.append(f"left out: {skipped} files that are not UTF-8 text")
    return lines


def write_data(run: RunFolder, data: DataSet, tokenizer_folder: Path) -> None:
    """`data.json` says where the tokens and the tokenizer are."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "tokenizer": str(tokenizer_folder),
        "train": to_json(data.train),
        "eval": to_json(data.eval) if data.eval else None,
    }
    write_json(run.data, document)


def read_data(run: RunFolder) -> tuple[DataSet, Path]:
    """What `write_data` wrote: the tokens, and the folder of the tokenizer."""
    values = json.loads(run.data.read_text("utf-8"))
    evaluation = from_json(values["eval"]) if values["eval"] else None
    return DataSet(train=from_json(values["train"]), eval=evaluation), Path(values["tokenizer"])


def _progress(say: Say) -> Callable[[int, int], None]:
    """Says every tenth or so of a long text that it is being read."""
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        if done - said >= max(total // 10, 1 << 24):
            said = done
            say(f"tokens: {format_bytes(done)} of {format_bytes(total)} of text")

    return tell
