"""Whatever the plan, the batch, the pool and the order of arrival: the stock library's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from serve_samples import byte_tokenizer, config_of, save_model
from served import Served, random_prompts, serve

from triptych.plan.plan import Plan
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.values import Ask

KNOWN = byte_tokenizer().get_vocab_size()
TIGHT = EngineSettings(max_running=8, token_budget=20, num_blocks=14, growth_tokens=0)
"""Prompts come in chunks, sequences are preempted, prefixes are found again."""
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}


def asks_of(ids: list[list[int]], count: int) -> list[Ask]:
    return [Ask(id=number, prompt=prompt, max_tokens=count) for number, prompt in enumerate(ids)]


def stock_tokens(model: Any, ids: list[list[int]], count: int) -> dict[tuple[int, int], list[int]]:
    """Greedy tokens of the stock library, one prompt at a time, with its own cache."""
    found = {}
    for number, prompt in enumerate(ids):
        with torch.no_grad():
            state = model(input_ids=torch.tensor([prompt]), use_cache=True)
            tokens = [int(state.logits[0, -1, :KNOWN].argmax())]
            while len(tokens) < count:
                fed = torch.tensor([tokens[-1:]])
                state = model(input_ids=fed, cache=state.past_key_values, use_cache=True)
                tokens.append(int(state.logits[0, -1, :KNOWN].argmax()))
        found[number, 0] = tokens
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder, config_of())


def check(served: Served | None, expected: dict[tuple[int, int], list[int]]) -> None:
    assert served is not None
    assert served.tokens == expected
    assert served.load.num_preemptions > 0 and served.load.num_reused_tokens > 0


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_64_prompts_at_random_moments_give_the_stock_tokens(
    model: tuple[Path, Any], kernels: bool
) -> None:
    folder, stock = model
    ids = random_prompts(64, 60, KNOWN)
    settings = replace(TIGHT, kernels=kernels)
    check(serve(folder, None, settings, asks_of(ids, 12), 1), stock_tokens(stock, ids, 12))


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_stock_tokens(model: tuple[Path, Any], plan: str) -> None:
    folder, stock = model
    ids = random_prompts(24, 60, KNOWN, seed=2)
    degrees = Plan.uniform(4, **PLANS[plan])
    served = run_ranks(degrees.world_size, serve, folder, degrees, TIGHT, asks_of(ids, 24), 3)
    check(served[0], stock_tokens(stock, ids, 24))


def test_continuations_share_a_prompt_and_draw_on_their_own(model: tuple[Path, Any]) -> None:
    """n = 3 gives what three requests with the draws of each continuation give (greedy: the same
    text three times), in a pool that forces copies and preemption.
    """
    folder, stock = model
    ids = random_prompts(8, 40, KNOWN, seed=4)
    asks = [Ask(id=i, prompt=prompt, max_tokens=8, n=3) for i, prompt in enumerate(ids)]
    served = serve(folder, None, TIGHT, asks, 5)
    assert served is not None
    expected = stock_tokens(stock, ids, 8)
    for (number, _), tokens in served.tokens.items():
        assert tokens == expected[number, 0]
    assert len(served.tokens) == 24
    drawn = [
        Ask(id=1, prompt=ids[0], max_tokens=8, n=3, sampling=Sampling(temperature=2.0, seed=7))
    ]
    several = [serve(folder, None, settings, drawn) for settings in (TIGHT, EngineSettings())]
    assert several[0] is not None and several[1] is not None
    assert several[0].tokens == several[1].tokens
    assert len({tuple(tokens) for tokens in several[0].tokens.values()}) == 3


def test_an_abort_frees_everything_and_leaves_the_others_alone(model: tuple[Path, Any]) -> None:
    folder, stock = model
    ids = random_prompts(6, 40, KNOWN, seed=6)
    expected = stock_tokens(stock, ids, 10)
    found: dict[tuple[int, int], list[int]] = {}
    with Engine.open(folder, None, TIGHT) as engine:
        for ask in asks_of(ids, 10):
            engine.add_request(ask)
        for turn in range(4):
            for output in engine.step():
                found.setdefault((output.request_id, 0), []).append(output.token or 0)
            engine.abort(turn)
        while engine.is_busy:
            for output in engine.step():
                assert output.request_id >= 4
                found.setdefault((output.request_id, 0), []).append(output.token or 0)
        assert engine.load.num_free_blocks == engine.limits.num_blocks
    assert {key: found[key] for key in ((4, 0), (5, 0))} == {
        key: expected[key] for key in ((4, 0), (5, 0))
    }
