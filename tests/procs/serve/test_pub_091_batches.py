"""PUB-091 over HTTP: greedy answers are the same alone, in any company, cut, preempted, reused."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_samples import NAME, Server, serving
from serve_samples import byte_tokenizer, config_of, save_model
from served import random_prompts

from triptych.serve.engine.settings import EngineSettings

PROMPTS = random_prompts(16, 60, byte_tokenizer().get_vocab_size(), seed=91)
COUNT = 16
ROOMY = EngineSettings(max_running=20, prefix_reuse=False)
TIGHT = EngineSettings(max_running=8, token_budget=20, num_blocks=14, growth_tokens=0)
"""Prompts come in chunks, sequences are preempted, prefixes are found again."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_model(found, config_of())
    return found


def logged(server: Server, prompt: list[int], delay_s: float = 0.0) -> tuple[str, list[float]]:
    """A greedy answer, bit by bit: its text, and the log-probabilities of its tokens."""
    time.sleep(delay_s)
    found = server.client().completions.create(
        model=NAME, prompt=prompt, temperature=0, max_tokens=COUNT, logprobs=0
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    return found.choices[0].text, logprobs.token_logprobs


def test_answers_are_the_same_whatever_else_is_in_the_batch(folder: Path) -> None:
    delays_s = [random.Random(1).uniform(0, 0.1) for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as crowd:
        with serving(folder, ROOMY) as server:
            alone = [logged(server, prompt) for prompt in PROMPTS]
            assert list(crowd.map(lambda p: logged(server, p), PROMPTS)) == alone
            assert list(crowd.map(lambda p, s: logged(server, p, s), PROMPTS, delays_s)) == alone
        with serving(folder, TIGHT) as server:
            for _ in range(2):
                assert list(crowd.map(lambda p: logged(server, p), PROMPTS)) == alone
            assert server.load.num_preemptions > 0 and server.load.num_reused_tokens > 0
