"""Frozen parameters: no gradient, no state, no reduction, no backward below what trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from family_samples import FAMILIES, family_config
from layouts import DOUBLE, Run, assert_equal_runs, batch_of, make_engine, merge, split, tiny_config
from layouts import train as train_layout
from ranks import run_ranks

from triptych.errors import ModelError
from triptych.model.count import parameters
from triptych.model.hf import from_config
from triptych.plan.freeze import frozen_names, known_names
from triptych.plan.plan import Plan, Precision
from triptych.runtime.build.slots import logical_names
from triptych.runtime.build.zoo import skeleton, stored_buffers
from triptych.train.startup import built, startup_lines

CONFIG = tiny_config()
MODEL = from_config(CONFIG, "tiny")
FREEZES: dict[str, tuple[str, ...]] = {
    "the bottom": ("embed_tokens", "layers.0", "layers.1"),
    "in between and the head": ("layers.1.mlp", "layers.*.self_attn.k_proj", "lm_head"),
    "all but norms": ("*_proj.weight", "embed_tokens", "lm_head"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2 ZeRO-3": {"dp": 2, "zero": 3, "microbatch": 2},
    "PP2 ZB-H1 x DP2 ZeRO-1": {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-h1"},
    "TP2+SP x PP2 recomputed": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
    "V of PP2 x DP2 ZeRO-2": {"pp": 2, "chunks": 2, "dp": 2, "zero": 2, "schedule": "zb-v"},
}


def _train(plan: Plan, freeze: tuple[str, ...], tied: bool) -> Run:
    def body() -> Run:
        config = {**CONFIG, "tie_word_embeddings": tied}
        return train_layout(plan, config, sequences=4, length=16, eps=1e-2, freeze=freeze)

    return merge(run_ranks(plan.world_size, body))


@cache
def _reference(freeze: tuple[str, ...], tied: bool = False) -> Run:
    return _train(Plan.uniform(4, precision=DOUBLE, microbatch=4), freeze, tied)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("the bottom", "DP2 ZeRO-3"),
        ("the bottom", "PP2 ZB-H1 x DP2 ZeRO-1"),
        ("the bottom", "V of PP2 x DP2 ZeRO-2"),
        ("in between and the head", "TP2+SP x PP2 recomputed"),
        ("in between and the head", "V of PP2 x DP2 ZeRO-2"),
        ("all but norms", "DP2 ZeRO-3"),
    ],
)
def test_any_layout_trains_the_rest_as_one_process_does(name: str, layout: str) -> None:
    plan, freeze = Plan.uniform(4, precision=DOUBLE, **LAYOUTS[layout]), FREEZES[name]
    reference = _reference(freeze)
    assert_equal_runs(_train(plan, freeze, False), reference, 1e-12)
    frozen = frozen_names(freeze, known_names(MODEL), MODEL)
    for kind, tensor in reference.tensors:
        assert kind == "weight" or tensor not in frozen


def test_a_tied_embedding_is_frozen_on_both_its_stages() -> None:
    plan = Plan.uniform(4, pp=2, precision=DOUBLE)
    freeze = ("embed_tokens",)
    assert_equal_runs(_train(plan, freeze, True), _reference(freeze, True), 1e-12)


def test_what_trains_has_the_gradient_that_it_has_without_frozen_ones() -> None:
    frozen, free = _reference(FREEZES["the bottom"]), _reference(())
    gradients = {key: t for key, t in frozen.tensors.items() if key[0] == "gradient"}
    assert len(gradients) == 2 * 9 + 2  # two layers, the norm, the head
    for key, tensor in gradients.items():
        torch.testing.assert_close(tensor, free.tensors[key], rtol=1e-12, atol=1e-12)
    norms = torch.stack([t.norm() for t in gradients.values()])
    assert frozen.norms[0] == pytest.approx(float(norms.norm()), rel=1e-9)


# ---- what is not there --------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_have_values_only_and_send_no_gradients(zero: int) -> None:
    freeze = FREEZES["the bottom"]

    def body(plan: Plan) -> None:
        engine, free = make_engine(plan, CONFIG, freeze=freeze), make_engine(plan, CONFIG)
        sent = []
        for one in (engine, free):
            rows = batch_of(0, 4, 16, CONFIG["vocab_size"])
            result = one.step(split(rows, plan, one.mesh.coordinates), 1e-3)
            sent.append(result.bytes_sent["data"])
        live = engine.live_bytes()
        frozen = sum(slot.elements for slot in engine.buckets.slots if not slot.trains)
        trained = parameters(MODEL) - frozen
        assert frozen > 0.4 * parameters(MODEL)
        whole = free.live_bytes()
        assert live.parameters == pytest.approx(whole.parameters, rel=0.02)
        assert live.gradients == pytest.approx(4 * trained / (2 if zero >= 2 else 1), rel=0.02)
        assert live.optimizer == pytest.approx(12 * trained / (2 if zero >= 1 else 1), rel=0.02)
        # An all-reduce, or a reduce-scatter and an all-gather, of what trains; and of values.
        assert sent[0] < (0.62 if zero < 3 else 0.92) * sent[1]

    run_ranks(2, body, Plan.uniform(4, dp=2, zero=zero, precision=Precision.mixed()))


def test_the_backward_stops_where_nothing_below_trains() -> None:
    def body(plan: Plan) -> tuple[list[str], int, list[bool]]:
        engine = make_engine(plan, CONFIG, freeze=FREEZES["the bottom"])
        reached: list[bool] = []
        for name, module in engine.stages[0].causal_lm.named_modules():
            if name.rpartition(".")[2].isdigit():  # layers
                module.register_forward_hook(lambda _, __, y: reached.append(y.requires_grad))
        rows = batch_of(0, 2, 16, CONFIG["vocab_size"])
        sent = engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3).bytes_sent
        labels = [mark.label for mark in engine._recorder.marks()]
        return labels, sent.get("pipeline", 0), reached

    ((_, _, reached),) = run_ranks(1, body, Plan.uniform(4))
    assert reached == [False, False, True, True] * 2
    (first, sent, _), (last, back, _) = run_ranks(2, body, Plan.uniform(4, pp=2))
    assert [label for label in first if label[0] == "0"] == ["0F0", "0F1"]
    assert [label for label in last if label[0] == "1"] == ["1F0", "1B0", "1F1", "1B1"]
    assert (sent, back) == (2 * 16 * 64 * 4, 0)


# ---- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("embed_tokens", 1),
        ("model.embed_tokens.weight", 1),
        ("layers.0", 9),
        ("layers.1.mlp", 3),
        ("layers.[01].mlp.*", 6),
        ("model.layers.*.self_attn", 16),
        ("*layernorm.weight", 8),
        ("lm_head", 1),
    ],
)
def test_a_pattern_is_a_name_its_beginning_or_a_glob(pattern: str, count: int) -> None:
    names = run_ranks(1, lambda: logical_names(skeleton(CONFIG), MODEL))[0]
    assert len(frozen_names([pattern], names, MODEL)) == count
    assert names <= set(known_names(MODEL))


def test_every_expert_has_a_name_of_its_own() -> None:
    config = family_config("mixtral")
    model = from_config(config, "tiny")
    names = run_ranks(1, lambda: logical_names(skeleton(config), model))[0]
    assert names <= set(known_names(model))
    found = frozen_names(["*.experts.3"], names, model)
    assert len(found) == 3 * model.num_layers


def test_a_layer_is_not_those_whose_numbers_begin_alike() -> None:
    deep = from_config(tiny_config(num_hidden_layers=12), "tiny")
    frozen = frozen_names(["layers.1"], known_names(deep), deep)
    assert {name.split(".")[2] for name in frozen} == {"1"}


def test_patterns_that_match_nothing_are_named_with_near_ones() -> None:
    with pytest.raises(ModelError) as caught:
        frozen_names(["embed_token", "layers.0", "layers.9.mlp"], known_names(MODEL), MODEL)
    text = str(caught.value)
    assert "'embed_token'" in text and "embed_tokens" in text and "'layers.9.mlp'" in text
    assert "'layers.0'" not in text
    with pytest.raises(ModelError, match="left to train"):
        frozen_names(["*"], known_names(MODEL), MODEL)


def test_what_a_family_stores_are_its_parameters_and_the_buffers_that_it_names() -> None:
    """So a checkpoint has all that the model has on disk, whatever trains."""

    def body() -> list[str]:
        found = []
        for case in FAMILIES:
            model = skeleton(family_config(case))
            named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            named |= set(stored_buffers(model))
            found += [f"{case}: {name}" for name in model.state_dict() if name not in named]
        return found

    assert run_ranks(1, body) == [[]]


def test_buffers_are_not_counted_as_parameters() -> None:
    config = family_config("deepseek_v3")
    plan = Plan.uniform(4)
    lines = run_ranks(
        1,
        lambda: startup_lines(
            plan, from_config(config, "tiny"), [built(make_engine(plan, config))]
        ),
    )[0]
    assert any(line.startswith("all stages: 4 layers") for line in lines)
