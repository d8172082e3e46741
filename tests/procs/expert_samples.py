"""A small mixture of experts, in our engine and in the stock library, and routers with a bent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from family_samples import stored_views
from layouts import batch_of, make_engine, split, tiny_config

from triptych.plan.families import FAMILIES
from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine, RouterSettings

VOCAB = 128
GATE = "block_sparse_moe.gate.weight"


def mixture(**changes: Any) -> dict[str, Any]:
    """A two-layer Mixtral with 4 experts, 2 a token."""
    return tiny_config(
        model_type="mixtral",
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=VOCAB,
        num_local_experts=4,
        num_experts_per_tok=2,
        **changes,
    )


def set_weights(engine: Engine, change: Callable[[str, torch.Tensor], None]) -> None:
    """Changes the weights of an engine that holds them whole, but for other ranks' experts."""
    with torch.no_grad():
        for slot in engine.buckets.slots:
            change(slot.name, slot.value)


def all_to_the_first(name: str, weight: torch.Tensor) -> None:
    """Weights with which every router sends every token to expert 0."""
    if name.endswith("embed_tokens.weight"):
        weight[:, 0] = 4.0  # what all tokens have in common
    if name.endswith("gate.weight"):
        weight.zero_()
        weight[0, 0] = 20.0


def stock(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The library's model with our weights, and its parameters under the hub's names."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    family = FAMILIES[config["model_type"]]
    parameters = stored_views(model, family, lambda parameter: parameter)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model, parameters


def gradients_of(
    plan: Plan,
    config: dict[str, Any],
    router: RouterSettings | None = None,
    *,
    sequences: int = 4,
    length: int = 16,
    change: Callable[[str, torch.Tensor], None] = lambda name, weight: None,
) -> dict[str, Any]:
    """What one step gives on this rank: loss, routers' results, gradients and weights by name."""
    engine = make_engine(plan, config, router, clip_norm=0.0)  # clipping scales gradients
    set_weights(engine, change)
    rows = batch_of(0, sequences, length, VOCAB)
    result = engine.step(split(rows, plan, engine.mesh.coordinates.dp), 0.0)
    slots = engine.buckets.slots
    return {
        "loss": result.loss,
        "router": result.router,
        "gradients": {slot.name: slot.gradient.clone() for slot in slots},
        "weights": {slot.name: slot.value.clone() for slot in slots},
    }
