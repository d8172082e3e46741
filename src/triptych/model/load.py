"""A model from what a user types: a directory, a `config.json`, a catalogue name or a hub id."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triptych.errors import ModelError, Problem, nearest
from triptych.model.catalogue import from_row, rows
from triptych.model.hf import Capture, from_config
from triptych.model.model import Model

CONFIG = "config.json"


def load_model(
    text: str, environ: Mapping[str, str] = os.environ, capture: Capture | None = None
) -> Model:
    """The model that `text` names; `capture` reads families that are not described here.

    Tried in this order: a file, a directory with a `config.json`, the catalogue (case does not
    matter; of a hub id `org/name` the last part), the local hub cache. Nothing is downloaded.

    Raises ModelError, with the closest names if nothing has this one.
    """
    path = Path(text).expanduser()
    if path.is_file():
        name = path.resolve().parent.name if path.name == CONFIG else path.stem
        return _read(path, name, capture)
    if (path / CONFIG).is_file():
        return _read(path / CONFIG, path.resolve().name, capture)
    known = rows()
    match = _match(text, known)
    if match is not None:
        return from_row(known[match])
    cached = cached_config(text, hub_cache(environ))
    if cached is not None:
        return _read(cached, text.rsplit("/", 1)[-1], capture)
    raise ModelError(_unknown(text, path, known, hub_cache(environ)))


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder in which `huggingface_hub` keeps what it has downloaded."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def cached_config(hub_id: str, cache: Path) -> Path | None:
    """The `config.json` of a hub id in the cache: that of `main`, else of the newest snapshot."""
    folder = cache / ("models--" + hub_id.replace("/", "--"))
    main = folder / "refs" / "main"
    if main.is_file():
        current = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / CONFIG
        if current.is_file():
            return current
    snapshots = sorted(folder.glob(f"snapshots/*/{CONFIG}"), key=lambda file: file.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def _match(text: str, names: Iterable[str]) -> str | None:
    """The catalogue's spelling of a name or of the last part of a hub id."""
    by_lower = {name.lower(): name for name in names}
    return by_lower.get(text.lower()) or by_lower.get(text.rsplit("/", 1)[-1].lower())


def _read(path: Path, name: str, capture: Capture | None) -> Model:
    return from_config(_read_json(path), name, capture)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(
            Problem(f"{path} cannot be read: {error}", "a model is described by JSON")
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            Problem(f"{path} holds a JSON {type(value).__name__}", "a configuration is an object")
        )
    return value


def _unknown(text: str, path: Path, names: Iterable[str], cache: Path) -> Problem:
    """Says where the model was looked for and which names come close."""
    names = list(names)
    close = nearest(text.rsplit("/", 1)[-1], names, count=5)
    works = "close names: " + ", ".join(close) if close else "names: " + ", ".join(names)
    if path.is_dir():
        return Problem(f"the directory {text} has no {CONFIG}", _ACCEPTED, works)
    if path.suffix == ".json" or path.is_absolute() or text.startswith(("./", "../", "~")):
        return Problem(f"there is no file or directory {text}", _ACCEPTED, works)
    return Problem(f"unknown model {text!r} (hub cache: {cache})", _ACCEPTED, works)


_ACCEPTED = (
    "a model is a Hugging Face directory, a config.json, a catalogue name, "
    "or a hub id that is in the catalogue or in the local hub cache"
)
