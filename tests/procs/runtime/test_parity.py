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
from family_samples import FAMILIES, UNEVEN, family_config, stored_views
from layouts import batch_of, gradient_parts, make_engine, split, strictly, tiny_config
from ranks import run_ranks

from triptych.errors import ModelError
from triptych.plan.families import FAMILIES as FAMILY_ROWS
from triptych.plan.plan import Plan
from triptych.runtime.build.zoo import ALLOWED, skeleton

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "CP2": {"cp": 2},
    "CP2 Ulysses": {"cp": 2, "context_method": "ulysses"},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"dp": 2, "ep": 2},
    "CP2 EP2": {"cp": 2, "ep": 2},
}
ON_FOUR = {"pp": 2, "tp": 2, "recompute": "full"}
LENGTH = 24

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What the stock library or one layout gives: loss, gradients, and the weights before."""

    loss: float
    gradients: Tensors
    weights: Tensors


def _stock(config: dict[str, Any]) -> Step:
    """The stock library with eager attention, whatever mask it makes, from our first weights.

    One process of ours is compared in passing.
    """
    ours = _whole([_parts(Plan.uniform(4, microbatch=2), config)])
    settings = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    family = FAMILY_ROWS[config["model_type"]]
    parameters = stored_views(model, family, lambda parameter: parameter)
    assert parameters.keys() == ours.weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(ours.weights[name])
    _bend_choices(model.named_buffers())
    rows = batch_of(0, 4, LENGTH, config["vocab_size"])
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = stored_views(model, family, lambda parameter: parameter.grad)
    stock = Step(float(loss.detach()), gradients, ours.weights)
    _assert_equal(ours, stock, "one process")
    return Step(stock.loss, _arrays(gradients), _arrays(ours.weights))


def _bend_choices(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gives the biases of routers, which are no parameters, values that matter."""
    for name, tensor in tensors:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(
                torch.linspace(-0.2, 0.3, len(tensor))[torch.arange(len(tensor)) * 3 % len(tensor)]
            )


def _arrays(tensors: Tensors) -> Any:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@functools.cache
def _reference(case: str, uneven: bool) -> Step:
    stock = run_ranks(1, _stock, family_config(case, uneven))[0]
    gradients, weights = (
        {name: torch.from_numpy(array) for name, array in arrays.items()}
        for arrays in (stock.gradients, stock.weights)
    )
    return Step(stock.loss, gradients, weights)


def _parts(plan: Plan, config: dict[str, Any], place: int = 0) -> Any:
    """Loss, weights and gradients of this rank: (kind, name, shape, box, values)."""
    engine = make_engine(plan, config)
    strictly(place)
    shards = engine.shards()
    _bend_choices((shard.name, shard.tensor) for shard in shards)
    rows = batch_of(0, 4, LENGTH, config["vocab_size"])
    microbatches = split(rows, plan, engine.mesh.coordinates)
    names = {slot.name for slot in engine.buckets.slots}
    weights = [
        (s.kind, s.name, s.shape, s.box, s.tensor.detach().clone().numpy())
        for s in shards
        if s.kind == "weight" and s.name in names
    ]
    part, _ = engine.gradients(microbatches)
    loss = float(engine.mesh.world.all_reduce(part.clone()))
    return loss, weights + gradient_parts(engine)


def _parts_of_all(plans: dict[str, Plan], config: dict[str, Any]) -> dict[str, Any]:
    """The same of several plans for as many ranks, every other one under strict comm."""
    return {name: _parts(plan, config, i) for i, (name, plan) in enumerate(plans.items())}


def _whole(answers: list[Any]) -> Step:
    whole: dict[str, Tensors] = {"weight": {}, "gradient": {}}
    for _, parts in answers:
        for kind, name, shape, box, values in parts:
            target = whole[kind].setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(a, b) for a, b in box)] = torch.from_numpy(values)
    return Step(answers[0][0], whole["gradient"], whole["weight"])


def _assert_equal(ours: Step, expected: Step, layout: str) -> None:
    for name, weight in ours.weights.items():
        assert torch.equal(weight, expected.weights[name]), (layout, name)
    assert abs(ours.loss - expected.loss) < 1e-5, layout
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = max(1e-2, float(gradient.abs().max()))
        torch.testing.assert_close(
            ours.gradients[name],
            gradient,
            rtol=1e-4,
            atol=1e-4 * scale,
            msg=lambda text, name=name: f"{layout}, {name}: {text}",
        )


def _assert_parity(case: str, uneven: bool, layouts: dict[str, dict[str, Any]]) -> None:
    """Layouts of as many ranks, in one fork of them, against the stock library."""
    config = family_config(case, uneven)
    plans = {name: Plan.uniform(4, microbatch=2, **settings) for name, settings in layouts.items()}
    (world,) = {plan.world_size for plan in plans.values()}
    answers = run_ranks(world, _parts_of_all, plans, config)
    for name in plans:
        _assert_equal(_whole([answer[name] for answer in answers]), _reference(case, uneven), name)


def _first_cases() -> list[str]:
    """One case of each family."""
    firsts: dict[str, str] = {}
    for case in FAMILIES:
        firsts.setdefault(family_config(case)["model_type"], case)
    return list(firsts.values())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", FAMILIES)
def test_one_process_and_every_layout_of_two_ranks_equal_the_stock_model(case: str) -> None:
    has_experts = FAMILY_ROWS[family_config(case)["model_type"]].experts is not None
    _assert_parity(case, False, LAYOUTS | (EXPERT_LAYOUTS if has_experts else {}))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", _first_cases())
def test_stages_of_two_recomputing_ranks_equal_the_stock_model(case: str) -> None:
    _assert_parity(case, False, {"PP2 TP2 recomputed": ON_FOUR})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", UNEVEN)
def test_three_kv_heads_on_two_ranks_equal_the_stock_model(case: str) -> None:
    _assert_parity(case, True, {"TP2+SP": LAYOUTS["TP2+SP"]})


@pytest.mark.parametrize("case", ["llama", "phi3", "olmo2", "glm4", "gemma2", "gpt_oss"])
def test_kv_heads_that_two_ranks_share_equal_the_stock_model(case: str) -> None:
    _assert_parity(case, False, {"TP4+SP": {"tp": 4, "sequence_parallel": True}})


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
