"""A run that goes on under another plan: are its losses and samples those of the unbroken run?

Twelve pairs of plans; within a pair every degree that changes is one of data, tensor, pipeline,
context and expert parallelism or the ZeRO stage. The first plan runs to the end with a checkpoint
half way; what is later is removed, and the second plan goes on. Losses are compared with a run of
one process, step by step, and the rows of tokens that each step trained on with those of that run.

    python benchmarks/resume_pairs.py [--only ep=2] [--json]
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [
    str(_TESTS / part) for part in ("procs/train", "procs/user_cases", "pure/train", "procs")
]

import row_digests  # noqa: E402
from checkpoints import keep_only  # noqa: E402
from tiny_runs import losses, run_job  # noqa: E402
from verbs import job  # noqa: E402

from sides.options import read_options  # noqa: E402
from sides.rows import show  # noqa: E402

DENSE, EXPERTS = "llama", "mixtral"
PAIRS = (
    (DENSE, "dp=4", "tp=4"),
    (DENSE, "tp=2,pp=2", "dp=4,zero=1"),
    (DENSE, "tp=2,pp=2", "tp=1,pp=4"),
    (DENSE, "dp=4,zero=3", "pp=2,tp=2"),
    (DENSE, "dp=4,zero=1", "dp=2,zero=3"),
    (DENSE, "dp=2,zero=2", "dp=1"),
    (DENSE, "cp=2,tp=2", "dp=2,pp=2,zero=1"),
    (DENSE, "pp=4", "cp=4"),
    (DENSE, "tp=2+1,dp=1+2,zero=1,microbatch=2", "dp=3,zero=3,microbatch=4"),
    (EXPERTS, "dp=4,ep=4,zero=1", "tp=2,dp=2"),
    (EXPERTS, "pp=2,dp=2", "dp=4,ep=2,zero=1"),
    (EXPERTS, "dp=2,ep=2", "dp=1"),
)
EXPERT_KEYS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
STEPS, HALF = 10, 5


def run(folder: Path, family: str, plan: str) -> Path:
    """Trains, or goes on, under a plan; returns the job."""
    path = folder / "job.toml"
    if not path.exists():
        path = job(folder, **(EXPERT_KEYS if family == EXPERTS else {}))
        path.write_text(path.read_text().replace('"llama"', f'"{family}"'))
    run_job(
        path,
        f"parallel.plan={plan}",
        f"train.steps={STEPS}",
        "train.global_batch=12",
        f"checkpoint.every={HALF}",
        "optimizer.learning_rate=3e-3",
        entry=row_digests.run_rank,
    )
    return path


def worst(folder: Path, whole: Path, family: str, first: str, second: str) -> tuple[float, bool]:
    """The largest difference of a loss, and whether every step trained on the same rows."""
    path = run(folder, family, first)
    keep_only(path.parent / "run", HALF)
    for file in (path.parent / "run").glob("rows-*"):
        kept = file.read_text().splitlines(keepends=True)[:HALF]
        file.write_text("".join(kept))
    run(folder, family, second)
    ours, theirs = losses(path), losses(whole)
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    rows = row_digests.trained_rows(path.parent / "run")
    same = rows == row_digests.trained_rows(whole.parent / "run")
    return max(abs(ours[step] - theirs[step]) for step in ours), same


def main() -> None:
    options = read_options(__doc__)
    pairs = [pair for pair in PAIRS if options.only in " ".join(pair)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wholes = {f: run(folder / f, f, "dp=1") for f in dict.fromkeys(pair[0] for pair in pairs)}
        for number, (family, first, second) in enumerate(pairs):
            place = folder / str(number)
            difference, same = worst(place, wholes[family], family, first, second)
            shutil.rmtree(place)
            row = {"claim": f"{family} {first} -> {second}", "peer": "unbroken, one process"}
            numbers = {"ours": difference, "theirs": 1e-5, "ratio": difference / 1e-5}
            metric = f"loss, rows {'equal' if same else 'DIFFER'}"
            rows.append(row | numbers | {"metric": metric, "better": "lower", "rows_equal": same})
            if not options.json:
                show(rows[-1:], False)
                sys.stdout.flush()
    if options.json:
        show(rows, True)
    good = sum(row["ratio"] <= 1 and row["rows_equal"] for row in rows)
    print(f"{good} of {len(rows)} pairs go on as the unbroken run", file=sys.stderr)
    sys.exit(good < len(rows))


if __name__ == "__main__":
    main()
