"""The bubble that a run records, on stages that only sleep, beside the published one.

Four pipeline ranks, eight micro-batches; F, I and W last one unit each (a full backward two).
Nothing computes, so that even two cores show what the schedule does. A unit is long beside the
milliseconds that a message between processes costs here: they are no bubble of the schedule.

    python benchmarks/recorded_bubble.py [--unit-s 0.3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import time
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from triptych.plan.plan import Plan
from triptych.plan.ranks import placement
from triptych.runtime.build.stage import StageModule
from triptych.runtime.mesh import Mesh
from triptych.runtime.pipeline.channels import Channels
from triptych.runtime.pipeline.interpreter import Interpreter, MicroBatch
from triptych.runtime.record import Mark, Recorder
from triptych.runtime.tensor.linear import Deferral
from triptych.schedule.generate import build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.timeline import Span, Timeline

RANKS, MICROBATCHES = 4, 8
PUBLISHED = {"1f1b": 3 / 11, "interleaved": 3 / 19, "zb-h1": 1 / 9, "zb-v": 0.0}
CHUNKS = {"interleaved": 2, "zb-v": 2}
ZB_V_WALL = 25.5 / 24


class _Sleep(torch.autograd.Function):
    """Sleeps for an input gradient and leaves the weight gradient to the deferral."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: SleepingStage) -> torch.Tensor:
        ctx.stage = stage
        time.sleep(stage.unit_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        stage: SleepingStage = ctx.stage
        time.sleep(stage.unit_s)
        stage.deferral.take(stage, grads[0], grads[0])
        return grads[0], None


class SleepingStage(torch.nn.Module):
    """A stage whose F, I and W last one unit each; it is its own gradient sink."""

    def __init__(self, index: int, is_last: bool, unit_s: float, deferral: Deferral) -> None:
        super().__init__()
        self.index, self.is_last = index, is_last
        self.unit_s, self.deferral = unit_s, deferral

    def forward(
        self, ids: torch.Tensor, received: torch.Tensor | None, *_: object, **__: object
    ) -> torch.Tensor:
        """Sleeps."""
        x = torch.ones(1, 1, 1, requires_grad=True) if received is None else received
        return cast(torch.Tensor, _Sleep.apply(x, self))

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """A scalar to start the backward from."""
        return hidden.sum()

    def add_product(self, grad: torch.Tensor, inputs: torch.Tensor) -> None:
        """Sleeps for a weight gradient."""
        time.sleep(self.unit_s)

    def arrive(self) -> None:
        """Nothing waits for it."""


def run(plan: Plan, unit_s: float) -> tuple[float, list[Mark]]:
    """When this rank's second step began, and its spans."""
    mesh = Mesh.create(plan)
    deferral, recorder = Deferral(), Recorder(mesh.device)
    last = len(plan.stages) - 1
    stages = {
        index: cast(StageModule, SleepingStage(index, index == last, unit_s, deferral))
        for index, rank in enumerate(placement(plan))
        if rank == mesh.coordinates.pp
    }
    interpreter = Interpreter(
        stages,
        channels=Channels(mesh),
        deferral=deferral,
        recorder=recorder,
        dtype=torch.float32,
        hidden=1,
        sequence_split=1,
    )
    program = with_communication(build_program(plan.schedule, RANKS, MICROBATCHES, plan.chunks))
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(2):
        mesh.world.all_reduce(torch.zeros(1))
        recorder.begin()
        interpreter.run(program.actions[mesh.rank], [MicroBatch(ids, ids)] * MICROBATCHES, 1.0)
    return recorder.origin_s, [mark for mark in recorder.marks() if mark.label[0].isdigit()]


def record(plan: Plan, unit_s: float) -> Timeline:
    """The timeline of forked ranks under a plan."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                store = dist.FileStore(f"{folder}/store", RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
                with open(f"{folder}/{rank}", "wb") as file:
                    pickle.dump(run(plan, unit_s), file)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        answers = []
        for rank in range(RANKS):
            with open(f"{folder}/{rank}", "rb") as file:
                answers.append(pickle.load(file))
    origin_s = min(begun_s for begun_s, _ in answers)
    spans = [
        Span(rank, m.label, m.start_s + begun_s - origin_s, m.end_s + begun_s - origin_s)
        for rank, (begun_s, marks) in enumerate(answers)
        for m in marks
    ]
    return Timeline(spans=tuple(spans), num_ranks=RANKS)


def idle_inside(timeline: Timeline) -> float:
    """The largest share of a rank's own span, first to last action, in which it is idle."""
    shares = []
    for rank in range(RANKS):
        mine = [span for span in timeline.spans if span.rank == rank]
        width_s = max(s.end_s for s in mine) - min(s.start_s for s in mine)
        shares.append(1 - sum(s.duration_s for s in mine) / width_s)
    return max(shares)


def rows(unit_s: float) -> list[dict[str, Any]]:
    """Recorded beside published, by schedule."""
    found = []
    for schedule, published in PUBLISHED.items():
        chunks = CHUNKS.get(schedule, 1)
        plan = Plan.uniform(RANKS * chunks, pp=RANKS, schedule=schedule, chunks=chunks)
        timeline = record(plan, unit_s / chunks)
        ideal_s = sum(span.duration_s for span in timeline.spans) / RANKS
        if schedule == "zb-v":
            found.append(_row(schedule, "idle inside a rank's span", idle_inside(timeline), 0.0))
            wall = timeline.makespan_s / ideal_s
            found.append(_row(schedule, "wall / ideal", wall, ZB_V_WALL))
        else:
            found.append(_row(schedule, "bubble rate", timeline.bubble_fraction, published))
    return found


def _row(schedule: str, metric: str, ours: float, theirs: float) -> dict[str, Any]:
    return {
        "claim": f"{schedule}, p={RANKS}, m={MICROBATCHES}",
        "peer": "published",
        "metric": metric,
        "ours": ours,
        "theirs": theirs,
        "ratio": ours / theirs if theirs else None,
        "better": "lower",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-s", type=float, default=0.3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = rows(options.unit_s)
    if options.json:
        print(json.dumps({"rows": found}))
        return
    for row in found:
        print(
            f"{row['claim']:24} {row['metric']:28} {row['ours']:.4f}  published {row['theirs']:.4f}"
        )


if __name__ == "__main__":
    main()
