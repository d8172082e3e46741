"""What saves cost the training: how long its thread is blocked, as a share of a step.

A run of a small model under the launcher, with a checkpoint every few steps: once written beside
the training, once before the step goes on. A rank counts the seconds that it spends in saves; they
are set against the median step without a save. `with a save` is the whole step that a save falls
into, writing in the background included, on the same cores.

    python benchmarks/save_stall.py [--hidden 512] [--every 4] [--steps 24] [--json]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [
    str(_TESTS / part) for part in ("procs/train", "procs/user_cases", "pure/train", "procs")
]

from job_samples import write_job  # noqa: E402
from tiny_runs import metrics, run_job  # noqa: E402

import triptych.train.checkpoints as module  # noqa: E402
from sides.options import read_options  # noqa: E402
from sides.rows import ratio_row, show  # noqa: E402
from triptych.train import worker  # noqa: E402
from triptych.train.result import Position, Summary  # noqa: E402


def timed(folder: str) -> Summary:
    """A rank that writes down how long each save kept it."""
    whole = module.Checkpoints.save
    blocked: list[float] = []

    def save(self: Any, position: Position, *args: Any, **options: Any) -> None:
        before_s = self.blocked_s
        whole(self, position, *args, **options)
        if not options.get("waits"):
            blocked.append(self.blocked_s - before_s)
            Path(folder, f"blocked-{os.environ['RANK']}.json").write_text(json.dumps(blocked))

    module.Checkpoints.save = save  # type: ignore[method-assign]
    return worker.run_rank(folder)


def blocked_and_step(folder: Path, options: Any, asynchronous: bool) -> tuple[float, float]:
    """Median seconds of a save on the slowest rank, and of a step without one."""
    path = write_job(folder)
    text = path.read_text().replace("hidden_size = 64", f"hidden_size = {options.hidden}")
    text = text.replace("intermediate_size = 160", f"intermediate_size = {options.hidden * 3}")
    path.write_text(text)
    run_job(
        path,
        "parallel.plan=dp=2,zero=1",
        f"train.steps={options.steps}",
        f"data.sequence_length={options.length}",
        f"checkpoint.every={options.every}",
        f"checkpoint.asynchronous={str(asynchronous).lower()}",
        entry=timed,
    )
    saves = [json.loads(file.read_text()) for file in (folder / "run").glob("blocked-*.json")]
    later = [max(of_ranks) for of_ranks in list(zip(*saves, strict=True))[1:]]  # buffers are there
    steps = [line for line in metrics(path) if "loss" in line][2:]
    plain = [s["step_time_s"] for s in steps if (s["step"] - 1) % options.every]
    return statistics.median(later), statistics.median(plain)


def main() -> None:
    options = read_options(__doc__, hidden=512, length=128, every=4, steps=24)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for asynchronous in (True, False):
            blocked_s, step_s = blocked_and_step(
                Path(folder) / str(asynchronous), options, asynchronous
            )
            claim = "blocked by a save " + ("beside" if asynchronous else "before the next step")
            rows.append(ratio_row(claim, "a step without a save", "s", [(blocked_s, step_s)]))
    show(rows, options.json)


if __name__ == "__main__":
    main()
