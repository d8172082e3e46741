"""Our stages against stock transformers: this file is what extends the allow-list."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from family_samples import EXPERT_FAMILIES, FAMILIES, UNEVEN, family_config, stored_views
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks

from triptych.errors import ModelError
from triptych.plan.families import FAMILIES as FAMILY_ROWS
from triptych.plan.plan import Plan
from triptych.runtime.build.zoo import ALLOWED, skeleton

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 TP2 recomputed": {"pp": 2, "tp": 2, "recompute": "full"},
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
    parameters = stored_views(model, family, lambda parameter: parameter)
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    _bend_choices(model.named_buffers())
    rows = batch_of(0, 4, 24, config["vocab_size"])
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = stored_views(model, family, lambda parameter: parameter.grad)
    gradients = {name: gradient.numpy() for name, gradient in gradients.items()}
    return Reference(float(loss.detach()), gradients, weights)


def _bend_choices(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gives the biases of routers, which are no parameters, values that matter."""
    for name, tensor in tensors:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(
                torch.linspace(-0.2, 0.3, len(tensor))[torch.arange(len(tensor)) * 3 % len(tensor)]
            )


@functools.cache
def _reference(family: str, uneven: bool) -> Reference:
    return run_ranks(1, _stock, family_config(family, uneven))[0]


def _ours(plan: Plan, config: dict[str, Any]) -> Any:
    """Loss, gradients and weights of this rank: (name, box, values)."""
    engine = make_engine(plan, config)
    _bend_choices((shard.name, shard.tensor) for shard in engine.shards())
    rows = batch_of(0, 4, 24, config["vocab_size"])
    microbatches = split(rows, plan, engine.mesh.coordinates)
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
    answers = run_ranks(plan.world_size, _ours, plan, family_config(family, uneven))
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


CONTEXT_FAMILIES = [
    *("llama", "qwen3", "gpt_neox", "gpt2", "phi3", "olmo2", "granite", "glm4", "cohere norms"),
    *("mistral window", "qwen2 window", "gemma2", "gemma3_text", "smollm3", "starcoder2"),
]


@pytest.mark.parametrize("family", CONTEXT_FAMILIES)
def test_two_context_ranks_equal_the_stock_model(family: str) -> None:
    _assert_parity(family, False, {"cp": 2})


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_on_two_ranks_equal_the_stock_model(family: str, layout: dict[str, Any]) -> None:
    _assert_parity(family, False, layout)


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


def test_attention_that_looks_ahead_is_refused() -> None:
    def body() -> str:
        with pytest.raises(ModelError) as error:
            skeleton(family_config("gemma3_text") | {"use_bidirectional_attention": True})
        return str(error.value)

    assert "use_bidirectional_attention" in run_ranks(1, body)[0]


def test_frequencies_that_follow_the_length_are_refused_on_a_ring_of_context_ranks() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tiny_config(rope_parameters=rope)

    def body() -> str:
        with pytest.raises(ModelError) as error:
            make_engine(Plan.uniform(4, cp=2), config)
        return str(error.value)

    assert "dynamic" in run_ranks(2, body)[0]
