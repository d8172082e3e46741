"""User case pub_044: the size of buckets is a matter of speed alone."""

from __future__ import annotations

from itertools import product

import torch
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks

from triptych.plan.plan import Plan

CONFIG = tiny_config(num_hidden_layers=2, vocab_size=128)
SIZES = (1 << 10, 1 << 16, 1 << 30)
ACCUMULATIONS = ("reduce_each", "reduce_last")  # behind the backward of each, or of the last
STEPS, RUNS = 20, 5


def _weights(plan: Plan) -> dict[str, torch.Tensor]:
    # A large epsilon keeps Adam from dividing rounding noise by its own size.
    engine = make_engine(plan, CONFIG, eps=1e-2)
    for step in range(STEPS):
        rows = batch_of(step, 4, 8, CONFIG["vocab_size"])
        engine.step(split(rows, plan, engine.mesh.coordinates), 1e-2)
    return {s.name: s.tensor.clone() for s in engine.shards() if s.kind == "weight"}


def test_pub_044_parameters_do_not_depend_on_the_size_of_buckets() -> None:
    def body() -> None:
        reference: dict[str, torch.Tensor] | None = None
        for accumulation, size in product(ACCUMULATIONS, SIZES):
            plan = Plan.uniform(2, dp=2, zero=2, bucket_bytes=size, accumulation=accumulation)
            runs = [_weights(plan) for _ in range(RUNS if accumulation == "reduce_each" else 1)]
            for again in runs[1:]:
                assert all(torch.equal(again[name], runs[0][name]) for name in again), plan
            reference = reference or runs[0]
            for name, tensor in reference.items():
                torch.testing.assert_close(runs[0][name], tensor, rtol=1e-6, atol=1e-6)

    run_ranks(2, body, timeout_s=180)
