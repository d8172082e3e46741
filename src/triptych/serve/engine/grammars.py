"""Where grammars come from: the one package that only they need is loaded when one is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from triptych.errors import InputError, Problem
from triptych.serve.engine.sampling import Grammar


class Guide(Protocol):
    """One answer under a grammar."""

    def allowed(self, vocab: int) -> torch.Tensor:
        """[vocab] True for what may come next."""
        ...

    def add(self, token: int) -> None:
        """Takes in the token that was chosen."""


class Grammars:
    """Guides for the answers of one model."""

    def __init__(self, tokenizer: Tokenizer | None, end_ids: frozenset[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._guides: Any = None

    def check(self, grammar: Grammar | None) -> None:
        """Raises InputError for a grammar that cannot be used, or without the package for them."""
        if grammar is not None:
            self._load().compile_grammar(grammar)

    def guide(self, grammar: Grammar | None) -> Guide | None:
        """A guide at the beginning of an answer; None without a grammar."""
        if grammar is None:
            return None
        if self._guides is None:
            self._guides = self._load().Guides(self._tokenizer, self._end_ids)
        made: Guide = self._guides.make(grammar)
        return made

    def _load(self) -> Any:
        """The module of ours that needs the package."""
        if self._tokenizer is None:
            raise InputError("a grammar needs the model's tokenizer.json")
        try:
            return import_module("triptych.serve.engine.guide")
        except ModuleNotFoundError as error:
            works = "pip install 'triptych[serve]'"
            raise InputError(Problem(f"a grammar needs {error.name}", works=works)) from error
