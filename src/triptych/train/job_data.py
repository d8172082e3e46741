"""The section of a job file that says what is trained on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from triptych.errors import Problem
from triptych.train.section import Contradiction, Count, Positive, Section, Texts


class DataFormat(Section):
    """How the rows of a data set are read."""

    format: Literal["text", "chat"] = Field(
        default="text",
        description="`text`: documents, every token of which is trained. `chat`: dialogues, which "
        "become text by the tokenizer's own template and of which the answers are trained, each "
        "with the token that ends it.",
    )
    text_key: str = Field(
        default="text", description="The key of a document in a row of JSON lines or Parquet."
    )
    messages_key: str = Field(
        default="messages",
        description="The key of a dialogue in a row: a list of messages with `role` and `content`.",
    )
    pack: Literal["stream", "documents", "whole", "single"] | None = Field(
        default=None,
        description="`stream`: sequences are cut from one stream of text, documents see those "
        "before them in the sequence. `documents`: cut from one stream and kept apart: attention "
        "and positions start anew in each, and none predicts the first token of the next. `whole`: "
        "a sequence holds whole documents, kept apart; one longer than a sequence is truncated. "
        "`single`: as `whole`, with one document in a sequence. Default: `stream` for text, "
        "`whole` for chat.",
    )

    streaming: bool = Field(
        default=False,
        description="Files become tokens one by one, as training comes to them: it starts once the "
        "first one is there. Order: the files by the seed, then the samples of each. Files must "
        "not change. Default: all files become tokens before the first step.",
    )

    @property
    def packing(self) -> str:
        """How documents share sequences."""
        return self.pack or ("whole" if self.format == "chat" else "stream")

    @model_validator(mode="after")
    def _whole_dialogues(self) -> DataFormat:
        if self.format == "chat" and self.pack in ("stream", "documents"):
            what = f'[data] pack = "{self.pack}" with format = "chat"'
            raise Contradiction(Problem(what, "dialogues are not cut", 'pack = "whole"'))
        return self


class Source(DataFormat):
    """One data set of a mixture: an entry of `[[data.mixture]]`."""

    train: Texts = Field(
        min_length=1,
        description="Its files, as in `[data] train`.",
        examples=['["text/**/*.txt"]'],
    )
    weight: Positive = Field(
        default=1.0,
        description="Its share of the sequences is its weight over the sum of all weights, exactly "
        "so in every 1000 sequences; a data set that is used up starts again.",
    )


class Data(DataFormat):
    """The text."""

    train: Texts = Field(
        default=(),
        description="Files, directories or globs (`**` included): text, one document a file; "
        "`.jsonl` and `.parquet`, one document or dialogue a row; folders that "
        "`datasets.Dataset.save_to_disk` wrote. Required, unless there is a mixture.",
        examples=['["text/**/*.txt"]'],
    )
    mixture: tuple[Source, ...] = Field(
        default=(),
        strict=False,
        description="Several data sets with weights, instead of `train`: `[[data.mixture]]` with "
        "`train` and `weight`, and of this section `format`, `text_key`, `messages_key` and "
        "`pack`.",
        examples=['[{train = "books", weight = 3}, {train = "web", weight = 1}]'],
    )
    eval: Texts = Field(
        default=(),
        description="The same as `train`, for evaluation, by the `format`, keys and `pack` of this "
        "section; files named here are kept out of training.",
    )
    exclude: Texts = Field(default=(), description="Globs of files to leave out of all.")
    sequence_length: Count = Field(description="Tokens in one training sequence.", examples=["512"])
    cache: str | None = Field(
        default=None, description="Folder of the token cache. Default: `tokens` in the run folder."
    )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The data sets of the mixture; that of `train` alone without one."""
        if self.mixture:
            return self.mixture
        names = ("format", "text_key", "messages_key", "pack", "streaming", "train")
        return (Source(**{name: getattr(self, name) for name in names}),)

    @model_validator(mode="after")
    def _one_or_a_mixture(self) -> Data:
        rule = "training data is either `train` or a mixture"
        works = 'train = ["text/**/*.txt"]'
        if not self.train and not self.mixture:
            raise Contradiction(Problem("[data] train is missing", rule, works))
        if self.train and self.mixture:
            raise Contradiction(Problem("[data] has both train and mixture", rule, works))
        total = sum(source.weight for source in self.mixture)
        small = [s.weight for s in self.mixture if s.weight < total / 1000]
        if small:
            what = f"[[data.mixture]] weight = {small[0]} of {total} in all"
            least = f"weight = {total / 1000:g} or more"
            raise Contradiction(Problem(what, "a weight is a thousandth of their sum", least))
        return self
