"""Two torchrun agents train together; one is killed with its ranks. Does the other go on?

Each agent has two ranks on this machine, and the job says `plan = "auto"`. While four ranks train,
the second agent and its ranks get SIGKILL. The first one's agent starts its two ranks again: they
plan anew, load the newest complete checkpoint and train to the end. All losses must
be those of one process to 1e-5.

    python benchmarks/elastic_restart.py [--steps 40] [--json]
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / part) for part in ("procs/train", "pure/train", "procs")]

import psutil  # noqa: E402
from tiny_runs import losses, make_job, metrics, run_job  # noqa: E402

from sides.options import read_options  # noqa: E402
from sides.rows import show  # noqa: E402

PATIENCE_S = 400.0


def agent(job: Path, port: int, settings: list[str]) -> subprocess.Popen[bytes]:
    """A node of up to two, with two ranks."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"),
        *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
        *("--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=10,read_timeout=20"),
        *("-m", "triptych", "train", str(job), "--set", *settings),
    ]
    with (job.parent / "agents.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for an agent and its ranks."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def four_train(job: Path) -> bool:
    """True once all four ranks have trained some steps."""
    try:
        steps = [line for line in metrics(job) if "loss" in line]
    except (OSError, ValueError):
        return False
    return len(steps) >= 6 and (job.parent / "run" / "status" / "rank-3").exists()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    options = read_options(__doc__, steps=40)
    with tempfile.TemporaryDirectory() as name:
        settings = [f"train.steps={options.steps}", "checkpoint.every=2", "train.global_batch=24"]
        whole, job = make_job(Path(name) / "whole"), make_job(Path(name) / "parts")
        run_job(whole, *settings, "parallel.plan=dp=1")
        port = free_port()
        first, second = (agent(job, port, settings) for _ in range(2))
        begun_s = time.monotonic()
        try:
            while not four_train(job) and time.monotonic() - begun_s < PATIENCE_S:
                time.sleep(0.02)
            killed_s = time.monotonic()
            kill_all(second)
            code = first.wait(PATIENCE_S)
        finally:
            for left in (first, second):
                if left.poll() is None:
                    kill_all(left)
        if code:
            sys.exit((job.parent / "agents.txt").read_text())
        ours, theirs = losses(job), losses(whole)
        worst = max(abs(ours[step] - theirs[step]) for step in theirs)
        plans = list(dict.fromkeys(line["plan"] for line in metrics(job) if "loss" in line))
    row = {"claim": f"one of two nodes killed, {' then '.join(plans)}", "peer": "one process"}
    numbers = {"ours": worst, "theirs": 1e-5, "ratio": worst / 1e-5}
    show([row | numbers | {"metric": "loss", "better": "lower"}], options.json)
    print(f"{time.monotonic() - killed_s:.0f} s from the kill to the end", file=sys.stderr)
    sys.exit(not (worst <= 1e-5 and len(plans) == 2))


if __name__ == "__main__":
    main()
