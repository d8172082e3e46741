"""Answers in the forms of OpenAI's two interfaces: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.serve.engine.values import Logprob
from triptych.serve.http.answer import Piece, ShownToken
from triptych.serve.http.tokens import TokenTable

Document = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes in a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish = piece.finish


class _Frame:
    """What all documents of one answer have in common."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, table: TokenTable, top: int | None, tier: str) -> None:
        self.tier = tier
        self._table, self._top = table, top
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "service_tier": tier,
        }

    def frame(self, choices: list[Document], usage: Document | None) -> Document:
        """A chunk of these choices."""
        return {**self._common, "object": self.chunk_kind, "choices": choices, "usage": usage}

    def _whole(self, choices: list[Document], usage: Document) -> Document:
        return {**self._common, "object": self.kind, "choices": choices, "usage": usage}


class CompletionReply(_Frame):
    """`POST /v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> Document | None:
        """The first chunk of a choice, before any text; None if there is none."""
        return None

    def chunk(self, index: int, piece: Piece) -> Document:
        """A piece of a choice."""
        return self._choice(index, piece.text, piece.tokens, piece.finish)

    def whole(self, choices: Sequence[Choice], usage: Document) -> Document:
        """The answer at once."""
        found = [self._choice(i, c.text, c.tokens, c.finish) for i, c in enumerate(choices)]
        return self._whole(found, usage)

    def _choice(
        self, index: int, text: str, tokens: Sequence[ShownToken], finish: str | None
    ) -> Document:
        logprobs = None if self._top is None else self._logprobs(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Document:
        """Tokens join to the text, which from each offset on begins with the token."""
        return {
            "tokens": [shown.text for shown in tokens],
            "token_logprobs": [shown.logprob for shown in tokens],
            "top_logprobs": [self._likeliest(shown) for shown in tokens] if self._top else None,
            "text_offset": [shown.offset for shown in tokens],
        }

    def _likeliest(self, shown: ShownToken) -> dict[str, float] | None:
        """By text: of several tokens with one text, the likeliest."""
        if shown.logprob is None:
            return None  # the first token of a prompt
        return {self._table.text_of(t): p for t, p in reversed(shown.top)}


class ChatReply(_Frame):
    """`POST /v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Document | None:
        """The first chunk of a choice, before any text; None if there is none."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, piece: Piece) -> Document:
        """A piece of a choice."""
        delta = {"content": piece.text} if piece.text else {}
        return self._delta(index, delta, self._logprobs(piece.tokens), piece.finish)

    def whole(self, choices: Sequence[Choice], usage: Document) -> Document:
        """The answer at once."""
        found = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return self._whole(found, usage)

    def _delta(
        self, index: int, delta: Document, logprobs: Document | None, finish: str | None
    ) -> Document:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Document | None:
        if self._top is None:
            return None
        content = [
            {
                **self._entry(Logprob(shown.token, shown.logprob or 0.0)),
                "top_logprobs": [self._entry(each) for each in shown.top],
            }
            for shown in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, found: Logprob) -> Document:
        table, token = self._table, found.token
        return {
            "token": table.text_of(token),
            "logprob": found.logprob,
            "bytes": list(table.bytes_of(token)),
        }


Reply = CompletionReply | ChatReply
