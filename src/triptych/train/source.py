"""Where a run starts from: the model's Hugging Face config, its weights and its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import JobError, ModelError, Problem
from triptych.model.hf import from_config
from triptych.model.load import CONFIG, cached_config, hub_cache
from triptych.model.model import Model
from triptych.model.rotary import require_known_rotary
from triptych.plan.rules import RUNNABLE_FAMILIES
from triptych.tokenizer.load import TextTokenizer, load_tokenizer
from triptych.train.job import Job

GENERATION_CONFIG = "generation_config.json"

# What travels with the weights into checkpoints and exports.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model of a job, ready to be built."""

    config: Mapping[str, Any]  # Hugging Face config, complete
    model: Model
    directory: Path | None  # where weights are, if the model came from a directory
    tokenizer: TextTokenizer


def read_source(job: Job) -> Source:
    """The model and tokenizer of a job. Raises ModelError, DataError or JobError."""
    directory, config = _found(job)
    tokenizer = load_tokenizer(job.tokenizer.path or _beside(directory, job))
    config = _completed(config, job, tokenizer)
    model = from_config(config, _name(job))
    if model.family not in RUNNABLE_FAMILIES:
        what = f"model_type '{model.family}' cannot be trained"
        rule = "a family runs once it is proved equal to the stock library"
        raise ModelError(Problem(what, rule, " or ".join(RUNNABLE_FAMILIES)))
    require_known_rotary(config)
    problems = [*_vocabulary(tokenizer, model), *_weights(job, directory)]
    if problems:
        raise JobError(problems)
    return Source(config=config, model=model, directory=directory, tokenizer=tokenizer)


def _found(job: Job) -> tuple[Path | None, dict[str, Any]]:
    """The directory of the model, if it has one, and its config."""
    if job.model.config is not None:
        return None, dict(job.model.config)
    text = job.model.path or ""
    path = Path(text)
    config = path if path.is_file() else path / CONFIG
    if not config.is_file():
        config = cached_config(text, hub_cache(os.environ)) or _no_model(text)
    try:
        values = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{config} is not a Hugging Face config")
    return config.parent, values


def _no_model(text: str) -> Path:
    rule = "a model is a Hugging Face directory, a config.json, or a hub id in the local cache"
    works = '[model] path = "DIR", or [model.config] model_type = "llama", ... for a new model'
    raise ModelError(Problem(f"no model at {text}", rule, works))


def _beside(directory: Path | None, job: Job) -> Path:
    if directory is None:
        rule = "a model that is given by its config has no tokenizer of its own"
        works = '[tokenizer] path = "DIR" (make one with `triptych tokenizer`)'
        raise JobError(Problem("[tokenizer] path is missing", rule, works))
    return directory


def _completed(config: dict[str, Any], job: Job, tokenizer: TextTokenizer) -> dict[str, Any]:
    """An inline config with what the tokenizer and the job know; a file's config as it is."""
    if job.model.config is None:
        return config
    known = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.end_id,
        "eos_token_id": tokenizer.end_id,
        "max_position_embeddings": job.data.sequence_length,
    }
    return known | config


def _name(job: Job) -> str:
    return Path(job.model.path).name if job.model.path else Path(job.run.folder or "model").name


def _vocabulary(tokenizer: TextTokenizer, model: Model) -> list[Problem]:
    if tokenizer.vocab_size <= model.vocab:
        return []
    what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model has {model.vocab}"
    rule = "every token has a row in the embedding"
    works = f"vocab_size = {tokenizer.vocab_size}, or the model's own tokenizer"
    return [Problem(what, rule, works)]


def _weights(job: Job, directory: Path | None) -> list[Problem]:
    if job.model.init == "random":
        return []
    if directory is not None and any(directory.glob("*.safetensors")):
        return []
    what = f'[model] init = "weights", but {directory} has no *.safetensors'
    return [Problem(what, "weights are read from safetensors files", 'init = "random"')]


def model_folder(job: Job) -> Path | None:
    """The directory of a job's model; None if the job gives its config."""
    return _found(job)[0]


def carried_files(
    source_config: bytes, tokenizer_folder: Path, model_directory: Path | None = None
) -> dict[str, bytes]:
    """The files beside the weights in every checkpoint: config, tokenizer, generation config."""
    files = {CONFIG: source_config}
    beside = [] if model_directory is None else [model_directory / GENERATION_CONFIG]
    for path in [*beside, *(tokenizer_folder / name for name in TOKENIZER_FILES)]:
        name = path.name
        if path.is_file():
            files[name] = path.read_bytes()
    return files
