"""Where a model to be served comes from: a Hugging Face directory, a checkpoint or a run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from triptych.checkpoint import find, folder, hf, read
from triptych.errors import CheckpointError, Problem
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.runtime.shard import Shard

_ADAPTER = "adapter_config.json"
_TOKENIZER = "tokenizer.json"
_GENERATION = "generation_config.json"
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A folder with weights, config.json and tokenizer; `notes` must be said aloud."""

    folder: Path
    is_checkpoint: bool
    config: dict[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> ModelSource:
        """What a path means. Raises CheckpointError if it is no model, naming what is missing."""
        if _is_ours(path):
            found, notes = find.resolve(path)
            config = hf.read_config(found)
            return cls(folder=found, is_checkpoint=True, config=config, notes=tuple(notes))
        works = f"a Hugging Face directory with {hf.CONFIG}, a checkpoint, or a run folder"
        if not path.is_dir():
            what = f"there is no folder {path}"
            raise CheckpointError(Problem(what, "a model is a folder", works))
        if (path / _ADAPTER).is_file():
            rule = "adapters of peft are not run beside a model"
            merged = "the model that `merge_and_unload` of peft gives, saved"
            raise CheckpointError(Problem(f"{path} holds an adapter", rule, merged))
        if not (path / hf.CONFIG).is_file():
            raise CheckpointError(Problem(f"{path} holds no model", works=works))
        config = hf.read_config(path)
        return cls(folder=path, is_checkpoint=False, config=config, notes=())

    def load(self, shards: Sequence[Shard]) -> None:
        """Fills the shards; collective over all ranks."""
        if self.is_checkpoint:
            read.load(self.folder, shards)
        else:
            hf.load_hf(self.folder, shards)

    def model(self) -> Model:
        """The model that the config describes."""
        return from_config(self.config, name=self.folder.name)

    def dtype(self) -> str:
        """The dtype in which the weights are stored, as the config says: fp32 if it does not."""
        word = self.config.get("dtype") or self.config.get("torch_dtype")
        return _DTYPES.get(str(word), "fp32")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder; raises CheckpointError if it has none."""
        path = self.folder / _TOKENIZER
        if not path.is_file():
            works = "put the tokenizer.json that the model was trained with into the folder"
            raise CheckpointError(Problem(f"{path} is missing", works=works))
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def end_tokens(self) -> frozenset[int]:
        """The token ids that end a text, from generation_config.json or config.json."""
        path = self.folder / _GENERATION
        try:
            generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        found = generation.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)


def _is_ours(path: Path) -> bool:
    """True for a checkpoint, a run folder or a folder of checkpoints."""
    if not path.is_dir():
        return False
    marks = (folder.MARK, folder.INDEX, find.RUN_SUBFOLDER)
    return any((path / mark).exists() for mark in marks) or bool(folder.checkpoints(path))
