"""A Hugging Face `config.json` as a `Model`, without torch and without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from triptych.errors import ModelError, Problem
from triptych.model.families import experts, gpt_like, llama_like
from triptych.model.families.unknown import unknown
from triptych.model.keys import ConfigKeys
from triptych.model.model import Model

FAMILIES: Mapping[str, Callable[[ConfigKeys], Model]] = {
    "llama": llama_like.llama,
    "mistral": llama_like.mistral,
    "qwen2": llama_like.qwen2,
    "qwen3": llama_like.qwen3,
    "gemma2": llama_like.gemma2,
    "gemma3": llama_like.gemma3,
    "gemma3_text": llama_like.gemma3,
    "phi3": llama_like.phi3,
    "olmo2": llama_like.olmo2,
    "granite": llama_like.llama,
    "glm4": llama_like.glm4,
    "smollm3": llama_like.smollm3,
    "cohere": llama_like.cohere,
    "mixtral": experts.mixtral,
    "qwen3_moe": experts.qwen3_moe,
    "qwen2_moe": experts.qwen2_moe,
    "olmoe": experts.olmoe,
    "gpt_oss": experts.gpt_oss,
    "llama4_text": experts.llama4,
    "deepseek_v2": experts.deepseek_v2,
    "deepseek_v3": experts.deepseek_v3,
    "gpt2": gpt_like.gpt2,
    "gpt_neox": gpt_like.gpt_neox,
    "starcoder2": gpt_like.starcoder2,
    "opt": gpt_like.opt,
    "bloom": gpt_like.bloom,
    "falcon": gpt_like.falcon,
}


Capture = Callable[[Mapping[str, Any], str], Model]
"""Reads a model of any family off its module; raises ModelError with the reason if it cannot."""


def from_config(config: Mapping[str, Any], name: str, capture: Capture | None = None) -> Model:
    """The model that a `config.json` describes.

    Families in `FAMILIES` are counted exactly; any other is what `capture` reads off its module.
    Where there is none, or it fails, it is counted as a Llama would be, with the reasons in
    `unreliable`. Of a multimodal model the language part (`text_config`) is counted.

    Raises ModelError that names every missing key and every wrong value at once.
    """
    text = _language_part(config)
    keys = ConfigKeys(text, name)
    if config.get("is_encoder_decoder") is True:
        raise ModelError(_encoder_problem(config, name))
    described = FAMILIES.get(str(text.get("model_type")))
    model = described(keys) if described else _other(keys, capture)
    keys.finish()
    return replace(model, unreliable=(*model.unreliable, *_doubts(config)))


def _other(keys: ConfigKeys, capture: Capture | None) -> Model:
    """A model of a family that is not described here."""
    if capture is None or not keys.config.get("model_type"):
        return unknown(keys)
    try:
        return capture(keys.config, keys.name)
    except ModelError as error:
        model = unknown(keys)
        reason = f"its graph cannot be read: {error.problems[0].what}"
        return replace(model, unreliable=(*model.unreliable, reason))


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`text_config` of a multimodal model, tied as the outer configuration says; else the whole."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    if config.get("tie_word_embeddings") is None:
        return text
    return {**text, "tie_word_embeddings": config["tie_word_embeddings"]}


def _doubts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the whole configuration has besides a plain causal language model."""
    doubts = []
    if isinstance(config.get("text_config"), Mapping):
        doubts.append("multimodal: only the language part (text_config) is counted")
    names = config.get("architectures")
    known = ("CausalLM", "LMHeadModel", "ConditionalGeneration")
    if isinstance(names, list) and names and not any(str(n).endswith(known) for n in names):
        doubts.append(f"architecture {names[0]}: its head is counted as a language-model head")
    return tuple(doubts)


def _encoder_problem(config: Mapping[str, Any], name: str) -> Problem:
    return Problem(
        f"{name} is an encoder-decoder model (model_type {config.get('model_type')!r})",
        "only decoder-only language models can be counted, planned and run",
        "a model of the families " + ", ".join(FAMILIES),
    )
