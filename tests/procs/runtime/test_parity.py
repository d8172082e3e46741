"""Our stages against stock transformers: this file is what extends the allow-list."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks
from transformers import (  # noqa: F401  (lazy modules: loaded once here, not once a rank)
    CohereForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GraniteForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    SmolLM3ForCausalLM,
    Starcoder2ForCausalLM,
)

from triptych.errors import ModelError
from triptych.plan.families import FAMILIES as FAMILY_ROWS
from triptych.plan.plan import Plan
from triptych.runtime.build.zoo import ALLOWED, require_no_dropout, skeleton

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama head size": {"head_dim": 24},
    "llama MHA": {"num_key_value_heads": 8},
    "llama rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
SMALL = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
MHA = {**SMALL, "num_key_value_heads": None}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {
    **MHA,
    "model_type": "gpt2",
    "n_inner": 160,
    "tie_word_embeddings": True,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.3,
}
FAMILIES |= {
    "gemma2": {
        **SMALL,
        **WINDOWS,
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma2 untied": {**SMALL, "model_type": "gemma2", "head_dim": 16},
    "gemma3_text": {
        **SMALL,
        **WINDOWS,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {**MHA, "model_type": "gpt_neox"},
    "gpt_neox in turn": {
        **MHA,
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "gpt2": GPT2,
    "gpt2 by layer": {
        **GPT2,
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "phi3": {**SMALL, "model_type": "phi3"},
    "phi3 window": {
        **SMALL,
        "model_type": "phi3",
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "olmo2": {**SMALL, "model_type": "olmo2"},
    "granite": {**SMALL, **GRANITE, "model_type": "granite", "tie_word_embeddings": True},
    "glm4": {**SMALL, "model_type": "glm4", "head_dim": 16},
    "smollm3": {
        **SMALL,
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        **SMALL,
        "model_type": "starcoder2",
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "cohere": {**SMALL, "model_type": "cohere", "logit_scale": 3.0, "tie_word_embeddings": True},
    "cohere norms": {**SMALL, "model_type": "cohere", "use_qk_norm": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 TP2": {"pp": 2, "tp": 2},
}
MHA_FAMILIES = ("gpt_neox", "gpt2")
GROUPED_FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "glm4",
    "smollm3",
    "starcoder2",
    "cohere norms",
)
UNEVEN: dict[str, dict[str, Any]] = {
    **{name: {"hidden_size": 48, "num_attention_heads": 3} for name in MHA_FAMILIES},
    **{
        name: {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        for name in GROUPED_FAMILIES
    },
}


@dataclass(frozen=True)
class Reference:
    """What the stock library gives: loss, gradients, and the weights that both start from."""

    loss: float
    gradients: dict[str, Any]
    weights: dict[str, torch.Tensor]


def _stock(config: dict[str, Any]) -> Reference:
    """The stock library with eager attention, whatever mask it makes, from our first weights."""
    weights = _whole([_ours(Plan.uniform(4, microbatch=2), config)], 4)
    settings = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    family = FAMILY_ROWS[config["model_type"]]
    parameters = {family.logical_name(name): p for name, p in model.named_parameters()}
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    rows = batch_of(0, 4, 24, config["vocab_size"])
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in parameters.items()}
    return Reference(float(loss.detach()), gradients, weights)


@functools.cache
def _reference(family: str, uneven: bool) -> Reference:
    return run_ranks(1, _stock, _config(family, uneven))[0]


def _config(family: str, uneven: bool = False) -> dict[str, Any]:
    return tiny_config(**FAMILIES[family], **(UNEVEN[family] if uneven else {}))


def _ours(plan: Plan, config: dict[str, Any]) -> Any:
    """Loss, gradients and weights of this rank: (name, box, values)."""
    engine = make_engine(plan, config)
    microbatches = split(batch_of(0, 4, 24, config["vocab_size"]), plan, 0)
    part, _ = engine.gradients(microbatches)
    loss = float(engine.mesh.world.all_reduce(part.clone()))
    slots = engine.buckets.slots
    return loss, [
        (s.name, s.shape, s.box, s.gradient.clone().numpy(), s.value.clone().numpy()) for s in slots
    ]


def _whole(answers: list[Any], index: int) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for _, parts in answers:
        for part in parts:
            name, shape, box = part[:3]
            target = whole.setdefault(name, torch.zeros(shape))
            target[tuple(slice(a, b) for a, b in box)] = torch.from_numpy(part[index])
    return whole


def _assert_parity(family: str, uneven: bool, layout: dict[str, Any]) -> None:
    expected = _reference(family, uneven)
    plan = Plan.uniform(4, microbatch=2, **layout)
    answers = run_ranks(plan.world_size, _ours, plan, _config(family, uneven))
    for name, weight in _whole(answers, 4).items():
        assert torch.equal(weight, expected.weights[name]), name
    assert abs(answers[0][0] - expected.loss) < 1e-5
    ours = _whole(answers, 3)
    assert ours.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = max(1e-2, float(abs(gradient).max()))
        torch.testing.assert_close(
            ours[name],
            torch.from_numpy(gradient),
            rtol=1e-4,
            atol=1e-4 * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_equals_the_stock_model(family: str, layout: str) -> None:
    _assert_parity(family, False, LAYOUTS[layout])


@pytest.mark.parametrize("family", UNEVEN)
def test_three_kv_heads_on_two_ranks_equal_the_stock_model(family: str) -> None:
    _assert_parity(family, True, LAYOUTS["TP2+SP"])


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "glm4", "gemma2", "cohere norms"])
def test_kv_heads_that_two_ranks_share_equal_the_stock_model(family: str) -> None:
    _assert_parity(family, False, {"tp": 4, "sequence_parallel": True})


def test_every_allowed_family_has_a_parity_case() -> None:
    tested = {tiny_config(**changes)["model_type"] for changes in FAMILIES.values()}
    assert tested == set(ALLOWED)


def test_a_family_outside_the_list_is_refused_by_name() -> None:
    def body() -> str:
        with pytest.raises(ModelError) as error:
            skeleton(tiny_config(model_type="gemma"))
        return str(error.value)

    text = run_ranks(1, body)[0]
    assert "gemma" in text and "llama" in text and "qwen3" in text


def test_dropout_is_refused_in_training() -> None:
    def body() -> str:
        with warnings.catch_warnings(), pytest.raises(ModelError) as error:
            require_no_dropout(skeleton(tiny_config(attention_dropout=0.1)))
        return str(error.value)

    assert "attention_dropout" in run_ranks(1, body)[0]
