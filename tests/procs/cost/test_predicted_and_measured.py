"""What is predicted exactly is what runs: bytes sent by each rank, tensors kept by a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from family_samples import UNEVEN, family_config
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks
from saved import saved_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.software import TRIPTYCH
from triptych.cost.storage import Storage
from triptych.cost.traffic import rank_traffic
from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload

LAYERS, VOCAB, LENGTH, SEQUENCES = 3, 1003, 64, 8
PADDING_BYTES = 8192  # buckets are padded; a count of tokens travels too


def _sent(plan: Plan, config: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """This rank's place in the pipeline and what it says it sent in one step."""
    engine = make_engine(plan, config)
    rows = batch_of(0, SEQUENCES, LENGTH, VOCAB)
    microbatches = split(rows, plan, engine.mesh.coordinates)
    return engine.mesh.coordinates.pp, engine.step(microbatches, 1e-3).bytes_sent


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "microbatch": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "recompute": "full"},
        {"tp": 2, "recompute": "full", "sequence_parallel": True},
        {"tp": 2, "recompute": "full", "recompute_every": 2, "shard_activations": True},
        {"pp": 3, "tp": 2, "recompute": "full", "recompute_every": 2},
        {"cp": 2, "recompute": "selective"},
        {"cp": 2, "recompute": "full"},
        {"tp": 4},
        {"cp": 2},
        {"cp": 4, "recompute": "full"},
        {"cp": 2, "context_method": "ulysses", "recompute": "full"},
        {"cp": 4, "context_method": "ulysses"},
        {"cp": 2, "dp": 2, "zero": 1},
        {"cp": 2, "tp": 2, "sequence_parallel": True},
        {"pp": 3},
        {"pp": 2, "dp": 2, "zero": 1},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "gpipe"},
        {"tp": 2, "dp": 2, "zero": 1, "microbatch": 4},
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 2, "accumulation": "reduce_last"},
        {"dp": 2, "zero": 3},
        {"dp": 2, "precision": Precision(reduction="bf16")},
        {"dp": 2, "zero": 3, "precision": Precision(reduction="bf16")},
        {"tp": 2, "sequence_parallel": True, "precision": Precision(reduction="fp16")},
        {"dp": 2, "zero": 3, "prefetch": 0, "recompute": "full"},
        {"dp": 2, "zero": 3, "microbatch": 4, "accumulation": "reduce_last"},
        {"dp": 4, "zero": 3, "hybrid_shard": 2},
        {"dp": 4, "zero": 1, "hybrid_shard": 2},
        {"pp": 2, "dp": 2, "zero": 2},
        {"pp": 3, "dp": 2, "zero": 3},
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"},
        {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    ],
    ids=str,
)
def test_every_rank_sends_the_bytes_that_are_predicted(
    settings: dict[str, Any], tied: bool
) -> None:
    config = tiny_config(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
    )
    _compare(Plan.uniform(LAYERS, **settings), config)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", [name for name in UNEVEN if name not in ("llama", "qwen3")])
