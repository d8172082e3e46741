"""Architectures from `transformers`, behind an allow-list that only a parity test extends.

Several architectures fail silently when they are cut or sharded (model_zoo.md), so a family is
here only if `tests/procs/runtime/test_parity.py` compares it with the stock library.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from triptych.errors import ModelError, Problem
from triptych.plan.layout import Rule, Split, rule_for
from triptych.runtime.attention import NAME

ALLOWED = ("llama", "mistral", "qwen2", "qwen3")

_STYLES: dict[str, Rule] = {
    "colwise": Rule((Split.WIDTH,), dim=0),
    "rowwise": Rule((Split.WIDTH,), dim=1),
    "embedding_rowwise": Rule((Split.VOCAB,), dim=0),
    "replicated_with_grad_allreduce": Rule((Split.NONE,), partial=True),
}
"""The library's words for tensor plans (they change between releases) in ours."""


def skeleton(config: Mapping[str, Any]) -> nn.Module:
    """The library's causal LM of a `config.json`, every parameter on the meta device.

    Raises ModelError for a family outside the allow-list or a setting that would break equality
    between layouts.
    """
    family = str(config.get("model_type"))
    if family not in ALLOWED:
        works = ", ".join(ALLOWED)
        raise ModelError(Problem(f"'{family}' cannot be run", "families with a parity test", works))
    if config.get("attention_dropout"):
        raise ModelError(
            Problem(
                f"attention_dropout = {config['attention_dropout']}",
                "dropout masks would differ between layouts",
                "attention_dropout = 0.0",
            )
        )
    settings = {key: value for key, value in config.items() if key != "model_type"}
    settings.pop("dtype", None), settings.pop("torch_dtype", None)
    try:
        hf_config = transformers.AutoConfig.for_model(family, **settings)
    except Exception as error:  # the library validates with several exception types of its own
        raise ModelError(f"transformers refuses this {family} config: {error}") from error
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=NAME
        )
    model.get_submodule("model").rotary_emb = _rotary(model)
    _check_tensor_plan(model)
    return model


def _rotary(model: nn.Module) -> nn.Module:
    """The rotary embedding made anew off the meta device: its frequencies are not stored."""
    rotary = model.get_submodule("model.rotary_emb")
    made: nn.Module = type(rotary)(config=model.config)
    return made


def _check_tensor_plan(model: nn.Module) -> None:
    """Raises ModelError if the library's tensor plan contradicts our table of rules."""
    plan: dict[str, str] = getattr(model.get_submodule("model"), "_tp_plan", None) or {}
    names = [name for name, _ in model.get_submodule("model").named_parameters()]
    problems = []
    for pattern, style in plan.items():
        theirs = _STYLES.get(style)
        for name in fnmatch.filter(names, f"{pattern}.weight"):
            ours = rule_for(name)
            same = theirs is not None and (theirs.partial, theirs.dim) == (ours.partial, ours.dim)
            if not same:
                problems.append(Problem(f"{name}: the library says '{style}', our table {ours}"))
                break
    if problems:
        raise ModelError(problems)
