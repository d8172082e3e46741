"""The catalogue's counts equal an independent table of parameter counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from triptych.model.catalogue import catalogue, config_of, rows
from triptych.model.count import active_parameters, parameters
from triptych.model.hf import from_config
from triptych.model.model import Model

with Path(__file__).with_name("model_counts.csv").open(newline="") as file:
    COUNTS = {row["name"]: row for row in csv.DictReader(file)}

# Where the table and a module that runs differ, by how much, and why.
DIFFERENCES = {
    # The table counts the router's correction bias (256 experts, 58 layers), a buffer.
    "DeepSeek-V3": -256 * 58,
    # The table has square 5140 projections; 40 heads of 128 make 5120: 4 matrices and 3 biases a
    # layer are 20 narrower.
    "GPT-3-13B": -40 * (4 * 5140 * 20 + 3 * 20),
}
MODELS = catalogue()


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_equal_the_reference_table(name: str) -> None:
    expected = int(COUNTS[name]["parameters"]) + DIFFERENCES.get(name, 0)
    assert parameters(MODELS[name]) == expected


@pytest.mark.parametrize("name", [n for n in COUNTS if n != "GPT-3-13B"])
def test_active_parameters_equal_the_reference_table(name: str) -> None:
    assert active_parameters(MODELS[name]) == int(COUNTS[name]["active_parameters"])


def test_the_catalogue_and_the_reference_table_list_the_same_models() -> None:
    assert set(MODELS) == set(COUNTS)


def test_no_catalogue_model_is_marked_unreliable() -> None:
    assert {name: m.unreliable for name, m in MODELS.items() if m.unreliable} == {}


def test_every_row_says_where_it_is_from() -> None:
    assert all(row["source"] for row in rows().values())


def test_a_row_and_its_configuration_give_the_same_model() -> None:
    row = rows()["Qwen3-0.6B"]
    assert from_config(config_of(row), "Qwen3-0.6B") == MODELS["Qwen3-0.6B"]


def windows(model: Model) -> list[int | None]:
    return [block.attention.window for block in model.blocks]


def test_windows_follow_each_family() -> None:
    assert set(windows(MODELS["Mistral-7B-v0.1"])) == {4096}
    assert set(windows(MODELS["Mistral-7B-v0.3"])) == {None}
    assert windows(MODELS["Gemma-2-2B"])[:4] == [4096, None, 4096, None]
    assert windows(MODELS["Gemma-3-4B"])[:7] == [1024] * 5 + [None, 1024]
    assert windows(MODELS["GPT-OSS-20B"])[:3] == [128, None, 128]
    assert set(windows(MODELS["Qwen2.5-7B"])) == {None}


def test_grouped_heads_and_experts_are_data() -> None:
    assert (MODELS["Llama-3.1-70B"].query_heads, MODELS["Llama-3.1-70B"].kv_heads) == (64, 8)
    experts = MODELS["DeepSeek-V3"].experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.shared_width) == (256, 8, 2048)
    assert MODELS["Llama-3-8B"].experts is None
