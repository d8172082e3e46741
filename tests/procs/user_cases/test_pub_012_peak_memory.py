"""User case pub_012: the predicted peak holds logits, activations, buffers and temporary copies."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile, record_function

from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict
from triptych.model.hf import from_config
from triptych.plan.plan import Plan
from triptych.plan.workload import Workload
from triptych.report.advice import memory_advice
from triptych.units import GIB

SEQUENCES = 2
LOGITS = tiny_config(vocab_size=131072, num_hidden_layers=2, max_position_embeddings=512)
ACTIVATIONS = tiny_config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_key_value_heads=8,
    max_position_embeddings=1024,
)


def measured_bytes(config: dict[str, Any], plan: Plan) -> int:
    """The most bytes of tensors in the third step, by the allocator's own events."""

    def body() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            engine = make_engine(plan, config)
            rows = batch_of(0, SEQUENCES, config["max_position_embeddings"], config["vocab_size"])
            microbatches = split(rows, plan, engine.mesh.coordinates)
            engine.step(microbatches, 1e-3), engine.step(microbatches, 1e-3)
            with record_function("third"):
                engine.step(microbatches, 1e-3)
        events: Any = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
        (mark,) = (event for event in events if event.name() == "third")
        end_ns = mark.start_ns() + mark.duration_ns()
        live, peak = 0, 0
        changes = (event for event in events if event.name() == "[memory]")
        for event in sorted(changes, key=lambda event: event.start_ns()):
            live += event.nbytes()
            if mark.start_ns() <= event.start_ns() <= end_ns:
                peak = max(peak, live)
        return peak

    return run_ranks(1, body)[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("config", "main", "cure"),
    [(LOGITS, "logits", "chunks of tokens"), (ACTIVATIONS, "activations", "recompute=full")],
    ids=["logits", "activations"],
)
def test_the_peak_is_predicted_and_its_main_term_has_a_cure(
    config: dict[str, Any], main: str, cure: str, recompute: str
) -> None:
    plan = Plan.uniform(config["num_hidden_layers"], recompute=recompute)
    work = Workload(sequence_length=config["max_position_embeddings"], global_batch=SEQUENCES)
    found = predict(from_config(config, "tiny"), parse_cluster("1x1xcpu"), work, plan)
    tensors_bytes = (found.peak_memory_gib - found.memory_gib["overhead"]) * GIB
    assert tensors_bytes == pytest.approx(measured_bytes(config, plan), rel=0.15)
    if recompute == "none":
        advice = memory_advice(found.to_json())
        assert advice.startswith(f"most of it: {main}, ") and cure in advice
