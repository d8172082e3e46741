"""Every family under every division: the stock library's greedy tokens, whatever happens beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_samples import UNEVEN, family_config
from ranks import run_ranks
from serve_samples import byte_tokenizer, config_of, save_model
from served import random_prompts, serve

from triptych.plan.plan import Plan
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.values import Ask

KNOWN, COUNT, LONGEST = byte_tokenizer().get_vocab_size(), 6, 40
TIGHT = EngineSettings(max_running=8, token_budget=40, num_blocks=8, growth_tokens=0)
"""Prompts come in chunks beside decodes, sequences are preempted, prefixes are found again."""
PLANS = ({}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"tp": 2, "pp": 2})
OURS = ("mistral", "qwen2")
CASES = [(family, plan) for family in (*UNEVEN, *OURS) for plan in range(len(PLANS))]


def _config(family: str) -> dict[str, Any]:
    if family in OURS:
        return config_of(family)
    return family_config(family, uneven=True) | {"eos_token_id": None, "bos_token_id": None}


def stock_choices(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The stock library's greedy token at each place of an answer, given those before it: equal to
    the answer if and only if this is what it would have said by itself.
    """
    with torch.no_grad():
        ids = torch.tensor([prompt + answer[:-1]])
        logits_LV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :, :KNOWN]
    return logits_LV.argmax(dim=1).tolist()


@pytest.mark.sweep(16)  # another family and another division each time
@pytest.mark.parametrize(("family", "plan"), CASES)
def test_64_prompts_give_the_stock_tokens(tmp_path: Path, family: str, plan: int) -> None:
    model = save_model(tmp_path, _config(family))
    prompts = random_prompts(64, LONGEST, KNOWN, seed=plan)
    asks = [Ask(id=i, prompt=prompt, max_tokens=COUNT) for i, prompt in enumerate(prompts)]
    degrees = Plan.uniform(4, **PLANS[plan])
    served = run_ranks(degrees.world_size, serve, tmp_path, degrees, TIGHT, asks, plan)[0]
    for number, prompt in enumerate(prompts):
        answer = served.tokens[number, 0]
        assert (len(answer), answer) == (COUNT, stock_choices(model, prompt, answer))
    assert served.load.num_preemptions > 0 and served.load.num_reused_tokens > 0
