"""Written layers give what the library's own layers give, outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import DOUBLE, batch_of, make_engine, split, tiny_config
from packed import packed
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.decoder.layer import DecoderLayer
from triptych.runtime.engine import Engine, MicroBatch

PLAIN = ("llama biases", "qwen2 window", "qwen3", "granite", "smollm3")
LENGTH = 16
DOCUMENTS = ((7, 9), (16,))


def _written(engine: Engine) -> list[bool]:
    """Of each layer of this rank."""
    layers = [layer for stage in engine.stages for _, layer in stage.layers()]
    return [isinstance(layer.forward, DecoderLayer) for layer in layers]


def _unwrite(engine: Engine) -> None:
    """Makes the library's layers run."""
    for stage in engine.stages:
        stage.plain_trunk = None
        for _, layer in stage.layers():
            vars(layer).pop("forward", None)


def _microbatches(engine: Engine, vocab: int) -> list[MicroBatch]:
    rows = batch_of(0, 4, LENGTH, vocab)
    return [*split(rows, engine.plan, engine.mesh.coordinates), packed(DOCUMENTS, vocab)]


def _gradients(
    engine: Engine, microbatches: list[MicroBatch]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and this rank's gradients by name."""
    loss, _ = engine.gradients(microbatches)
    return loss, {piece.slot.name: piece.gradient.clone() for piece in engine.optimizer.pieces}


def _assert_same(engine: Engine, vocab: int) -> None:
    assert all(_written(engine))
    microbatches = _microbatches(engine, vocab)
    evaluated = engine.evaluate(microbatches)
    loss, gradients = _gradients(engine, microbatches)
    _unwrite(engine)
    torch.testing.assert_close(evaluated, engine.evaluate(microbatches), rtol=1e-12, atol=0.0)
    expected_loss, expected = _gradients(engine, microbatches)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0.0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            gradients[name],
            gradient,
            rtol=0.0,
            atol=1e-12 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("family", PLAIN)
def test_written_layers_are_those_of_the_library(family: str) -> None:
    def body() -> None:
        config = family_config(family)
        plan = Plan.uniform(4, precision=DOUBLE, microbatch=2)
        _assert_same(make_engine(plan, config), config["vocab_size"])

    run_ranks(1, body)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_on_two_ranks_too(recompute: str) -> None:
    def body() -> None:
        config = family_config("qwen3")
        plan = Plan.uniform(4, dp=2, zero=3, recompute=recompute, precision=DOUBLE, microbatch=2)
        _assert_same(make_engine(plan, config), config["vocab_size"])

    run_ranks(2, body)


def test_tensor_ranks_run_the_layers_of_the_library() -> None:
    def body() -> list[bool]:
        return _written(make_engine(Plan.uniform(4, tp=2), tiny_config()))

    assert run_ranks(2, body) == [[False] * 4] * 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_hook_inside_sees_what_the_library_computes(recompute: str) -> None:
    """As someone adds it to watch a module, and takes it away again."""

    def body() -> None:
        plan = Plan.uniform(4, recompute=recompute, precision=DOUBLE, microbatch=2)
        engine = make_engine(plan, tiny_config())
        assert all(_written(engine))
        microbatches = _microbatches(engine, 64)
        _, expected = _gradients(engine, microbatches)
        seen: list[torch.Size] = []
        layers = [layer for _, layer in engine.stages[0].layers()]
        handles = [
            layer.get_submodule("mlp.up_proj").register_forward_hook(
                lambda _, __, made: seen.append(made.shape)
            )
            for layer in layers[1:3]
        ]
        _, gradients = _gradients(engine, microbatches)
        assert len(seen) >= 2 * len(microbatches)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13)
        for handle in handles:
            handle.remove()
        seen.clear()
        _gradients(engine, microbatches)
        assert not seen

    run_ranks(1, body)


def test_only_what_trains_gets_a_gradient() -> None:
    def body() -> None:
        config = family_config("llama biases")
        freeze = ("embed_tokens", "layers.0", "layers.1.self_attn", "layers.2.*norm*", "*.k_proj.*")
        plan = Plan.uniform(4, precision=DOUBLE, microbatch=2)
        _assert_same(make_engine(plan, config, freeze=freeze), config["vocab_size"])

    run_ranks(1, body)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "gelu"}, {"attention_dropout": 0.1}, {"model_type": "olmo2"}],
    ids=str,
)
def test_other_layers_run_as_the_library_has_them(changes: dict[str, Any]) -> None:
    def body() -> list[bool]:
        engine = make_engine(Plan.uniform(4), tiny_config(pad_token_id=None, **changes))
        assert all(stage.plain_trunk is None for stage in engine.stages)
        return _written(engine)

    assert run_ranks(1, body) == [[False] * 4]


def test_projections_of_one_input_are_one_product() -> None:
    """Queries, keys and values; output; gate and up; down."""

    def body() -> list[int]:
        engine = make_engine(Plan.uniform(4, bucket_bytes=1 << 24), tiny_config())
        made = [layer.forward for _, layer in engine.stages[0].layers()]
        assert all(isinstance(layer, DecoderLayer) for layer in made)
        products = [p for layer in made for half in layer.halves for p in (half.into, half.out)]
        return [len(product.matrices) for product in products]

    assert run_ranks(1, body) == [[1, 1, 1, 1] * 4]
