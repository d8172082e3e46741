"""Offline generation of every family: the tokens of the stock library, one rank and several."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_samples import UNEVEN, family_config
from layouts import STRICT
from ranks import run_ranks
from serve_samples import PROMPTS, byte_tokenizer, save_model, stock_greedy

from triptych.plan.plan import Plan
from triptych.serve.engine.offline import Wanted, generate
from triptych.serve.engine.settings import EngineSettings

KNOWN = byte_tokenizer().get_vocab_size()
COUNT = 10


TIGHT = EngineSettings(max_running=3, token_budget=8, num_blocks=6, growth_tokens=0)
"""Prompts come in chunks beside decodes, and sequences are preempted."""


def _tokens(folder: Path, plan: Plan | None) -> list[tuple[int, ...]]:
    wanted = Wanted(max_new_tokens=COUNT)
    found = generate(folder, PROMPTS, plan, wanted, settings=TIGHT, strict=STRICT)
    return [answer.token_ids for answer in found]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", [name for name in UNEVEN if name not in ("llama", "qwen3")])
def test_every_family_gives_the_tokens_of_the_stock_library(tmp_path: Path, family: str) -> None:
    config = family_config(family, uneven=True) | {"eos_token_id": None, "bos_token_id": None}
    model = save_model(tmp_path, config)
    encoded = [byte_tokenizer().encode(prompt).ids for prompt in PROMPTS]
    expected = [tuple(stock_greedy(model, ids, COUNT, KNOWN)) for ids in encoded]
    assert _tokens(tmp_path, None) == expected
    plan = Plan.uniform(4, tp=2, pp=2)
    assert run_ranks(plan.world_size, _tokens, tmp_path, plan) == [expected] * 4
