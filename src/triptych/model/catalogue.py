"""The built-in catalogue of models, read from `catalogue.csv`.

A row becomes the `config.json` that its family writes and goes through `hf.from_config`: there is
one way to count a model.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.model.hf import from_config
from triptych.model.model import Model

CATALOGUE = Path(__file__).with_name("catalogue.csv")

# The csv's columns under the keys of config.json; a blank cell leaves the family's default.
_COLUMNS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "moe_intermediate": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "max_position": "max_position_embeddings",
}
_GROUPED_FALCON = 1  # Falcon with more key/value heads than this has the newer decoder


def rows() -> dict[str, Mapping[str, str]]:
    """The rows of the csv by model name."""
    with CATALOGUE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def catalogue() -> dict[str, Model]:
    """Every model of the catalogue by name."""
    return {name: from_row(row) for name, row in rows().items()}


def from_row(row: Mapping[str, str]) -> Model:
    """The model of one row."""
    return from_config(config_of(row), row["name"])


def config_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The `config.json` that a row stands for."""
    config: dict[str, Any] = {
        key: int(row[column]) for column, key in _COLUMNS.items() if row[column]
    }
    config["model_type"] = row["hf_model_type"]
    config["tie_word_embeddings"] = row["tied_embeddings"] == "true"
    # The csv states windows and low ranks in full: a blank cell means that there is none.
    config["sliding_window"] = int(row["sliding_window"]) if row["sliding_window"] else None
    config["q_lora_rank"] = int(row["q_lora_rank"]) if row["q_lora_rank"] else None
    if row["hf_model_type"] == "falcon":
        config["new_decoder_architecture"] = int(row["kv_heads"]) > _GROUPED_FALCON
    if row["hf_model_type"] == "opt":
        config["ffn_dim"] = config["intermediate_size"]
    return config
