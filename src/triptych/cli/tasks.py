"""Verbs that do different things for training and for serving: `--task` picks the module."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.errors import InputError, Problem

MODULES = {
    "plan": {"train": "plan", "serve": "plan_serve"},
    "predict": {"train": "predict", "serve": "predict_serve"},
}
OPTION = "--task"


def module_of(verb: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """The module of a verb and the arguments without `--task`. Raises InputError for a bad task."""
    if verb not in MODULES:
        return verb.replace("-", "_"), list(args)
    task, rest = "train", []
    words = iter(args)
    for word in words:
        if word == OPTION:
            task = next(words, "")
        elif word.startswith(OPTION + "="):
            task = word.partition("=")[2]
        else:
            rest.append(word)
    if task not in MODULES[verb]:
        raise InputError(
            Problem(f"{OPTION} {task}", "a plan is for training or for serving", "train or serve")
        )
    return MODULES[verb][task], rest
