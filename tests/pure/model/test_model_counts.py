"""FLOPs and activation bytes equal the published formulas, which are written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.model.catalogue import catalogue
from triptych.model.count import (
    active_parameters,
    block_activation_bytes,
    block_flops_per_token,
    block_parameters,
    embedding_parameters,
    forward_flops_per_token,
    head_flops_per_token,
    head_parameters,
    parameters,
    tied_parameters,
    training_flops_per_token,
)
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.model.operator import average_context
from triptych.model.operators import (
    block_operators,
    embedding_operators,
    head_operators,
)

MODELS = catalogue()


def tiny(**changes: object) -> Model:
    """Hidden 8, two layers, four query and two key/value heads of 2, MLP of 16, vocabulary 32."""
    attention = Attention(query_heads=4, kv_heads=2, head_dim=2)
    block = Block(attention=attention, mlp=Mlp(width=16))
    model = Model(
        name="tiny",
        family="llama",
        hidden=8,
        blocks=(block, block),
        vocab=32,
        tied=False,
        max_position=64,
    )
    return replace(model, **changes)


def test_llama_3_8b_forward_flops_at_8192_tokens() -> None:
    assert forward_flops_per_token(MODELS["Llama-3-8B"], 8192) == pytest.approx(1.716e10, rel=3e-4)


def test_llama_3_8b_training_flops_at_8192_tokens() -> None:
    assert training_flops_per_token(MODELS["Llama-3-8B"], 8192) == pytest.approx(5.147e10, rel=3e-4)


def test_grouped_query_flops_equal_the_closed_form() -> None:
    h, q, k, f, s, layers, vocab = 4096, 4096, 1024, 14336, 8192, 32, 128256
    layer = 2 * h * (q + 2 * k) + 2 * q * h + 6 * h * f + 2 * q * s
    assert forward_flops_per_token(MODELS["Llama-3-8B"], s) == layers * layer + 2 * h * vocab


def test_gpt3_training_flops_equal_narayanan_and_korthikanti() -> None:
    batch, s, h, layers, vocab = 1536, 2048, 12288, 96, 51200
    model, tokens = MODELS["Megatron-175B"], 1536 * 2048
    no_recompute = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    ours = training_flops_per_token(model, s, causal=False) * tokens
    assert ours == pytest.approx(no_recompute, rel=1e-12)
    assert ours == pytest.approx(3.386e18, rel=3e-4)
    recomputed = 4 * layers * block_flops_per_token(model, model.blocks[0], s, causal=False)
    full = (recomputed + 3 * head_flops_per_token(model)) * tokens
    assert full == pytest.approx(
        96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h)), rel=1e-12
    )
    assert full == pytest.approx(4.511e18, rel=3e-4)


def test_gpt3_parameters_equal_narayanan() -> None:
    h, layers, s, vocab = 12288, 96, 2048, 51200
    closed = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + s) / (12 * layers * h))
    final_norm = 2 * h  # the formula leaves it out
    assert parameters(MODELS["Megatron-175B"]) == round(closed) + final_norm


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [
        ("Llama-2-7B", 32.125),
        ("Llama-3-8B", 34.0),
        ("Llama-3-70B", 33.5),
        ("Llama-3.1-405B", 31.75),
    ],
)
def test_llama_activation_bytes_are_a_multiple_of_sbh(name: str, coefficient: float) -> None:
    model = MODELS[name]
    log_sum_exp = 4 * model.query_heads  # fp32, one a head; the table's coefficient leaves it out
    kept = block_activation_bytes(model, model.blocks[0]) - log_sum_exp
    assert kept == coefficient * model.hidden


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("Llama-2-7B", 514.5),
        ("Llama-3-8B", 544.5),
        ("Llama-3-70B", 1073),
        ("Llama-3.1-405B", 2034),
    ],
)
def test_llama_activation_bytes_of_4096_tokens(name: str, mebibytes: float) -> None:
    model = MODELS[name]
    assert 4096 * block_activation_bytes(model, model.blocks[0]) / 2**20 == mebibytes


def test_gpt_activation_bytes_are_34_sbh_with_dropout_masks() -> None:
    model = MODELS["GPT-3-175B"]
    kept = block_activation_bytes(model, model.blocks[0]) - 4 * model.query_heads
    assert kept == 34 * model.hidden


def test_tensor_parallelism_divides_24_of_gpts_34_sbh() -> None:
    # Korthikanti et al. 2022, eq. 2: sbh (10 + 24 / t) without the scores.
    model = MODELS["GPT-3-175B"]
    operators = block_operators(model, model.blocks[0])
    whole = 2 * sum(op.saved for op in operators if op.split in ("none", "sequence"))
    assert whole == 10 * model.hidden


def test_latent_attention_flops_equal_the_closed_form() -> None:
    model, s = MODELS["DeepSeek-V3"], 4096
    h, q_rank, rank, heads, nope, rope, value = 7168, 1536, 512, 128, 128, 64, 128
    projections = 2 * (
        h * q_rank
        + q_rank * heads * (nope + rope)
        + h * (rank + rope)
        + rank * heads * (nope + value)
        + heads * value * h
    )
    scores = heads * (nope + rope) * s + heads * value * s  # causal: half of 2 a token each
    dense = 6 * h * 18432
    assert block_flops_per_token(model, model.blocks[0], s) == projections + scores + dense


def test_a_token_pays_for_the_experts_that_it_visits() -> None:
    model = MODELS["Qwen3-30B-A3B"]
    moe = sum(
        op.forward_flops(1)
        for op in block_operators(model, model.blocks[0])
        if op.name in ("router", "experts_up", "experts_down")
    )
    assert moe == 2 * 2048 * 128 + 8 * 6 * 2048 * 768


def test_an_expert_layer_keeps_the_dispatched_copy_and_the_outputs() -> None:
    experts = Experts(count=8, top_k=2, width=16)
    dense = tiny().blocks[0]
    moe = replace(dense, mlp=experts)
    model = tiny()
    dense_mlp, h, f = 3 * 16, 8, 16
    expected = 2 * (3 * f + 2 * h) + 2 * experts.count
    difference = block_activation_bytes(model, moe) - block_activation_bytes(model, dense)
    assert difference == 2 * (expected - dense_mlp)


@pytest.mark.parametrize(
    ("sequence", "window", "causal", "context"),
    [
        (100, None, True, 50),
        (100, None, False, 100),
        (100, 200, True, 50),
        (100, 50, True, 37.5),
        (100, 50, False, 50),
    ],
)
def test_a_window_cuts_the_triangle(
    sequence: int, window: int | None, causal: bool, context: float
) -> None:
    assert average_context(sequence, window, causal) == context


def test_a_window_limits_attention_flops() -> None:
    model = tiny()
    full = model.blocks[0]
    cut = replace(full, attention=replace(full.attention, window=10))
    saved = block_flops_per_token(model, full, 100) - block_flops_per_token(model, cut, 100)
    assert saved == 2 * 4 * (2 + 2) * (50 - 9.5)


def test_parts_add_up_to_the_whole() -> None:
    for model in MODELS.values():
        blocks = sum(block_parameters(model, block) for block in model.blocks)
        ends = embedding_parameters(model) + head_parameters(model)
        assert blocks + ends == parameters(model)


def test_a_tied_head_owns_only_its_norm_and_lists_the_shared_matrix() -> None:
    tied = tiny(tied=True)
    assert (head_parameters(tied), tied_parameters(tied)) == (8, 32 * 8)
    assert (head_parameters(tiny()), tied_parameters(tiny())) == (8 + 32 * 8, 0)
    assert head_operators(tied) == head_operators(tiny())


def test_dense_models_use_all_their_parameters() -> None:
    assert active_parameters(tiny()) == parameters(tiny())


def test_learned_positions_norm_and_dropout_follow_the_lookup() -> None:
    model = tiny(learned_positions=True, position_offset=2, embedding_norm=True, dropout=True)
    names = [op.name for op in embedding_operators(model)]
    assert names == ["embedding", "positions", "embedding_norm", "embedding_dropout"]
    assert embedding_parameters(model) == 32 * 8 + 66 * 8 + 2 * 8


def test_operators_follow_the_forward_pass() -> None:
    model = tiny()
    assert [op.name for op in block_operators(model, model.blocks[0])] == [
        "attention_norm",
        "qkv",
        "rotary",
        "attention",
        "out",
        "attention_residual",
        "mlp_norm",
        "mlp_up",
        "mlp_activation",
        "mlp_down",
        "mlp_residual",
    ]


def test_four_norms_surround_both_branches() -> None:
    model = MODELS["Gemma-2-2B"]
    norms = [op for op in block_operators(model, model.blocks[0]) if op.name.endswith("norm")]
    assert [op.name for op in norms] == [
        "attention_norm",
        "attention_output_norm",
        "mlp_norm",
        "mlp_output_norm",
    ]
    assert [op.saved / model.hidden for op in norms] == [2, 1, 2, 1]
