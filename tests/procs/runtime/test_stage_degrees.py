"""Stages with degrees of their own: any such plan = one process."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import (
    DOUBLE,
    Run,
    assert_equal_runs,
    batch_of,
    make_engine,
    merge,
    strictly,
    tiny_config,
    train,
)
from ranks import run_ranks

from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.ranks import Coordinates
from triptych.plan.rules import verify
from triptych.plan.share import Share
from triptych.plan.workload import Workload
from triptych.runtime.engine import MicroBatch
from triptych.schedule.traits import TRAITS

FP32 = Precision()
SEQUENCES, LENGTH = 12, 23  # a length that nothing divides


MODELS: dict[str, dict[str, Any]] = {
    "tied": tiny_config(num_key_value_heads=4, tie_word_embeddings=True, vocab_size=503),
    "untied": tiny_config(num_key_value_heads=4),
    "experts": family_config("qwen3_moe"),
}


def plan_of(*degrees: dict[str, Any], chunks: int = 1, **settings: Any) -> Plan:
    """A plan whose pipeline ranks have the given degrees; `layers` a stage if they are uneven."""
    uniform = Plan.uniform(4, pp=len(degrees), chunks=chunks, layers=settings.pop("layers", None))
    owners = TRAITS[settings.get("schedule", "1f1b")].ranks_of_stages(len(degrees), chunks)
    stages = zip(uniform.stages, owners, strict=True)
    own = tuple(replace(stage, **degrees[owner]) for stage, owner in stages)
    return Plan(stages=own, chunks=chunks, **settings)


ONE: dict[str, Any] = {}
TP2, TP3, DP2, DP3, DP4 = {"tensor": 2}, {"tensor": 3}, {"data": 2}, {"data": 3}, {"data": 4}
CP2, EP2, BOTH = {"context": 2}, {"expert": 2}, {"tensor": 2, "data": 2}
SP = {"sequence_parallel": True}
LAYOUTS: dict[str, Plan] = {
    "TP2|DP2": plan_of(TP2, DP2, microbatch=4),
    "DP2|TP2 ZeRO-1": plan_of(DP2, TP2, microbatch=2, zero=1),
    "TP2+SP|DP2 ZeRO-2": plan_of(TP2, DP2, microbatch=2, zero=2, **SP),
    "TP2|DP2 ZeRO-3, uneven layers": plan_of(TP2, DP2, microbatch=6, zero=3, layers=(3, 1)),
    "DP4|TP2xDP2 ZeRO-3": plan_of(DP4, BOTH, microbatch=1, zero=3),
    "DP4|TP2xDP2+SP, hybrid shards": plan_of(DP4, BOTH, zero=1, hybrid_shard=2, **SP),
    "1|TP2": plan_of(ONE, TP2, microbatch=3),
    "TP3+SP|1 GPipe": plan_of(TP3, ONE, microbatch=4, schedule="gpipe", **SP),
    "TP3|DP3 ZeRO-3, small buckets": plan_of(TP3, DP3, microbatch=3, zero=3, bucket_bytes=20_000),
    "TP2|TP2|DP2 ZeRO-2": plan_of(TP2, TP2, DP2, microbatch=2, zero=2),
    "DP3|1|TP2 recompute": plan_of(DP3, ONE, TP2, recompute="full"),
    "CP2|TP2": plan_of(CP2, TP2, microbatch=3),
    "CP2xTP2+SP|DP2 ZeRO-1": plan_of(CP2 | TP2, DP2, microbatch=2, zero=1, **SP),
    "DP2|TP2+SP ZB-H1": plan_of(DP2, TP2, schedule="zb-h1", **SP),
    "TP2|DP2 interleaved ZeRO-1": plan_of(
        TP2, DP2, microbatch=2, chunks=2, schedule="interleaved", zero=1
    ),
    "TP2|DP3 ZB-V ZeRO-3": plan_of(TP2, DP3, microbatch=3, chunks=2, schedule="zb-v", zero=3),
    "TP2|DP2 on devices of their own": plan_of(
        TP2 | {"devices": (1, 2)}, DP2 | {"devices": (0, 3)}, microbatch=4
    ),
    "PP2 on devices of their own": plan_of({"devices": (1,)}, {"devices": (0,)}, microbatch=4),
}
EXPERTS: dict[str, Plan] = {
    "EP2|TP2 ZeRO-3": plan_of(DP2 | EP2, TP2, microbatch=2, zero=3),
    "DP2|EP4xDP4 ZeRO-1": plan_of(DP2, DP4 | {"expert": 4}, microbatch=2, zero=1),
    "DP4xEP2|EP2": plan_of(DP4 | EP2, DP2 | EP2, microbatch=1),
}
DRAWN = 8


def _draw(generator: random.Random) -> Plan:
    """A legal plan of at most 8 ranks whose stages differ."""
    model = from_config(MODELS["tied"], name="tiny")
    work = Workload(sequence_length=24, global_batch=SEQUENCES)
    while True:
        schedule = generator.choice(list(TRAITS))
        degrees = [
            {
                "tensor": generator.choice((1, 2, 3)),
                "data": generator.choice((1, 2, 3)),
                "context": generator.choice((1, 1, 2)),
            }
            for _ in range(generator.choice((2, 2, 3)))
        ]
        chunks = TRAITS[schedule].least_chunks
        if len(degrees) * chunks > 4:
            continue
        plan = plan_of(
            *degrees,
            chunks=chunks,
            schedule=schedule,
            zero=generator.choice((0, 1, 2, 3)),
            microbatch=generator.choice((1, 2, 3)),
            sequence_parallel=generator.random() < 0.5,
            recompute=generator.choice(("none", "full")),
            bucket_bytes=generator.choice((20_000, 1 << 25)),
        )
        ends = len({stage.num_devices for stage in plan.stages})
        if plan.world_size <= 8 and ends > 1 and not verify(plan, model, None, work):
            return plan


def _drawn() -> dict[str, Plan]:
    generator = random.Random(7)
    return {plan.short(): plan for plan in (_draw(generator) for _ in range(DRAWN))}


UNTIED = ("TP2+SP|DP2 ZeRO-2", "TP2|DP3 ZB-V ZeRO-3", "CP2|TP2")
LAYOUTS |= EXPERTS | _drawn()


@cache
def _reference(model: str, double: bool) -> Run:
    return merge(_train(Plan.uniform(4, microbatch=12), model, double))


def _train(plan: Plan, model: str, double: bool) -> list[Run]:
    plan = plan.with_(precision=DOUBLE if double else FP32)
    config = MODELS[model]
    settings = {"clip_norm": 0.0 if double else 0.5, "eps": 1e-2}

    def body() -> Run:
        return train(plan, config, sequences=SEQUENCES, length=LENGTH, **settings)

    return run_ranks(plan.world_size, body)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("layout", "model", "double"),
    [
        *((layout, "tied", True) for layout in LAYOUTS if layout not in EXPERTS),
        *((layout, "experts", True) for layout in EXPERTS),
        *((layout, "untied", True) for layout in UNTIED),
        *((layout, "tied", False) for layout in ("TP2|DP2", "DP4|TP2xDP2 ZeRO-3")),
    ],
)
def test_stages_with_their_own_degrees_equal_one_process(
    layout: str, model: str, double: bool
) -> None:
    """User case pub_037: the copies of a tied table are divided differently, too."""
    run = merge(_train(LAYOUTS[layout], model, double))
    assert_equal_runs(run, _reference(model, double), 1e-12 if double else 1e-5)


# ---- what else a run does ----------------------------------------------------------------------

LENGTHS = (5, 64, 17, 33, 8, 50)
HIDDEN_BYTES = 64 * 8


def _rounds(plan: Plan, at: Coordinates, seed: int) -> list[MicroBatch]:
    """This rank's rows of micro-batches of four sequences, each micro-batch with its own length."""
    shares = Share.of(plan, at).chunks(4 * len(LENGTHS))
    batches = [batch_of(seed + i, 4, length, 503) for i, length in enumerate(LENGTHS)]
    rows = [row for batch in batches for row in batch]
    return [
        MicroBatch(*(torch.stack([rows[place][which] for place in share]) for which in (0, 1)))
        for share in shares
    ]


