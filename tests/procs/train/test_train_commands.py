"""`triptych train` as users start it: alone, by torchrun, by Slurm; interrupted and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import eval_losses, losses, make_job

from triptych.train.status import Phase, Status, read_status
from triptych.train.stop import EXIT_CODE

LONG = ("--set", "train.steps=100000", "parallel.timeout_s=3600")
DEADLINE_S = 240.0  # long before those steps, or the time-out of a collective


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
    return clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def train_command(job_path: Path, plan: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "triptych", "train", str(job_path), "--plan", plan, *more]


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )


@contextlib.contextmanager
def training(
    job_path: Path, plan: str, ranks: int
) -> Iterator[tuple[subprocess.Popen[str], list[Status]]]:
    """A long run that has begun its steps, and where its ranks are."""
    process = start(train_command(job_path, plan, *LONG))
    try:
        yield process, wait_for_steps(job_path, ranks, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_steps(job_path: Path, ranks: int, process: subprocess.Popen[str]) -> list[Status]:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        found = [
            read_status(job_path.parent / "run" / "status" / f"rank-{r}") for r in range(ranks)
        ]
        statuses = [s for s in found if s is not None and s.step >= 2]
        if len(statuses) == ranks:
            return statuses
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"no step was reached: {process.communicate()}")


def wait_until_gone(pids: list[int]) -> None:
    """Returns when no process is left of ranks that would train on for long."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.05)
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    raise AssertionError(f"still there: {left}")


def pids(statuses: list[Status]) -> list[int]:
    return [status.pid for status in statuses]


def test_control_c_ends_everything_with_one_line(job_path: Path) -> None:
    with training(job_path, "dp=2", 2) as (process, statuses):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert errors.rstrip().splitlines()[-1] == "interrupted"
        wait_until_gone(pids(statuses))


def test_a_killed_launcher_leaves_no_rank_behind(job_path: Path) -> None:
    """User case pub_103."""
    with training(job_path, "dp=2", 2) as (process, statuses):
        process.kill()
        wait_until_gone(pids(statuses))


def test_a_killed_rank_ends_the_command_with_code_1_and_its_name_in_the_last_lines(
    job_path: Path,
) -> None:
    """User case pub_103."""
    with training(job_path, "tp=2,pp=2", 4) as (process, statuses):
        os.kill(statuses[2].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        wait_until_gone(pids(statuses))
        last = "\n".join(errors.splitlines()[-15:])
        assert "rank 2, host" in last and "SIGKILL" in last
        assert "Traceback" not in last and "Connection closed" not in last


def test_a_terminated_launcher_ends_its_ranks(job_path: Path) -> None:
    with training(job_path, "dp=2", 2) as (process, statuses):
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == EXIT_CODE and "ended by SIGTERM" in errors
        wait_until_gone(pids(statuses))


def test_under_torchrun_the_same_command_is_a_rank(job_path: Path) -> None:
    command = train_command(job_path, "tp=2", "--set", f"data.eval={job_path.parent}/text/*00.txt")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    done = subprocess.run(
        [sys.executable, *torchrun, *command[2:]],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(job_path)) == [1, 2, 3, 4] and list(eval_losses(job_path)) == [0, 4]
    assert done.stdout.count("run folder") == 1
    statuses = [read_status(job_path.parent / "run" / "status" / f"rank-{r}") for r in range(2)]
    assert all(status is not None and status.phase is Phase.DONE for status in statuses)


def test_under_slurm_the_same_command_is_a_rank(job_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    command = train_command(job_path, "dp=2")
    ranks = [
        start(command, **shared, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=DEADLINE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], answers
    assert "run folder" in answers[0][0] and answers[1][0] == ""
    assert list(losses(job_path)) == [1, 2, 3, 4]


def test_bad_input_under_a_launch_ends_all_ranks_and_is_told_once(job_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = train_command(job_path, "tp=2", "--set", "data.train=nowhere")
    done = subprocess.run(
        [sys.executable, *torchrun, *command[2:]],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert done.returncode != 0
    assert done.stderr.count("no file or directory") == 1
    assert not (job_path.parent / "run").exists()


def test_one_process_for_a_plan_of_four_is_told_the_launch_command(job_path: Path) -> None:
    """User case pub_007."""
    done = subprocess.run(
        train_command(job_path, "tp=2,pp=2,dp=1"),
        capture_output=True,
        text=True,
        env=environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "only one process exists" in done.stderr and "--nproc-per-node=4" in done.stderr
    assert "Traceback" not in done.stderr
