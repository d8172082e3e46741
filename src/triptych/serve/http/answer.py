"""One answer on its way: tokens in, text that may be shown out, each token with its part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from triptych.serve.core.request import Reason
from triptych.serve.engine.stops import StopText
from triptych.serve.engine.text import TextStream
from triptych.serve.engine.values import Logprob, Output, PromptLogprob


@dataclass(slots=True)
class ShownToken:
    """A token and its part of the text: those of all tokens join to the text.

    The bytes of a character may be spread over several tokens; the last one has all of it.
    """

    token: int
    text: str
    offset: int  # where its part begins in the text
    logprob: float | None
    top: Sequence[Logprob]


class Piece(NamedTuple):
    """What may be shown now, and whether the answer has ended."""

    text: str
    tokens: Sequence[ShownToken] = ()
    finish: str | None = None  # "stop": the model or a stop text ended it; "length": a limit did


class Answer:
    """The text of one continuation, held back where a stop text might begin.

    Args:
        tokenizer: of the model.
        prompt_ids: what is continued.
        stop: texts that end it; nothing of them is shown.
        end_ids: tokens that end it; they are not shown either.
        echo: whether the prompt is the beginning of the text.
        keeps_tokens: whether pieces name their tokens.
        is_prompt_only: whether what the model says is left out: only the prompt was wanted.

    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        echo: bool = False,
        keeps_tokens: bool = False,
        is_prompt_only: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.finish: str | None = None
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._stream = TextStream(tokenizer, prompt_ids)
        self._stops = StopText(stop)
        self._end_ids = end_ids
        self._echoes = echo
        self._keeps_tokens = keeps_tokens
        self._is_prompt_only = is_prompt_only
        self._held: list[ShownToken] = []  # whose text is not yet shown
        self._decoded = self._shown = 0  # characters

    def add(self, output: Output) -> Piece:
        """What an output adds; nothing after the end."""
        if self.finish is not None:
            return Piece("")
        prompt = self._echo(output.prompt)
        text = ""
        if self._is_prompt_only:
            self.finish = "length"
        elif output.token is not None:
            self.num_tokens += 1
            if output.token not in self._end_ids:
                text = self._stops.add(self._decode(output.token, output))
        if self._stops.is_stopped or (output.finish is Reason.STOP and self.finish is None):
            self.finish = "stop"
        elif output.finish is not None:
            self.finish = "length"
        if self.finish is not None and not self._stops.is_stopped:
            text += self._rest()
        self._shown += len(text)
        tokens = [*prompt.tokens, *self._release()] if self._keeps_tokens else ()
        return Piece(prompt.text + text, tokens, self.finish)

    def _decode(self, token: int, output: Output) -> str:
        text = self._stream.add(token)
        if self._keeps_tokens:
            self._held.append(ShownToken(token, text, self._decoded, output.logprob, output.top))
        self._decoded += len(text)
        return text

    def _rest(self) -> str:
        """What was not certain before: the answer ends without a stop text."""
        rest = self._stream.finish()
        if rest and self._held:
            self._held[-1].text += rest
        self._decoded += len(rest)
        shown = self._stops.add(rest)
        if self._stops.is_stopped:
            self.finish = "stop"
        return shown + self._stops.finish()

    def _release(self) -> list[ShownToken]:
        """The tokens whose text is shown; one without text waits for what comes of it."""
        if self.finish is not None:
            found, self._held = self._cut(), []
            return found
        last = 0
        for number, held in enumerate(self._held, start=1):
            if held.text and held.offset + len(held.text) <= self._shown:
                last = number
        found, self._held = self._held[:last], self._held[last:]
        return found

    def _cut(self) -> list[ShownToken]:
        """What is held, up to the end of the text: a stop text may end it within a token."""
        found = [held for held in self._held if held.offset < self._shown or not held.text]
        for held in found:
            held.text = held.text[: max(0, self._shown - held.offset)]
        return found

    def _echo(self, logprobs: Sequence[PromptLogprob]) -> Piece:
        """The prompt as the beginning of the text, once."""
        if not self._echoes:
            return Piece("")
        self._echoes = False
        tokens = list(_prompt_tokens(self._tokenizer, self._prompt_ids, logprobs))
        text = "".join(shown.text for shown in tokens)
        self._decoded += len(text)
        self._shown += len(text)
        return Piece(text, tokens)


def _prompt_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[PromptLogprob]
) -> Iterator[ShownToken]:
    stream, offset = TextStream(tokenizer, ()), 0
    for place, token in enumerate(ids):
        text = stream.add(token)
        if place == len(ids) - 1:
            text += stream.finish()
        known = logprobs[place] if place < len(logprobs) else PromptLogprob(token, None)
        yield ShownToken(token, text, offset, known.logprob, known.top)
        offset += len(text)
