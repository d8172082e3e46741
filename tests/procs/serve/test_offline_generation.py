"""Offline generation: the tokens of the stock library, under every plan, streamed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import STRICT
from ranks import run_ranks
from serve_samples import (
    FAMILIES,
    PROMPTS,
    byte_tokenizer,
    config_of,
    save_model,
    set_end_token,
    stock_greedy,
)

from triptych.checkpoint.export import export
from triptych.checkpoint.write import save
from triptych.errors import CheckpointError, InputError, PlanError
from triptych.plan.plan import Plan, Precision
from triptych.runtime.shard import Shard
from triptych.serve.engine.offline import Generation, Wanted, generate
from triptych.serve.engine.sampling import Sampling

KNOWN = byte_tokenizer().get_vocab_size()


def tokens(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def expected(model: Any, count: int) -> list[tuple[int, ...]]:
    tokenizer = byte_tokenizer()
    return [
        tuple(stock_greedy(model, tokenizer.encode(prompt).ids, count, KNOWN)) for prompt in PROMPTS
    ]


def run(folder: Path, plan: Plan | None, count: int) -> list[Generation]:
    return generate(folder, PROMPTS, plan, Wanted(max_new_tokens=count), strict=STRICT)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_stock_library(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, config_of(family))
    assert tokens(run(tmp_path, None, 24)) == expected(model, 24)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"tp": 3, "sequence_parallel": True},
        {"tp": 6},
        {"pp": 2},
        {"pp": 3, "layers": (2, 1, 1)},
        {"tp": 2, "pp": 2},
    ],
    ids=lambda degrees: "-".join(f"{key}{value}" for key, value in degrees.items()),
)
def test_every_plan_gives_the_tokens_of_one_process(
    tmp_path: Path, family: str, degrees: dict[str, Any]
) -> None:
    model = save_model(tmp_path, config_of(family))
    plan = Plan.uniform(4, **degrees)
    for generations in run_ranks(plan.world_size, run, tmp_path, plan, 12):
        assert tokens(generations) == expected(model, 12)


def test_the_pieces_that_are_streamed_are_the_text_byte_for_byte(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}

    def listen(index: int, piece: str) -> None:
        pieces[index] += piece

    generations = generate(tmp_path, PROMPTS, None, Wanted(max_new_tokens=40), on_text=listen)
    tokenizer = byte_tokenizer()
    for index, generation in enumerate(generations):
        ids = [*tokenizer.encode(PROMPTS[index]).ids, *generation.token_ids]
        assert PROMPTS[index] + pieces[index] == tokenizer.decode(ids)
        assert generation.text == pieces[index]


def test_no_token_is_beyond_the_vocabulary_of_the_tokenizer(tmp_path: Path) -> None:
    """Rows that pad the embedding have the largest logits, and are never chosen (pub_027)."""
    model = save_model(tmp_path, config_of())
    with torch.no_grad():
        model.lm_head.weight[KNOWN:] *= 50
    model.save_pretrained(tmp_path)
    for temperature in (0.0, 3.0):
        wanted = Wanted(max_new_tokens=30, sampling=Sampling(temperature=temperature, seed=0))
        for generation in generate(tmp_path, PROMPTS, None, wanted):
            assert max(generation.token_ids) < KNOWN


def test_a_text_ends_with_its_end_token_which_is_not_shown(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())
    (plain,) = generate(tmp_path, PROMPTS[:1], None, Wanted(max_new_tokens=12))
    assert (plain.finish, len(plain.token_ids)) == ("length", 12)
    last = plain.token_ids[7]
    first = plain.token_ids.index(last)
    set_end_token(tmp_path, last)
    (stopped,) = generate(tmp_path, PROMPTS[:1], None, Wanted(max_new_tokens=12))
    assert stopped.finish == "stop"
    assert stopped.token_ids == plain.token_ids[:first]


def test_a_seed_repeats_its_draws_and_another_seed_does_not(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())
    wanted = [
        Wanted(max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    drawn = [tokens(generate(tmp_path, PROMPTS, None, each)) for each in wanted]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generation_ends_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    save_model(tmp_path, config_of(max_position_embeddings=20))
    (generation,) = generate(tmp_path, PROMPTS[:1], None, Wanted(max_new_tokens=50))
    used = len(byte_tokenizer().encode(PROMPTS[0]).ids)
    assert len(generation.token_ids) == 20 - used


def test_an_export_a_checkpoint_and_a_run_folder_give_the_same_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    model = save_model(source, config_of("qwen3"))
    shards = [
        Shard(
            kind="weight",
            name=name,
            shape=tuple(p.shape),
            box=tuple((0, size) for size in p.shape),
            tensor=p.detach(),
            saved=True,
        )
        for name, p in model.named_parameters()
    ]
    files = {name: (source / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    checkpoint = save(tmp_path / "run" / "checkpoints", 3, shards, {}, files=files)
    export(checkpoint, tmp_path / "out", max_shard_bytes=20_000)
    reference = expected(model, 8)
    for path in (checkpoint, tmp_path / "run", checkpoint.parent, tmp_path / "out"):
        assert tokens(run(path, None, 8)) == reference
    assert any("step-00000003, the newest" in record.message for record in caplog.records)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_dtype_of_the_plan_is_that_of_the_run(tmp_path: Path, dtype: str) -> None:
    model = save_model(tmp_path, config_of())
    plan = Plan.uniform(4, precision=Precision(parameter=dtype))
    if dtype == "bf16":
        model = model.bfloat16()
    assert tokens(run(tmp_path, plan, 1)) == expected(model, 1)


def test_prompts_that_cannot_be_continued_are_all_named(tmp_path: Path) -> None:
    save_model(tmp_path, config_of(vocab_size=280))
    prompts = ["", "x" * 100, "import", "return"]
    with pytest.raises(InputError) as caught:
        generate(tmp_path, prompts)
    text = str(caught.value)
    assert "prompt 0: is empty" in text
    assert "prompt 1: has 100 tokens, the model has 96 positions" in text
    assert "the model has 280 rows" in text


def test_settings_that_do_not_work_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(temperature=-1.0, top_p=0.0)
    assert "top_p = 0.0" in str(caught.value)
    assert "temperature = -1.0" in str(caught.value)


def test_a_plan_that_does_not_fit_the_model_or_an_engine_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, config_of())
    with pytest.raises(PlanError) as caught:
        generate(tmp_path, PROMPTS, Plan.uniform(5, dp=2))
    text = str(caught.value)
    assert "dp=2" in text
    assert "4 layers" in text


def test_folders_that_hold_no_model_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model"):
        generate(tmp_path, PROMPTS)
    with pytest.raises(CheckpointError, match=r"there is no folder"):
        generate(tmp_path / "absent", PROMPTS)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"holds an adapter"):
        generate(tmp_path, PROMPTS)
    (tmp_path / "adapter_config.json").unlink()
    save_model(tmp_path, config_of())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged"):
        generate(tmp_path, PROMPTS)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        generate(tmp_path, PROMPTS)
