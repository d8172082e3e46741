"""User case pub_022: a run states the dtypes that its tensors have, not those that were asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import step_folder
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks
from tiny_runs import metrics
from verbs import Ranks, job

from triptych.checkpoint.folder import STATE
from triptych.plan.plan import Plan, Precision
from triptych.runtime.engine import Engine
from triptych.runtime.tensor.linear import Linear
from triptych.train.startup import built, show_startup

CONFIG = tiny_config(num_hidden_layers=2)
PURE = Precision(parameter="bf16", gradient="bf16", reduction="bf16", master="bf16", moments="bf16")
PRECISIONS = {
    "fp32": Precision(),
    "bf16 mixed": Precision.mixed(),
    "pure bf16": PURE,
    "fp16, reduced in bf16": Precision(parameter="fp16", reduction="bf16"),
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Seen:
    """Dtypes as a step shows them: of products, and of what is sent for gradients."""

    def __init__(self, engine: Engine) -> None:
        self.compute: set[torch.dtype] = set()
        self.reduction: set[torch.dtype] = set()
        self._engine = engine
        for module in engine.stages[0].modules():
            if isinstance(module, Linear):
                module.register_forward_hook(lambda _, __, y: self.compute.add(y.dtype))

    def step(self) -> None:
        engine = self._engine
        engine.gradients(self._microbatches())  # its forward and backward exchange activations
        for bucket in engine.buckets.buckets:
            axes = (engine.mesh.shard, engine.mesh.replicas, bucket.before)
            for comm in (axis for axis in axes if axis is not None and axis.size > 1):
                self._watch(comm)
        for bucket in engine.buckets.buckets:
            bucket.begin_step()
            bucket.start_reduce()
            bucket.finish_own()
            bucket.finish_reduce()

    def _watch(self, comm: Any) -> None:
        for name in ("start_reduce_scatter", "start_all_reduce"):
            call = getattr(comm, name)

            def note(tensor: torch.Tensor, *args: Any, _call: Any = call, **options: Any) -> Any:
                self.reduction.add(tensor.dtype)
                return _call(tensor, *args, **options)

            setattr(comm, name, note)

    def _microbatches(self) -> Any:
        rows = batch_of(0, 2, 16, CONFIG["vocab_size"])
        return split(rows, self._engine.plan, self._engine.mesh.coordinates.dp)


def _inspected(engine: Engine) -> dict[str, str]:
    seen = _Seen(engine)
    seen.step()
    kinds = {shard.kind: shard.tensor.dtype for shard in engine.shards()}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"]
    (compute,), (reduction,) = seen.compute, seen.reduction
    found = {
        "parameter": kinds["weight"],
        "compute": compute,
        "gradient": engine.optimizer.pieces[0].gradient.dtype,
        "reduction": reduction,
        "master": kinds.get("master", kinds["weight"]),
        "moments": kinds["exp_avg"],
    }
    return {kind: NAMES[dtype] for kind, dtype in found.items()}


def _asked(precision: Precision) -> dict[str, str]:
    kinds = ("parameter", "gradient", "reduction", "master", "moments")
    return {kind: getattr(precision, kind) for kind in kinds} | {"compute": precision.parameter}


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_pub_022_what_is_shown_at_start_is_what_the_tensors_are(settings: dict[str, Any]) -> None:
    def body() -> None:
        for precision in PRECISIONS.values():
            engine = make_engine(Plan.uniform(2, precision=precision, **settings), CONFIG)
            lines = show_startup(engine.plan, engine.model, built(engine))
            (line,) = (text for text in lines if text.startswith("dtypes: "))
            shown = dict(word.split(" ") for word in line.removeprefix("dtypes: ").split(", "))
            assert shown == _inspected(engine) == _asked(precision)
            warnings = [text for text in lines if text.startswith("warning: ")]
            assert bool(warnings) == (precision is PURE)
            assert all("master" in text and "fp32" in text for text in warnings)

    run_ranks(2, body)


def test_pub_022_a_job_in_fp16_shows_its_dtypes_and_keeps_its_loss_scale(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = job(tmp_path)
    settings = ('parallel.precision="fp16"', "checkpoint.every=2")
    ended = ranks.done("train", path, "--plan", "dp=2,zero=1", "--set", "train.steps=2", *settings)
    assert "dtypes: parameter fp16, compute fp16, gradient fp32, reduction fp32" in ended.err
    state = step_folder(tmp_path / "run", 2) / STATE
    kept = json.loads(state.read_text())
    assert kept["scaling"] == {"loss_scale": 2.0**16, "good_steps": 2.0, "skipped_steps": 0.0}
    ended = ranks.done("train", path, "--plan", "dp=2,zero=1", "--set", "train.steps=4", *settings)
    assert "after step 2" in ended.err
    steps = [line for line in metrics(path) if "loss" in line]
    assert [line["loss_scale"] for line in steps] == [2.0**16] * 4
    assert json.loads((step_folder(tmp_path / "run", 4) / STATE).read_text())["scaling"] == {
        **kept["scaling"],
        "good_steps": 4.0,
    }
