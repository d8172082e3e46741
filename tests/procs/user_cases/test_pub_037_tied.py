"""User case PUB-037: a tied embedding on two stages with a sharded optimizer is one parameter."""

from __future__ import annotations

import pytest
from layouts import Run, assert_equal_runs, batch_of, make_engine, merge, split, tiny_config, train
from ranks import run_ranks

from triptych.plan.plan import Plan

TIED = "model.embed_tokens.weight"
ZERO = [0, 1, 2, 3]


def holders_after_each_step(plan: Plan) -> tuple[list[list[str]], bool]:
    """What differs after each of 10 steps, and whether this rank holds the embedding."""
    engine = make_engine(plan, tiny_config(tie_word_embeddings=True))
    found = []
    for step in range(10):
        rows = batch_of(step, 4, 24, 512)
        engine.step(split(rows, plan, engine.mesh.coordinates), 1e-2)
        found.append(engine.differing_replicas())
    return found, any(s.name == TIED and s.kind == "weight" for s in engine.shards())


@pytest.mark.parametrize("zero", ZERO)
def test_pub_037_all_holders_of_the_embedding_are_identical_after_each_step(zero: int) -> None:
    """First and last stage of both replicas hold it."""
    plan = Plan.uniform(4, pp=2, dp=2, zero=zero)
    answers = run_ranks(4, holders_after_each_step, plan)
    assert answers == [([[]] * 10, True)] * 4


@pytest.mark.parametrize("zero", ZERO)
def test_pub_037_ten_steps_in_fp32_equal_one_process_with_the_norm_of_one_embedding(
    zero: int,
) -> None:
    config = tiny_config(tie_word_embeddings=True)

    def body(plan: Plan) -> Run:
        return train(plan, config, steps=10, eps=1e-2)

    ours = merge(run_ranks(4, body, Plan.uniform(4, pp=2, dp=2, zero=zero, microbatch=2)))
    assert_equal_runs(ours, merge(run_ranks(1, body, Plan.uniform(4, microbatch=2))), 1e-5)
