"""From documents and dialogues to token ids, whole batches at a time on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from triptych.errors import DataError
from triptych.tokenizer.load import TextTokenizer
from triptych.train.corpus import Corpus, Message, dialogues, documents

_BATCH_CHARACTERS = 1 << 21

T = TypeVar("T")


class Encoded(NamedTuple):
    """Some tokens of a document; `trained` says which of them are targets, None that all are."""

    ids: Sequence[int]
    trained: Sequence[bool] | None
    ends_document: bool
    size: int  # characters of text


class Encoder(Protocol):
    """Turns a corpus into tokens."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Whose ids they are."""

    @property
    def digest(self) -> str:
        """Of what decides the ids."""

    @property
    def masks(self) -> bool:
        """True if some tokens are not targets."""

    def encoded(self, corpus: Corpus) -> Iterator[Encoded]:
        """The tokens of a corpus in order."""


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Documents as they are, each ended with the end-of-document token."""

    tokenizer: TextTokenizer
    masks: bool = False

    @property
    def digest(self) -> str:
        """Of the tokenizer."""
        return self.tokenizer.digest

    def encoded(self, corpus: Corpus) -> Iterator[Encoded]:
        """The tokens of each piece of a document."""
        begins = True
        for batch in _batches(documents(corpus), lambda piece: len(piece.text)):
            ids = self.tokenizer.encode([piece.text for piece in batch])
            for piece, own in zip(batch, ids, strict=True):
                before = self.tokenizer.start_ids if begins else ()
                begins = piece.ends_document
                after = [self.tokenizer.end_id] if begins else []
                yield Encoded([*before, *own, *after], None, begins, len(piece.text))


class Template(Protocol):
    """What is needed of a chat template."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Whose template it is."""

    @property
    def digest(self) -> str:
        """Of what decides the ids."""

    def encode(
        self, dialogues: Sequence[Sequence[Message]]
    ) -> Sequence[tuple[list[int], list[bool]]]:
        """The ids of dialogues, and which are answers."""


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Dialogues by a chat template; only answers are targets."""

    template: Template
    masks: bool = True

    @property
    def tokenizer(self) -> TextTokenizer:
        """That of the template."""
        return self.template.tokenizer

    @property
    def digest(self) -> str:
        """Of the tokenizer and the template."""
        return self.template.digest

    def encoded(self, corpus: Corpus) -> Iterator[Encoded]:
        """The tokens of each dialogue. Raises DataError with where a bad one stands."""
        for batch in _batches(dialogues(corpus), lambda one: _characters(one[1])):
            encoded = self._encode(batch)
            for (_, messages), (ids, trained) in zip(batch, encoded, strict=True):
                yield Encoded(ids, trained, True, _characters(messages))

    def _encode(
        self, batch: Sequence[tuple[str, list[Message]]]
    ) -> Sequence[tuple[list[int], list[bool]]]:
        try:
            return self.template.encode([messages for _, messages in batch])
        except DataError:
            for where, messages in batch:  # one by one, to say which
                try:
                    self.template.encode([messages])
                except DataError as error:
                    raise DataError(f"{where}: {str(error).removeprefix('- ')}") from None
            raise


def _characters(messages: Iterable[Message]) -> int:
    return sum(len(str(message.get("content"))) for message in messages)


def _batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size_of(item)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
