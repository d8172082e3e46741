"""The batch equation of a job: what is derived, what is refused with which remedies."""

from __future__ import annotations

import pytest

from triptych.plan.plan import Plan
from triptych.train.batch import fit_batch

PLAN = Plan.uniform(4, tp=2, dp=2)  # world 4


def refusal(**job: int | None) -> str:
    (problem,) = fit_batch(PLAN, **job)[1]  # type: ignore[arg-type]
    return str(problem)


def fitted(plan: Plan, global_batch: int, **job: int | bool) -> Plan:
    plan, problems = fit_batch(plan, global_batch, **job)  # type: ignore[arg-type]
    assert problems == []
    return plan


def test_accumulation_is_derived() -> None:
    """User case pub_007."""
    plan = fitted(PLAN, 24, microbatch=4)
    assert plan.microbatch == 4 and plan.num_microbatches(24) == 3


def test_the_micro_batch_is_derived_from_accumulation() -> None:
    plan = fitted(PLAN, 24, accumulation=3)
    assert plan.microbatch == 4


def test_an_indivisible_batch_shows_the_equation_and_the_two_nearest_batches() -> None:
    """User case pub_007."""
    text = refusal(global_batch=30, microbatch=4)
    for part in ("world=4", "TP=2", "DP=2", "30 / (microbatch 4 x DP 2) = 3.75"):
        assert part in text
    assert "global batch 24" in text and "global batch 32" in text


def test_three_numbers_that_do_not_multiply_show_the_equation_and_what_works() -> None:
    """User case pub_007."""
    text = refusal(global_batch=8, microbatch=4, accumulation=3)
    assert "microbatch 4 x DP 2 x accumulation 3 = 24, but the global batch is 8" in text
    assert "global batch 24" in text and "accumulation 1" in text


@pytest.mark.parametrize(
    "works",
    [
        {"global_batch": 24, "microbatch": 4},
        {"global_batch": 32, "microbatch": 4},
        {"global_batch": 30, "microbatch": 3},
        {"global_batch": 30, "microbatch": 5},
        {"global_batch": 24, "microbatch": 4, "accumulation": 3},
        {"global_batch": 8, "microbatch": 4, "accumulation": 1},
    ],
)
def test_the_remedies_work(works: dict[str, int]) -> None:
    """User case pub_007."""
    fitted(PLAN, **works)


def test_an_accumulation_that_leaves_no_whole_micro_batch_is_refused() -> None:
    assert "accumulation 5" in refusal(global_batch=24, accumulation=5)


def test_a_plan_that_names_its_micro_batch_wins_over_the_default() -> None:
    plan = PLAN.with_(microbatch=2)
    assert fitted(plan, 8, plan_says=True).microbatch == 2
    assert fitted(plan, 8, microbatch=2, plan_says=True).microbatch == 2


def test_job_and_plan_that_disagree_are_refused() -> None:
    (problem,) = fit_batch(PLAN.with_(microbatch=2), 8, microbatch=1, plan_says=True)[1]
    assert problem.what == "[train] microbatch = 1, but the plan says 2"
