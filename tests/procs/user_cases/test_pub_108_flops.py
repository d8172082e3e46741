"""User case PUB-108: FLOPs are counted from the real shapes of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from triptych.model.count import training_flops_per_token
from triptych.model.hf import from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "every head its own keys": ({}, 128),
    "grouped queries, odd width, tied": (
        {"num_key_value_heads": 2, "intermediate_size": 219, "tie_word_embeddings": True},
        128,
    ),
    "long": ({"num_key_value_heads": 2}, 2048),
    "two of four experts": (EXPERTS, 128),
}


def counted(config: dict[str, Any], length: int) -> float:
    """FLOPs of forward and backward on the graph of the stock model, scores in full."""
    stock = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config),
        attn_implementation="eager",
        experts_implementation="eager",  # the counter does not know grouped products
    )
    ids = torch.randint(config["vocab_size"], (1, length))
    with FlopCounterMode(display=False) as counter:
        stock(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("case", CASES)
def test_pub_108_model_flops_are_those_of_the_graph(case: str) -> None:
    changes, length = CASES[case]
    config = LLAMA | changes
    model = from_config(config, name=case)
    ours = training_flops_per_token(model, length, causal=False) * length
    assert ours == pytest.approx(counted(config, length), rel=0.01)
