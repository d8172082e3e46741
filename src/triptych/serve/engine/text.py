"""Token ids to text, piece by piece: the pieces together are the decoded text, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of generated tokens, as it becomes certain.

    A character whose bytes are spread over several tokens comes when it is whole; `finish` gives
    what is left of one that never became whole. The prompt is context only: some tokenizers write
    a space before a token unless it is the first of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._ids: list[int] = []
        self._text = ""
        self._stream = DecodeStream(ids=self._prompt_ids, skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """The text that one more token makes certain; often empty."""
        self._ids.append(token_id)
        piece: str = self._stream.step(self._tokenizer, token_id) or ""
        self._text += piece
        return piece

    def finish(self) -> str:
        """The rest of the text."""
        decode = self._tokenizer.decode
        before: str = decode(self._prompt_ids, skip_special_tokens=True)
        whole: str = decode([*self._prompt_ids, *self._ids], skip_special_tokens=True)
        known = before + self._text
        rest = whole[len(known) :] if whole.startswith(known) else ""
        self._text += rest
        return rest

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text
