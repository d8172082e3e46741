"""User case PUB-082: known kinds of RoPE scaling are applied, an unknown one refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layouts import make_engine, tiny_config
from logits import logits
from ranks import run_ranks
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from verbs import Ranks, job

from triptych.errors import ModelError
from triptych.model.rotary import KINDS
from triptych.plan.plan import Plan, Precision
from triptych.runtime.build.zoo import skeleton

LENGTH, PLACES = 5001, (0, 100, 1000, 5000)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "llama3": LLAMA3,
}
CASES = [
    (kind, key, theta)
    for kind in SCALINGS
    for key in ("type", "rope_type", "rope_parameters")
    for theta in (1e4, 5e5)
]


def _config(kind: str, key: str, theta: float, **changes: Any) -> dict[str, Any]:
    """As the hub's files say it: old and new names, theta outside and inside the table."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    whole = tiny_config(**sizes | {"intermediate_size": 32, "max_position_embeddings": 2048})
    scaling = SCALINGS[kind]
    if key == "rope_parameters":
        table = {"rope_type": "default"} if scaling is None else {"rope_type": kind, **scaling}
        return {**whole, key: {**table, "rope_theta": theta}, **changes}
    table = None if scaling is None else {key: kind, **scaling}  # type: ignore[assignment]
    return {**whole, "rope_theta": theta, "rope_scaling": table, **changes}


def _stock(config: dict[str, Any], attention: str = "sdpa") -> Any:
    settings = copy.deepcopy(config)
    hf_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    return transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention)


def _differences(cases: list[tuple[str, str, float]]) -> list[tuple[float, float]]:
    """The largest difference of cos or sin, and of logits, to the stock library."""
    ids = torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    found = []
    for case in cases:
        config = _config(*case)
        before = copy.deepcopy(config)
        engine = make_engine(Plan.uniform(1), config)
        assert config == before, "the user's configuration is not written to"
        ours, stock = engine.stages[0], _stock(config)
        values = {slot.name: slot.value for slot in engine.buckets.slots}
        with torch.no_grad():
            for name, parameter in stock.named_parameters():
                parameter.copy_(values[name])
            places = torch.arange(LENGTH)[None]
            mine = ours.causal_lm.model.rotary_emb(torch.zeros(1), places)
            theirs = stock.model.rotary_emb(torch.zeros(1), places)
            pairs = zip(mine, theirs, strict=True)
            rotary = max(float((a - b)[0, list(PLACES)].abs().max()) for a, b in pairs)
            logits_ours = ours.local_logits(ours(ids))[0, list(PLACES)]
            logits_stock = stock(input_ids=ids).logits[0, list(PLACES)]
            found.append((rotary, float((logits_ours - logits_stock).abs().max())))
    return found


@pytest.mark.parametrize("kind", SCALINGS)
def test_pub_082_cos_sin_and_logits_are_those_of_the_stock_library(kind: str) -> None:
    cases = [case for case in CASES if case[0] == kind]
    for case, (rotary, made) in zip(cases, run_ranks(1, _differences, cases)[0], strict=True):
        assert rotary < 1e-6 and made < 1e-4, case


def test_pub_082_old_and_new_names_mean_the_same_and_each_kind_something_of_its_own() -> None:
    def body() -> dict[tuple[str, str, float], Any]:
        places = torch.tensor([list(PLACES)])
        found = {}
        for case in CASES:
            rotary = skeleton(_config(*case)).get_submodule("model.rotary_emb")
            found[case] = rotary(torch.zeros(1), places)[0].numpy()
        return found

    found = run_ranks(1, body)[0]
    for (kind, _, theta), cos in found.items():
        assert (cos == found[kind, "rope_parameters", theta]).all()
    distinct = {cos.tobytes() for cos in found.values()}
    assert len(distinct) == 2 * len(SCALINGS)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_pub_082_an_unknown_kind_is_refused_by_name(key: str, ranks: Ranks, tmp_path: Path) -> None:
    config = tiny_config(rope_scaling={key: "spiral", "factor": 2.0})
    with pytest.raises(ModelError) as error:
        skeleton(config)
    assert "spiral" in str(error.value) and "llama3" in str(error.value)
    path = job(tmp_path)
    table = "[model.config.rope_scaling]\nfactor = 2.0\n"
    path.write_text(path.read_text() + f'\n{table}{key} = "spiral"\n')
    ended = ranks("train", path, "--plan", "dp=1")
    assert ended.code == 2 and "'spiral'" in ended.problems
    assert not (tmp_path / "run").exists()


def test_pub_082_the_kinds_are_those_of_the_library_for_these_families() -> None:
    assert {*KINDS} - {"default", "su"} == {*ROPE_INIT_FUNCTIONS} - {"proportional"}


def test_pub_082_serving_applies_it_and_export_keeps_it(ranks: Ranks, tmp_path: Path) -> None:
    """Trained a step, exported, and asked: a prompt beyond the original length."""
    path = job(tmp_path)
    lines = [f"{key} = {json.dumps(value)}" for key, value in LLAMA3.items()]
    lines[-1] = "original_max_position_embeddings = 8"
    table = "\n".join(["[model.config.rope_scaling]", 'rope_type = "llama3"', *lines])
    path.write_text(path.read_text() + f"\n{table}\n")
    settings = ("--set", "train.steps=1", "--set", "model.config.max_position_embeddings=64")
    ranks.done("train", path, "--plan", "dp=1", *settings)
    ranks.done("export", tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "llama3" and config["rope_scaling"]["factor"] == 8
    ids = [7 * i % 250 for i in range(40)]
    fp32 = Precision(parameter="fp32")
    for plan in (Plan.uniform(4, precision=fp32), Plan.uniform(4, tp=2, pp=2, precision=fp32)):
        mine = torch.from_numpy(logits(tmp_path / "out", plan, ids))
        torch.testing.assert_close(mine, _last_logits(tmp_path / "out", ids), rtol=1e-4, atol=1e-4)


def _last_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
    return found