def _everything(plan: Plan) -> dict[str, Any]:
    """What one rank sees of micro-batches of other lengths, evaluation, replicas, timeline."""
    engine = make_engine(plan, MODELS["tied"])
    at = engine.mesh.coordinates
    found: dict[str, Any] = {"at": at, "losses": [], "sent": []}
    for step, seed in enumerate((0, 10)):
        strictly(step)
        prepared, tokens = engine._prepare(_rounds(plan, at, seed))
        engine.buckets.begin_step()
        engine.mesh.counters.reset()
        losses = engine._interpreter.run(engine._actions(len(prepared)), prepared, 1.0)
        engine.buckets.finish()
        found["losses"].append(None if losses is None or at.tp else losses.tolist())
        found["sent"].append(engine.mesh.counters.axis("pipeline").bytes_sent)
        found["tokens"] = tokens
    found["evaluated"] = engine.evaluate(_rounds(plan, at, 0))
    engine.step(_rounds(plan, at, 0), 1e-2)
    found["ranks"] = engine.timeline().num_ranks
    found["differing"] = engine.differing_replicas()
    if engine.mesh.rank == 0:  # the first of the ranks that hold the first rows of the table
        name = "model.embed_tokens.weight"
        table = next(s for s in engine.shards() if s.name == name and s.kind == "weight")
        table.tensor.view(torch.int64)[0, 0] ^= 1
    found["flipped"] = engine.differing_replicas()
    return found


def test_pub_035_micro_batches_of_other_lengths_evaluation_replicas_and_bytes() -> None:
    plan = plan_of(TP2, DP2, microbatch=4, precision=DOUBLE)
    alone = run_ranks(1, _everything, Plan.uniform(4, microbatch=4, precision=DOUBLE))[0]
    ranks = run_ranks(4, _everything, plan)
    for step, expected in enumerate(alone["losses"]):
        parts = [rank["losses"][step] for rank in ranks if rank["losses"][step] is not None]
        ours = torch.tensor(parts, dtype=torch.float64).sum(0)
        theirs = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-12)
        assert rank["differing"] == [] and rank["at"].pp == (ranks.index(rank) > 1)
        assert rank["flipped"] == ["model.embed_tokens.weight: ranks [0] differ from ranks [2, 3]"]
    assert ranks[0]["ranks"] == 2
    slices_bytes = 4 * sum(LENGTHS) * HIDDEN_BYTES  # of all micro-batches, in one direction
    for rank in ranks:  # each slice is sent once: half of it by each rank of a stage
        assert rank["sent"] == [slices_bytes // 2] * 2
