"""The user's present plan from a file of another engine: whose it is, read and judged whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.errors import InputError, PlanError, Problem
from triptych.export.deepspeed import read_deepspeed
from triptych.export.imported import Asked, Imported
from triptych.export.read_megatron import is_megatron, read_megatron
from triptych.plan.rules import verify

USUAL_SEQUENCE = 4096


def read_foreign(path: Path, asked: Asked) -> Imported:
    """The plan in a Megatron-LM launch script or a DeepSpeed JSON.

    Raises InputError if the file is neither, and PlanError with everything in it that contradicts
    itself or breaks a rule of plans.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(f"cannot read --from {path}: {reason}")) from error
    return imported_from(text, str(path), asked)


def imported_from(text: str, where: str, asked: Asked) -> Imported:
    """As `read_foreign`, from the text of the file."""
    usual = min(USUAL_SEQUENCE, asked.model.max_position)
    document = _json(text, where)
    if document is not None:
        imported, problems = read_deepspeed(document, asked, usual)
    elif is_megatron(text):
        imported, problems = read_megatron(text, asked, usual)
    else:
        raise InputError(
            Problem(
                f"{where} is no file of another engine that can be read",
                "--from reads a script with Megatron-LM's arguments, or a DeepSpeed JSON",
                "a script with --tensor-model-parallel-size, or a JSON with train_batch_size",
            )
        )
    broken = _broken(imported, asked, bool(problems))
    if problems or broken:
        raise PlanError([*problems, *broken])
    return imported


def _broken(imported: Imported, asked: Asked, is_doubtful: bool) -> list[Problem]:
    """Broken rules; without those of ranks and batch if the file contradicts itself there."""
    if is_doubtful:
        return verify(imported.plan, asked.model)
    return verify(imported.plan, asked.model, asked.cluster, imported.workload)


def _json(text: str, where: str) -> Mapping[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(Problem(f"{where} is not JSON: {error}")) from error
    return document if isinstance(document, dict) else None
