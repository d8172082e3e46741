"""The one place that reads environment variables: who this process is in a launch.

Three ways to be started: by `triptych train` alone (no variables: it starts the local ranks
itself), by `torchrun` (RANK, WORLD_SIZE, ...) and by Slurm's `srun` (SLURM_PROCID, ...).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.errors import JobError, Problem

_PORTS_FROM = 20_000
_PORTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in a launch, and where its ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    launcher: str  # "torchrun" or "slurm"
    attempt: int = 0  # restarts of the ranks so far


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The process's place if something else launched it as a rank; None if it is on its own.

    Raises JobError if the variables contradict one another or cannot be read.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = _from_torchrun(environment)
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        found = _from_slurm(environment)  # a batch script itself has no step
    else:
        return None
    if not 0 <= found.rank < found.world_size:
        raise JobError(
            Problem(
                f"rank {found.rank} of world size {found.world_size} in the environment",
                "ranks count from 0 to world size - 1",
                "start the ranks with `torchrun` or `srun`, or unset RANK and WORLD_SIZE",
            )
        )
    return found


def _from_torchrun(environment: Mapping[str, str]) -> Place:
    rank = _number(environment, "RANK")
    world_size = _number(environment, "WORLD_SIZE")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", rank),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environment, "MASTER_PORT", 29_500),
        launcher="torchrun",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_slurm(environment: Mapping[str, str]) -> Place:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job = _number(environment, "SLURM_JOB_ID", 0)
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, tasks, 1),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=_tasks_per_node(environment),
        address=environment.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        port=_number(environment, "MASTER_PORT", _PORTS_FROM + job % _PORTS),
        launcher="slurm",
    )


def wants_strict_comm(environment: Mapping[str, str] = os.environ) -> bool:
    """True if communication runs in strict mode: slow, for tests (`runtime/strict.py`)."""
    text = environment.get("TRIPTYCH_STRICT_COMM", "0")
    if text not in ("", "0", "1"):
        raise JobError(Problem(f"TRIPTYCH_STRICT_COMM={text!r}", "it is 0 or 1"))
    return text == "1"


def export(place: Place) -> None:
    """`torch.distributed` finds the rank and the meeting point in the environment."""
    os.environ["RANK"] = str(place.rank)
    os.environ["WORLD_SIZE"] = str(place.world_size)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    os.environ["MASTER_ADDR"] = place.address
    os.environ["MASTER_PORT"] = str(place.port)


def _tasks_per_node(environment: Mapping[str, str]) -> int:
    """Tasks on the first node of a step: `4(x2)` or `4,3` -> 4."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
        "SLURM_TASKS_PER_NODE", "1"
    )
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 1


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],cpu1` -> `gpu07`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(filter(None, match.groups())) if match else ""


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"-?\d+", text):
        raise JobError(
            Problem(f"environment variable {name}={text!r}", f"{name} is a whole number")
        )
    return int(text)
