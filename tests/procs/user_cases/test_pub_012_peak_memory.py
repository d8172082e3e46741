"""User case pub_012: the predicted peak holds logits, activations, buffers and temporary copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from layouts import batch_of, make_engine, split, tiny_config
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


CONFIGS = {"logits": LOGITS, "activations": ACTIVATIONS}


def _peak_bytes(config: dict[str, Any], recompute: str) -> int:
    """The most bytes of tensors in the second step, by the allocator's own events."""
    plan = Plan.uniform(config["num_hidden_layers"], recompute=recompute)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine = make_engine(plan, config)
        rows = batch_of(0, SEQUENCES, config["max_position_embeddings"], config["vocab_size"])
        microbatches = split(rows, plan, engine.mesh.coordinates)
        engine.step(microbatches, 1e-3)
        with record_function("second"):
            engine.step(microbatches, 1e-3)
    events: Any = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    (mark,) = (event for event in events if event.name() == "second")
    end_ns = mark.start_ns() + mark.duration_ns()
    live, peak = 0, 0
    changes = (event for event in events if event.name() == "[memory]")
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if mark.start_ns() <= event.start_ns() <= end_ns:
            peak = max(peak, live)
    return peak


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """Peaks by case, from a process of their own: the profiler does not survive a fork."""
    found = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(found.stdout.splitlines()[-1]))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("main", "cure"), [("logits", "chunks of tokens"), ("activations", "recompute=full")]
)
def test_the_peak_is_predicted_and_its_main_term_has_a_cure(
    measured: dict[str, int], main: str, cure: str, recompute: str
) -> None:
    config = CONFIGS[main]
    plan = Plan.uniform(config["num_hidden_layers"], recompute=recompute)
    work = Workload(sequence_length=config["max_position_embeddings"], global_batch=SEQUENCES)
    found = predict(from_config(config, "tiny"), parse_cluster("1x1xcpu"), work, plan)
    tensors_bytes = (found.peak_memory_gib - found.memory_gib["overhead"]) * GIB
    assert tensors_bytes == pytest.approx(measured[f"{main} {recompute}"], rel=0.15)
    if recompute == "none":
        advice = memory_advice(found.to_json())
        assert advice.startswith(f"most of it: {main}, ") and cure in advice


if __name__ == "__main__":
    peaks = {
        f"{name} {recompute}": _peak_bytes(config, recompute)
        for name, config in CONFIGS.items()
        for recompute in ("none", "full")
    }
    print(json.dumps(peaks))