@pytest.mark.parametrize("settings", [{"pp": 2}, {"sequence_parallel": True, "recompute": "full"}])
def test_ranks_of_every_family_send_the_bytes_that_are_predicted(
    family: str, settings: dict[str, Any]
) -> None:
    config = family_config(family) | {"vocab_size": VOCAB}
    _compare(Plan.uniform(4, tp=2, **settings), config)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral window", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("llama4_text", {"attention_chunk_size": 12}),
        ("phi3", {"attention_dropout": 0.1}),  # spares none
    ],
)
def test_windows_and_chunks_spare_the_keys_that_are_predicted(
    family: str, changes: dict[str, Any]
) -> None:
    _compare(Plan.uniform(4, cp=4), family_config(family) | {"vocab_size": VOCAB} | changes)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 2, "zero": 1, "recompute": "full"},
        {"dp": 4, "ep": 2, "zero": 3},
        {"dp": 4, "ep": 2, "zero": 3, "hybrid_shard": 2},
        {"dp": 2, "ep": 2, "zero": 2, "pp": 2},
        {"cp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_ranks_that_share_experts_send_the_bytes_that_are_predicted(
    settings: dict[str, Any],
) -> None:
    """Every token visits every expert, so that tokens spread evenly."""
    config = family_config("qwen3_moe") | {"vocab_size": VOCAB, "num_experts_per_tok": 4}
    _compare(Plan.uniform(4, **settings), config)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "tp=2+1,dp=1+2,microbatch=2",
        "tp=1+2,dp=2+1,zero=1,sp=1",
        "tp=2+1,dp=1+2,microbatch=4,zero=3",
        "tp=2+2+1,dp=1+1+2,microbatch=2,zero=2",
        "cp=2+1,tp=1+2",
    ],
)
def test_stages_with_their_own_degrees_send_the_bytes_that_are_predicted(
    text: str, tied: bool
) -> None:
    config = tiny_config(
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
    )
    _compare(parse_plan(text + ",precision=fp32", from_config(config, "tiny")), config)


def _compare(plan: Plan, config: dict[str, Any]) -> None:
    work = Workload(sequence_length=LENGTH, global_batch=SEQUENCES)
    pricer = Pricer(from_config(config, "tiny"), parse_cluster(f"1x{plan.world_size}xcpu"), work)
    frame, storage = Frame.of(pricer, plan), Storage.of(plan)
    for stage, counted in run_ranks(plan.world_size, _sent, plan, config):
        for axis, predicted in rank_traffic(frame, storage, stage, plan.schedule)._asdict().items():
            expected = pytest.approx(predicted, rel=0.005, abs=PADDING_BYTES)
            assert counted.get(axis, 0) == expected, axis


def _kept_bytes(layers: int, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Bytes that a stock Llama keeps for its backward, parameters left out."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    kept = saved_bytes(lambda: model.model(ids, use_cache=False), model.parameters())
    return kept, config.to_dict()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_of_the_library_keeps_the_bytes_that_are_predicted(dtype: str) -> None:
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    (one, config), (three, _) = (_kept_bytes(layers, torch_dtype) for layers in (1, 3))
    pricer = Pricer(
        from_config(config, "tiny"),
        parse_cluster("1x1xcpu"),
        Workload(sequence_length=LENGTH, global_batch=1),
        replace(TRIPTYCH, writes_plain_layers=False),
    )
    setting = Setting(1, 1, 1, False, 1, "none", "sdpa", False, dtype)
    assert pricer.piece(0, setting).saved_bytes == pytest.approx((three - one) / 2, rel=0.01)


def _kept_by_a_rank(layers: int, plan: Plan) -> int:
    """Bytes that this rank's layers and its embedding keep for their backward."""
    engine = make_engine(plan, _tensor_config(layers))
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    (stage,) = engine.stages
    return saved_bytes(lambda: stage(ids), [s.value for s in engine.buckets.slots])


def _tensor_config(layers: int) -> dict[str, Any]:
    return tiny_config(num_hidden_layers=layers, vocab_size=64, max_position_embeddings=LENGTH)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_of_tensor_ranks_keeps_the_bytes_that_are_predicted(
    sequence_parallel: bool,
) -> None:
    """Under sequence parallelism nothing outside of attention and MLP is whole."""
    one, three = (
        max(run_ranks(2, _kept_by_a_rank, layers, Plan.uniform(layers, tp=2, **settings)))
        for layers in (1, 3)
        for settings in ({"sequence_parallel": sequence_parallel},)
    )
    pricer = Pricer(
        from_config(_tensor_config(3), "tiny"),
        parse_cluster("1x2xcpu"),
        Workload(sequence_length=LENGTH, global_batch=1),
    )
    setting = Setting(2, 1, 1, sequence_parallel, 1, "none", "sdpa", False, "fp32")
    assert pricer.piece(0, setting).saved_bytes == pytest.approx((three - one) / 2, rel=0.01)
