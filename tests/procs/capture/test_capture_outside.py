"""Families that no description covers: what is read off their modules is what they are."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from capture_samples import OUTSIDE, outside_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from triptych.capture.late import captured
from triptych.cli.main import run
from triptych.model.count import forward_flops_per_token, parameters
from triptych.model.hf import FAMILIES, from_config
from triptych.model.load import load_model
from triptych.model.operators import block_operators

LENGTH = 61


def module_of(config: Mapping[str, Any]) -> torch.nn.Module:
    settings = copy.deepcopy(dict(config))
    own = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        own, attn_implementation="eager", experts_implementation="batched_mm"
    )
    return model


def counted_flops(config: Mapping[str, Any]) -> int:
    """Torch's own count of the forward, with whole score matrices."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = module_of(config)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, use_cache=False)
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("family", OUTSIDE)
def test_parameters_are_those_of_the_module(family: str) -> None:
    assert family not in FAMILIES
    config = outside_config(family)
    model = from_config(config, family, captured)
    with torch.device("meta"):
        module = module_of(config)
    assert parameters(model) == sum(weight.numel() for weight in module.parameters())
    assert model.ends is not None
    assert model.unreliable == ()


@pytest.mark.parametrize("family", OUTSIDE)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    config = outside_config(family)
    model = from_config(config, family, captured)
    windows = any(block.attention.window for block in model.blocks)
    flops = LENGTH * forward_flops_per_token(model, LENGTH, causal=False)
    if windows:  # torch counts whole score matrices
        assert flops < counted_flops(config)
    else:
        assert flops == pytest.approx(counted_flops(config), rel=0.01)


@pytest.mark.parametrize("family", OUTSIDE)
def test_attention_and_mlp_can_be_divided(family: str) -> None:
    model = from_config(outside_config(family), family, captured)
    for block in set(model.blocks):
        splits = [op.split for op in block_operators(model, block) if op.kind == "gemm"]
        assert splits.count("column") == splits.count("row") >= 2


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family", ["stablelm", "gptj", "exaone4", "phimoe"])
def test_plan_answers_from_the_graph(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, outside_config(family)))
    where = ["--cluster", "1x8xH100-SXM", "--seq", "128", "--batch", "64"]
    model = load_model(path, capture=captured)

    def said(*args: str) -> str:
        assert run([*args]) == 0
        return capfd.readouterr().out

    text = said("plan", path, *where, "--auto")
    assert "graph     read off transformers' module" in text
    assert "unreliable" not in text
    assert f"priced, not runnable: model family '{family}'" in " ".join(text.split())
    answer = json.loads(said("plan", path, *where, "--json"))
    assert answer["parameters"] == parameters(model)
    assert "graph     read off" in said("predict", path, *where, "--plan", "tp=2,dp=4")


# --- what cannot be read -------------------------------------------------------------------------


def test_a_family_that_the_library_does_not_know_is_counted_as_a_llama_with_the_reason() -> None:
    config = {**outside_config("stablelm"), "model_type": "our_own"}
    plain = from_config(config, "it")
    model = from_config(config, "it", captured)
    assert model.unreliable[:-1] == plain.unreliable
    assert "transformers" in model.unreliable[-1]
    assert "does not know it either" in model.unreliable[-1]
    assert parameters(model) == parameters(plain)


def test_layers_that_no_operators_stand_for_are_counted_as_a_llama_with_the_reason() -> None:
    config = {**outside_config("stablelm"), "model_type": "jamba", "num_experts": 4}
    config["num_experts_per_tok"] = 2
    model = from_config(config, "it", captured)
    assert model.ends is None
    assert "sees several tokens at once (conv1d)" in model.unreliable[-1]


@contextmanager
def without_capture() -> Iterator[None]:
    kept = sys.modules.get("triptych.capture.build")
    sys.modules["triptych.capture.build"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["triptych.capture.build"]
        if kept:
            sys.modules["triptych.capture.build"] = kept


def test_without_torch_it_is_counted_as_a_llama_and_says_what_to_install() -> None:
    with without_capture():
        model = from_config(outside_config("stablelm"), "it", captured)
    assert model.ends is None
    assert "pip install 'triptych[run]'" in model.unreliable[-1]


def test_a_configuration_that_cannot_be_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**outside_config("stablelm"), "hidden_size": -64})
    assert run(["plan", str(path), "--cluster", "1x8xH100-SXM"]) == 2
    message = capsys.readouterr().err
    assert message.count("hidden_size must be an integer of at least 1") == 1
    assert "Traceback" not in message


def test_code_that_comes_with_a_configuration_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\n")
    own = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    model = load_model(
        str(write(tmp_path, {**outside_config("stablelm"), **own})), capture=captured
    )
    assert model.ends is not None
    unknown = {**outside_config("stablelm"), **own, "model_type": "evil"}
    model = load_model(str(write(tmp_path, unknown)), capture=captured)
    assert "does not know it either" in model.unreliable[-1]
