"""Our stages against stock transformers: this file is what extends the allow-list."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks

from triptych.errors import ModelError
from triptych.plan.plan import Plan
from triptych.runtime.build.zoo import ALLOWED, skeleton

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
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
}


def _stock(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """Loss and gradients of the stock library with eager attention, whatever mask it makes."""
    settings = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    rows = batch_of(0, 4, 24, config["vocab_size"])
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), {k: g.numpy() for k, g in gradients.items() if g is not None}


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_equals_the_stock_model(family: str, layout: str) -> None:
    config = tiny_config(**FAMILIES[family])
    plan = Plan.uniform(4, microbatch=2, **LAYOUTS[layout])
    answers = run_ranks(plan.world_size, _ours, plan, config)
    weights = _whole(answers, 4)
    loss, gradients = run_ranks(1, _stock, config, weights)[0]
    assert abs(answers[0][0] - loss) < 1e-5
    ours = _whole(answers, 3)
    assert ours.keys() == gradients.keys()
    for name, expected in gradients.items():
        scale = max(1e-2, float(abs(expected).max()))
        torch.testing.assert_close(
            ours[name], torch.from_numpy(expected), rtol=1e-4, atol=1e-4 * scale
        )


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


def test_attention_dropout_is_refused() -> None:
    def body() -> str:
        with warnings.catch_warnings(), pytest.raises(ModelError) as error:
            skeleton(tiny_config(attention_dropout=0.1))
        return str(error.value)

    assert "attention_dropout" in run_ranks(1, body)[0]
