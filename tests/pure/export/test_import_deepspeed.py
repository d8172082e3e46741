"""A DeepSpeed JSON as a plan, with pins for what it lacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from export_samples import DENSE, cluster

from triptych.errors import PlanError
from triptych.export.imported import Asked, Imported
from triptych.export.read import imported_from
from triptych.plan.short import read_words

BATCH = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
}


def read(document: dict[str, Any], fix: str = "", ranks: int = 8) -> Imported:
    asked = Asked(model=DENSE, cluster=cluster(ranks), sequence_length=1024, pins=read_words(fix))
    return imported_from(json.dumps(document), "ds.json", asked)


def refusals(document: dict[str, Any], fix: str = "", ranks: int = 8) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(document, fix, ranks)
    return [str(problem) for problem in caught.value.problems]


def test_a_usual_file() -> None:
    found = read(
        BATCH
        | {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "overlap_comm": True,
                "reduce_bucket_size": 5e7,
            },
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW"},
        }
    )
    plan = found.plan
    assert (plan.dp, plan.zero, plan.microbatch, plan.offload) == (8, 3, 2, "optimizer")
    assert plan.precision.parameter == "bf16" and plan.precision.reduction == "bf16"
    assert plan.bucket_bytes == 100_000_000 and found.workload.global_batch == 64
    assert found.not_understood == ()


def test_pins_give_what_the_file_lacks() -> None:
    plan = read({"train_micro_batch_size_per_gpu": 1}, "tp=2,pp=2,recompute=full").plan
    assert (plan.tp, plan.pp, plan.dp, plan.recompute) == (2, 2, 2, "full")


def test_ranks_that_are_left_over_are_a_pipeline_or_a_question() -> None:
    sizes = BATCH | {"train_batch_size": 16}  # dp = 2 of 8 ranks
    assert read(sizes, "tp=2").plan.pp == 2
    (line,) = refusals(sizes)
    assert "leaves 4 of 8 ranks" in line and "--fix tp=4 or --fix pp=4" in line


def test_auto_is_a_gap_and_is_assumed() -> None:
    found = read({**dict.fromkeys(BATCH, "auto"), "zero_optimization": {"stage": 2}})
    assert (found.plan.microbatch, found.workload.global_batch) == (1, 8)
    assert any("one sequence a micro-batch" in line for line in found.assumed)


def test_contradictions_are_told_at_once() -> None:
    told = refusals(
        BATCH
        | {
            "train_batch_size": 63,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 5},
        }
    )
    for part in ("train_batch_size 63", "both bf16 and fp16", "stage = 5"):
        assert any(part in line for line in told), told


def test_unknown_keys_are_listed() -> None:
    found = read(BATCH | {"magic": 1, "zero_optimization": {"stage": 1, "zenflow": {"topk": 1}}})
    assert found.not_understood == (
        "magic = 1",
        'zero_optimization.zenflow = {"topk": 1}',
    )
