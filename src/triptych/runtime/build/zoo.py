"""Architectures from `transformers`, behind an allow-list that only a parity test extends.

Several architectures fail silently when they are cut or sharded (model_zoo.md), so a family is
here only if `tests/procs/runtime/test_parity.py` compares it with the stock library.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from triptych.errors import ModelError, Problem
from triptych.model.rotary import require_known_rotary
from triptych.plan.families import FAMILIES, Family, Rule, Split, family_of
from triptych.plan.layout import rule_for
from triptych.runtime.attention import NAME
from triptych.runtime.expert.experts import separate_experts

ALLOWED = tuple(FAMILIES)

_STYLES: dict[str, Rule] = {
    "colwise": Rule((Split.WIDTH,), dim=0),
    "colwise_gather_output": Rule((Split.WIDTH,), dim=0),  # packed or normed: we do better
    "rowwise": Rule((Split.WIDTH,), dim=1),
    "rowwise_split_input": Rule((Split.WIDTH,), dim=1),
    "embedding_rowwise": Rule((Split.VOCAB,), dim=0),
    "replicated_with_grad_allreduce": Rule((Split.NONE,), partial=True),
}
"""The library's words for tensor plans (they change between releases) in ours."""


def skeleton(config: Mapping[str, Any]) -> nn.Module:
    """The library's causal LM of a `config.json`, every parameter on the meta device, its experts
    ours.

    Raises ModelError for a family outside the allow-list or a setting that would be ignored.
    """
    model_type = str(config.get("model_type"))
    family = family_of(model_type)
    require_known_rotary(config)
    settings = copy.deepcopy(dict(config))  # the library writes into nested tables
    settings.pop("model_type")
    settings.pop("dtype", None), settings.pop("torch_dtype", None)
    try:
        hf_config = transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # the library validates with several exception types of its own
        raise ModelError(f"transformers refuses this {model_type} config: {error}") from error
    if getattr(hf_config, "use_bidirectional_attention", False):
        what = f"use_bidirectional_attention in a {model_type} config"
        works = "use_bidirectional_attention = false"
        raise ModelError(Problem(what, "attention is causal here", works))
    if noise := getattr(hf_config, "router_jitter_noise", 0.0):
        what, works = f"router_jitter_noise = {noise}", "router_jitter_noise = 0.0"
        raise ModelError(Problem(what, "noise would differ between layouts", works))
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=NAME
        )
    if family.rotary is not None:
        _remake_rotary(model.get_submodule(family.trunk), family.rotary)
    separate_experts(model, family)
    _check_tensor_plan(model, family, model_type)
    return model


def stored_buffers(causal_lm: nn.Module) -> dict[str, torch.Tensor]:
    """What of a module is stored on the hub's disks beside its parameters, by logical name."""
    config = causal_lm.config
    assert isinstance(config, transformers.PreTrainedConfig)
    family = family_of(config.model_type)
    named = {family.logical_name(name): buffer for name, buffer in causal_lm.named_buffers()}
    return {name: buffer for name, buffer in named.items() if family.is_buffer(name)}


def require_fixed_rotary(causal_lm: nn.Module, rule: str, works: str) -> None:
    """Raises ModelError if rotary frequencies follow the longest position that a rank sees.

    Context ranks see different positions, so that theirs would differ; documents of one row would
    share those of the longest.
    """
    config = causal_lm.config
    assert isinstance(config, transformers.PreTrainedConfig)
    family = family_of(config.model_type)
    if family.rotary is None:
        return
    kinds: Any = causal_lm.get_submodule(f"{family.trunk}.{family.rotary}").rope_type
    found = {kinds} if isinstance(kinds, str) else set(kinds.values())
    moving = sorted(found & {"dynamic", "longrope"})
    if moving:
        raise ModelError(Problem(f"rope_type = {', '.join(moving)}", rule, works))


def _remake_rotary(trunk: nn.Module, name: str) -> None:
    """Makes the rotary embedding anew off the meta device: its frequencies are not stored."""
    kind = type(trunk.get_submodule(name))
    trunk.add_module(name, kind(config=trunk.config))


def _check_tensor_plan(model: nn.Module, family: Family, model_type: str) -> None:
    """Raises ModelError if the library's tensor plan contradicts our table of rules."""
    trunk = model.get_submodule(family.trunk)
    plan: dict[str, str] = getattr(trunk, "_tp_plan", None) or {}
    names = [name for name, _ in trunk.named_parameters()]
    problems = []
    for pattern, style in plan.items():
        theirs = _STYLES.get(style)
        for name in fnmatch.filter(names, f"{pattern}.weight"):
            ours = rule_for(family.logical_name(name), model_type)
            same = theirs is not None and (theirs.partial, theirs.dim) == (ours.partial, ours.dim)
            if not same:
                problems.append(Problem(f"{name}: the library says '{style}', our table {ours}"))
                break
    if problems:
        raise ModelError(problems)
