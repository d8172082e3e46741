"""Which tokens a grammar allows next. `llguidance` does the work; it is needed for this alone."""

from __future__ import annotations

import json
from functools import cached_property

import llguidance
import llguidance.numpy
import numpy as np
import torch
from tokenizers import Tokenizer

from triptych.errors import InputError, Problem
from triptych.serve.engine.sampling import Grammar


def compile_grammar(grammar: Grammar) -> str:
    """The grammar in the library's form. Raises InputError for one that it cannot read."""
    matcher = llguidance.LLMatcher
    try:
        match grammar.kind:
            case "json":
                return matcher.grammar_from_json_schema("{}")
            case "json_schema":
                json.loads(grammar.text)
                made = matcher.grammar_from_json_schema(grammar.text)
            case "regex":
                made = matcher.grammar_from_regex(grammar.text)
            case "lark":
                made = matcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise InputError(Problem(f"the {grammar.kind} cannot be read: {error}")) from error
    if fault := matcher.validate_grammar(made, None):
        raise InputError(Problem(f"the {grammar.kind} cannot be used: {fault}"))
    return made


class Guide:
    """One answer under a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._mask = llguidance.numpy.allocate_token_bitmask(1, size)

    def allowed(self, vocab: int) -> torch.Tensor:
        """[vocab] True for what may come next: an end token alone when the text is complete."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")
        allowed = np.zeros(vocab, dtype=bool)
        size = min(vocab, len(bits))
        allowed[:size] = bits[:size]
        return torch.from_numpy(allowed)

    def add(self, token: int) -> None:
        """Takes in the token that was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Guides:
    """Makes guides for one tokenizer, whose tables are built when the first one is asked for."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids

    @cached_property
    def _tables(self) -> llguidance.LLTokenizer:
        end = min(self._end_ids, default=None)
        return llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=end)

    def make(self, grammar: Grammar) -> Guide:
        """A guide at the beginning of an answer."""
        matcher = llguidance.LLMatcher(self._tables, compile_grammar(grammar))
        return Guide(matcher, self._tables.vocab_size)
