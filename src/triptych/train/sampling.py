"""What the model says while it trains: greedy continuations of a job's prompts, under any plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from triptych.tokenizer.load import TextTokenizer
from triptych.train.progress import Reporter


class Continues(Protocol):
    """What is needed of an engine."""

    def next_tokens(self, ids_BS: torch.Tensor, places: Sequence[int]) -> list[int]:
        """The likeliest token after a place of each row; collective."""


class Sampler:
    """Continues prompts on all ranks together; rank 0 (which has a `path`) shows and keeps them.

    Each token runs the whole text again, without a cache: meant for few and short ones.
    """

    def __init__(
        self,
        engine: Continues,
        tokenizer: TextTokenizer,
        prompts: Sequence[str],
        num_tokens: int,
        *,
        reporter: Reporter,
        path: Path | None,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._prompts, self._num_tokens = prompts, num_tokens
        self._reporter, self._path = reporter, path
        self._start = [
            [*tokenizer.start_ids, *ids] or [tokenizer.end_id] for ids in tokenizer.encode(prompts)
        ]

    def __call__(self, step: int) -> None:
        """Shows what the model says after `step` steps; collective."""
        for prompt, ids in zip(self._prompts, self._continued(), strict=True):
            text = self._tokenizer.tokenizer.decode(ids, skip_special_tokens=True)
            self._reporter.say(f"step {step}: {prompt!r} -> {text!r}")
            if self._path is not None:
                line = {"step": step, "prompt": prompt, "text": text}
                with self._path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")

    def _continued(self) -> list[list[int]]:
        """The new tokens of each prompt, up to the end of text."""
        rows = [list(ids) for ids in self._start]
        length = max(map(len, rows)) + self._num_tokens
        ids_BS = torch.full((len(rows), length), self._tokenizer.end_id)
        for row, ids in enumerate(rows):
            ids_BS[row, : len(ids)] = torch.tensor(ids)
        for _ in range(self._num_tokens):
            found = self._engine.next_tokens(ids_BS, [len(ids) - 1 for ids in rows])
            for row, token in enumerate(found):
                ids_BS[row, len(rows[row])] = token
                rows[row].append(token)
        made = [ids[len(start) :] for ids, start in zip(rows, self._start, strict=True)]
        return [_until(ids, self._tokenizer.end_id) for ids in made]


def _until(ids: list[int], end_id: int) -> list[int]:
    return ids[: ids.index(end_id)] if end_id in ids else ids
