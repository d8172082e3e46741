"""User case PUB-080: sliding windows stay windows over context, tensor and pipeline ranks.

The plain reference is the stock library with eager attention and the mask that it makes itself.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_samples import family_config
from layouts import batch_of, make_engine
from packed import Answer, answer, assert_same
from ranks import STRICT, run_ranks
from serve_samples import config_of, save_model
from stepwise import logits_in_pieces
from verbs import Ranks

from triptych.plan.families import FAMILIES
from triptych.plan.plan import Plan, Precision
from triptych.runtime.microbatch import MicroBatch, own_tokens

WINDOW, LENGTH, VOCAB = 8, 64, 512
EVERY_OTHER = {
    "model_type": "qwen3",
    "head_dim": 16,
    "num_key_value_heads": 4,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "CP2": {"cp": 2},
    "CP4": {"cp": 4},
    "CP4 ulysses": {"cp": 4, "context_method": "ulysses"},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "CP2 x TP2 x PP2": {"cp": 2, "tp": 2, "pp": 2},
}


def _config() -> dict[str, Any]:
    return family_config("qwen3") | EVERY_OTHER | {"max_position_embeddings": LENGTH}


def _batch() -> MicroBatch:
    rows = batch_of(0, 2, LENGTH, VOCAB)
    return MicroBatch(*(torch.stack([row[i] for row in rows]) for i in (0, 1)))


def _stock() -> transformers.PreTrainedModel:
    """The stock library with our first weights."""
    slots = make_engine(Plan.uniform(4), _config()).buckets.slots
    settings = {k: v for k, v in copy.deepcopy(_config()).items() if k != "model_type"}
    hf_config = transformers.AutoConfig.for_model("qwen3", **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    values = {slot.name: slot.value for slot in slots}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[FAMILIES["qwen3"].logical_name(name)])
    return model  # type: ignore[no-any-return]


def _reference() -> tuple[float, dict[str, Any]]:
    model, batch = _stock(), _batch()
    logits = model(input_ids=batch.input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    name = FAMILIES["qwen3"].logical_name
    return float(loss.detach()), {
        name(key): p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None
    }


@cache
def _expected() -> Answer:
    loss, gradients = run_ranks(1, _reference)[0]
    tokens = int((_batch().labels != -100).sum())
    return Answer(loss, tokens, {name: torch.from_numpy(g) for name, g in gradients.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pub_080_windows_on_every_other_layer_equal_the_stock_library(layout: str) -> None:
    plan = Plan.uniform(4, microbatch=2, **LAYOUTS[layout])
    assert_same(answer(plan, _config(), [_batch()]), _expected(), 1e-5)


def _hidden(plan: Plan, layers: int, ids: torch.Tensor) -> Any:
    """Hidden states of one sequence behind windowed layers only, at this rank's places."""
    windowed = {"num_hidden_layers": layers, "layer_types": ["sliding_attention"] * layers}
    engine = make_engine(plan, _config() | windowed)
    mine = own_tokens(MicroBatch(ids, ids), plan, engine.mesh.coordinates)
    places = torch.arange(LENGTH)[None] if mine.positions is None else mine.positions
    with torch.no_grad():
        return places[0].numpy(), engine.stages[0](mine.input_ids, None, mine.positions).numpy()


@pytest.mark.parametrize("split", [{}, {"cp": 4}, {"cp": 4, "context_method": "ulysses"}])
def test_pub_080_a_distant_change_does_not_pass_windowed_layers(split: dict[str, Any]) -> None:
    """Two layers of window 8 reach 14 tokens back: a change 20 back moves nothing."""
    plan = Plan.uniform(2, **split)
    ids = _batch().input_ids[:1]
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % VOCAB
    before, after = (run_ranks(plan.world_size, _hidden, plan, 2, x) for x in (ids, other))
    moved = torch.zeros(LENGTH, dtype=torch.bool)
    for (places, old), (_, new) in zip(before, after, strict=True):
        moved[torch.from_numpy(places)] = torch.from_numpy((old != new).any(-1)[0])
    assert moved.nonzero().flatten().tolist() == list(range(20, 35))


def _served(folder: Path, plan: Plan, ids: list[int]) -> Any:
    """The logits after the last token: all at once, and the second half token by token."""
    half = len(ids) // 2
    cuts = [len(ids)], [half, *[1] * (len(ids) - half)]
    once, stepwise = (logits_in_pieces(folder, plan, ids, sizes, STRICT) for sizes in cuts)
    return None if once is None or stepwise is None else (once, stepwise)


@pytest.mark.parametrize("layout", ["one process", "TP2", "PP2"])
def test_pub_080_serving_with_a_cache_keeps_the_windows(layout: str, tmp_path: Path) -> None:
    """Two layers of window 8: what lies 20 tokens back has no effect, what lies 5 back has."""
    save_model(tmp_path, config_of("mistral", num_hidden_layers=2, sliding_window=WINDOW))
    plan = Plan.uniform(2, precision=Precision(), **LAYOUTS[layout])
    ids = [7 * place % 311 for place in range(40)]
    expected = _stock_logits(tmp_path, ids)
    for back, moves in ((None, False), (20, False), (5, True)):
        changed = [(t + (place == 40 - (back or 99))) % 311 for place, t in enumerate(ids)]
        answers = [found for found in run_ranks(plan.world_size, _served, tmp_path, plan, changed)]
        for once, stepwise in filter(None, answers):
            assert abs(once - stepwise).max() < 1e-5 * abs(expected).max()
            assert (abs(once - expected).max() > 1e-3) == moves


def _stock_logits(folder: Path, ids: list[int]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()


def test_pub_080_verify_finds_windows_and_bent_scores_equal_to_one_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(family_config("gemma2")))
    plan = ("--plan", "cp=2,tp=2", "--seq", "32", "--batch", "2", "--steps", "1")
    assert "\nthe same as one process, to 1e-10" in ranks.done("verify", path, *plan).out
