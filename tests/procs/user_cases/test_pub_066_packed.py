"""User case PUB-066: documents packed in one row do not see each other."""

from __future__ import annotations

import dataclasses
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import DOUBLE, make_engine, tiny_config
from packed import Answer, answer, assert_same, one_by_one, packed
from ranks import run_ranks
from tiny_runs import losses
from verbs import Ranks, job

from triptych.errors import DataError, ModelError
from triptych.plan.plan import Plan, Precision
from triptych.runtime.microbatch import MicroBatch

ROWS = ((7, 12, 5), (3, 3, 18))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 zb-v": {"pp": 2, "schedule": "zb-v", "chunks": 2},
    "recompute": {"recompute": "full"},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "TP2+SP x PP2 recompute": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
}


def _batches() -> list[MicroBatch]:
    return [packed(ROWS, 512, seed) for seed in range(4)]


@cache
def _separate(precision: Precision) -> Answer:
    alone = [document for whole in _batches() for document in one_by_one(whole)]
    return answer(Plan.uniform(4, precision=precision), tiny_config(), alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pub_066_a_packed_row_gives_the_gradients_of_its_documents(layout: str) -> None:
    plan = Plan.uniform(4, precision=DOUBLE, microbatch=2, **LAYOUTS[layout])
    assert_same(answer(plan, tiny_config(), _batches()), _separate(DOUBLE), 1e-12)


def test_pub_066_so_it_does_in_fp32_as_does_a_padded_batch() -> None:
    """Three padded rows are the same documents once more."""
    plan, expected = Plan.uniform(4), _separate(Precision())
    assert_same(answer(plan, tiny_config(), _batches()), expected, 1e-5)
    padded = [_padded(one_by_one(whole)) for whole in _batches()]
    assert_same(answer(plan, tiny_config(), padded), expected, 1e-5)


def _padded(documents: list[MicroBatch]) -> MicroBatch:
    length = max(d.input_ids.shape[1] for d in documents)
    pad = torch.nn.functional.pad
    return MicroBatch(
        torch.cat([pad(d.input_ids, (0, length - d.input_ids.shape[1])) for d in documents]),
        torch.cat([pad(d.labels, (0, length - d.labels.shape[1]), value=-100) for d in documents]),
    )


def test_pub_066_positions_alone_would_not_do() -> None:
    """Neither restarted positions under one mask, nor no borders at all, give that loss."""
    whole = packed(ROWS, 512)
    steps = torch.tensor([[p for n in row for p in range(n)] for row in ROWS])

    def body() -> list[float]:
        engine = make_engine(Plan.uniform(4), tiny_config())
        stage = engine.stages[0]
        with torch.no_grad():
            hidden = (
                stage(whole.input_ids, None, steps, documents=ROWS),
                stage(whole.input_ids, None, steps),
                stage(whole.input_ids),
            )
            return [float(stage.loss(x, whole.labels, 1.0)) for x in hidden]

    apart, shortcut, mixed = run_ranks(1, body)[0]
    assert abs(shortcut - apart) > 1e-3 * apart and abs(mixed - apart) > 1e-3 * apart


def test_pub_066_a_token_of_one_document_moves_no_logits_of_another() -> None:
    first, changed = packed(ROWS, 512).input_ids, packed(ROWS, 512).input_ids
    changed[0, 3] = (changed[0, 3] + 1) % 512  # in document 0 of row 0

    def body() -> Any:
        stage = make_engine(Plan.uniform(4), tiny_config()).stages[0]
        with torch.no_grad():
            made = [stage.local_logits(stage(ids, documents=ROWS)) for ids in (first, changed)]
        return [logits.numpy() for logits in made]

    before, after = run_ranks(1, body)[0]
    moved = (before != after).any(-1)
    assert moved[0, 3:7].all() and not moved[0, :3].any()
    assert not moved[0, 7:].any() and not moved[1].any()


def test_pub_066_documents_that_do_not_fill_their_row_are_refused() -> None:
    whole = dataclasses.replace(packed(ROWS, 512), documents=((7, 12, 4), (3, 3, 18)))
    text = run_ranks(1, _refused, tiny_config(), whole)[0]
    assert "[23, 24]" in text and "rows of 24" in text


def test_pub_066_frequencies_that_follow_the_length_of_a_row_are_refused() -> None:
    """The longest document would stretch those of the others."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    text = run_ranks(1, _refused, tiny_config(rope_parameters=rope), packed(ROWS, 512))[0]
    assert "dynamic" in text and "rows of one document" in text


def _refused(config: dict[str, Any], microbatch: MicroBatch) -> str:
    with pytest.raises((DataError, ModelError)) as error:
        make_engine(Plan.uniform(4), config).step([microbatch], 1e-3)
    return str(error.value)


def test_pub_066_a_job_keeps_documents_apart_in_every_layout_and_across_a_resume(
    ranks: Ranks, tmp_path: Path
) -> None:
    path, run = job(tmp_path), tmp_path / "run"
    for document in (tmp_path / "text").iterdir():  # short: several borders in a row
        document.write_text(document.read_text()[:40])
    settings = ("--set", "data.pack=documents", "train.steps=4", "checkpoint.every=2")
    ranks.done("train", path, "--plan", "dp=1,microbatch=2", *settings)
    whole = losses(path)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    ended = ranks.done("train", path, "--plan", "cp=2,tp=2,microbatch=2", *settings)
    assert "after step 2" in ended.err and losses(path) == pytest.approx(whole, abs=1e-5)
    shutil.rmtree(run)
    ranks.done("train", path, "--plan", "dp=1,microbatch=2", "--set", "train.steps=4")
    assert all(abs(losses(path)[step] - whole[step]) > 1e-4 for step in (2, 3))
