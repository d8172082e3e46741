"""config.json of each family, its defaults, and everything that can be wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.errors import ModelError
from triptych.model.count import parameters
from triptych.model.hf import FAMILIES, from_config
from triptych.model.model import Experts, Mlp

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def read(**changes: Any) -> Any:
    return from_config({**LLAMA, **changes}, "tiny")


def test_llama_defaults_are_those_of_transformers() -> None:
    model = read()
    assert (model.query_heads, model.kv_heads, model.blocks[0].attention.head_dim) == (8, 8, 8)
    assert (model.tied, model.max_position, model.unreliable) == (False, 2048, ())
    assert model.blocks[0].attention.window is None


def test_null_means_the_default() -> None:
    assert read(num_key_value_heads=None, head_dim=None, layer_types=None) == read()


def test_keys_that_do_not_count_are_ignored() -> None:
    old = read(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, torch_dtype="bfloat16")
    assert old == new == read()


def test_biases_of_llama_count() -> None:
    with_bias = read(attention_bias=True, mlp_bias=True)
    added = 3 * (3 * 64 + 64 + 2 * 96 + 64)
    assert parameters(with_bias) == parameters(read()) + added


def test_a_stated_head_width_overrides_the_quotient() -> None:
    assert read(head_dim=16).blocks[0].attention.query_width == 128


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        from_config({"model_type": "qwen2", "hidden_size": 64}, "half")
    (problem,) = caught.value.problems
    for key in ("num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert key in problem.what
    assert "hidden_size" not in problem.what


def test_wrong_values_and_missing_keys_are_reported_together() -> None:
    config = {**LLAMA, "hidden_size": "64", "num_hidden_layers": 0, "tie_word_embeddings": "no"}
    del config["vocab_size"]
    with pytest.raises(ModelError) as caught:
        from_config(config, "wrong")
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for word in ("vocab_size", "'64'", "num_hidden_layers = 0", "'no'"):
        assert word in text


def test_heads_must_divide_by_key_value_heads() -> None:
    with pytest.raises(ModelError) as caught:
        read(num_key_value_heads=3)
    assert "multiple of num_key_value_heads = 3" in str(caught.value)
    assert "num_key_value_heads = 2" in str(caught.value)


def test_hidden_size_must_divide_by_heads_without_a_head_width() -> None:
    with pytest.raises(ModelError, match="multiple of num_attention_heads = 7"):
        read(num_attention_heads=7)


def test_an_absurd_number_of_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="at most 10000"):
        read(num_hidden_layers=10**9)


def test_an_unknown_family_is_counted_as_llama_and_marked() -> None:
    model = read(model_type="brandnew")
    assert parameters(model) == parameters(read())
    assert model.unreliable == (
        "model_type 'brandnew' is not known: counted as a Llama of these sizes",
    )


def test_an_unknown_family_may_use_old_spellings() -> None:
    config = {
        "model_type": "old",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 8,
        "n_inner": 96,
        "vocab_size": 100,
        "n_positions": 512,
    }
    model = from_config(config, "old")
    assert parameters(model) == parameters(read())
    assert model.max_position == 512


def test_experts_of_an_unknown_family_are_counted_and_marked() -> None:
    model = read(
        model_type="newmoe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
    )
    assert model.experts == Experts(count=4, top_k=2, width=32, shared_width=32)
    assert "experts are counted in every layer" in model.unreliable


def test_a_configuration_without_model_type_is_marked() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert from_config(config, "nameless").unreliable[0].startswith("model_type is not stated")


def test_an_encoder_decoder_model_is_refused() -> None:
    with pytest.raises(ModelError, match="decoder-only"):
        read(model_type="t5", is_encoder_decoder=True)


def test_the_language_part_of_a_multimodal_model_is_counted_and_marked() -> None:
    outer = {"model_type": "seeing", "text_config": LLAMA, "vision_config": {"hidden_size": 9}}
    model = from_config(outer, "tiny")
    assert parameters(model) == parameters(read())
    assert model.unreliable == ("multimodal: only the language part (text_config) is counted",)


def test_the_outer_configuration_decides_on_tying() -> None:
    text = {**LLAMA, "tie_word_embeddings": False}
    outer = {"model_type": "seeing", "text_config": text, "tie_word_embeddings": True}
    assert from_config(outer, "tiny").tied


def test_gemma_3_files_leave_out_what_equals_the_class() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = from_config({"model_type": "gemma3", "text_config": text}, "Gemma-3-4B")
    assert parameters(model) == 3880263168
    assert model.tied


def test_another_head_is_marked() -> None:
    model = read(architectures=["LlamaForSequenceClassification"])
    assert "LlamaForSequenceClassification" in model.unreliable[0]
    assert read(architectures=["LlamaForCausalLM"]).unreliable == ()


def test_mistral_windows_by_default_and_null_turns_them_off() -> None:
    sizes = {"model_type": "mistral", "num_key_value_heads": 2}
    assert read(**sizes).blocks[0].attention.window == 4096
    assert read(**sizes, sliding_window=None).blocks[0].attention.window is None


def test_qwen_windows_need_the_switch_and_start_late() -> None:
    sizes = {"model_type": "qwen2", "num_key_value_heads": 2, "max_window_layers": 1}
    off, on = read(**sizes), read(**sizes, use_sliding_window=True, sliding_window=7)
    assert [block.attention.window for block in off.blocks] == [None] * 3
    assert [block.attention.window for block in on.blocks] == [None, 7, 7]


def test_layer_types_decide_over_the_rule() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {"model_type": "qwen3", "num_key_value_heads": 2, "use_sliding_window": True}
    model = read(**sizes, layer_types=types, sliding_window=5)
    assert [block.attention.window for block in model.blocks] == [5, None, None]


@pytest.mark.parametrize(
    "types", [["full_attention"], ["linear_attention"] * 3, "full_attention", [1, 2, 3]]
)
def test_layer_types_must_fit(types: object) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        read(model_type="qwen3", num_key_value_heads=2, layer_types=types)


def test_qwen3_moe_keeps_some_layers_dense() -> None:
    model = read(
        model_type="qwen3_moe",
        num_key_value_heads=2,
        num_hidden_layers=5,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    kinds = [type(block.mlp) for block in model.blocks]
    assert kinds == [Mlp, Experts, Mlp, Mlp, Mlp]


def test_gpt2_has_four_times_the_hidden_size_by_default() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    model = from_config(config, "tiny")
    assert model.blocks[0].mlp == Mlp(width=256, gated=False, bias=True)
    assert (model.tied, model.learned_positions, model.max_position) == (True, True, 1024)
    assert model.dropout and not from_config({**config, "resid_pdrop": 0.0}, "tiny").dropout


def test_opt_350m_is_marked() -> None:
    model = read(model_type="opt", ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)
    assert len(model.unreliable) == 2


def test_every_family_reports_its_missing_keys_as_a_model_error() -> None:
    for family in FAMILIES:
        with pytest.raises(ModelError, match="lacks"):
            from_config({"model_type": family}, family)
