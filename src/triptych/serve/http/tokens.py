"""Single tokens as bytes and as text, for log-probabilities."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """The bytes that a token stands for, which need not be whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
        kinds = set(_kinds(json.loads(state)))
        self._bytes_of = _byte_level() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for a row of the vocabulary that is no token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        word: str = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes_of:
            return b"".join(self._bytes_of.get(letter) or letter.encode() for letter in word)
        if self._falls_back and (found := _BYTE.fullmatch(word)):
            return bytes.fromhex(found[1])
        return word.replace("▁", " ").encode()

    def text_of(self, token_id: int) -> str:
        r"""The token as text; `bytes:\xe6\x97` where its bytes are no whole characters."""
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _kinds(decoder: Any) -> list[str]:
    """The types of a decoder and of those in it."""
    parts = [kind for part in decoder.get("decoders", ()) for kind in _kinds(part)]
    return [decoder.get("type", ""), *parts]


def _byte_level() -> dict[str, bytes]:
    """Printable letters for the 256 bytes, as GPT-2 chose them: those that print are themselves,
    the others follow from U+0100 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): bytes([byte]) for byte in printed}
    return letters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}
