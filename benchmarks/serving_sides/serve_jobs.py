"""The line between the benchmark and a side that serves: no import but the standard library.

A peer's side runs in a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable

Run = Callable[[list[list[int]], int], tuple[list[list[int]], list[float]]]
"""Prompts and tokens of each answer in; answers out, and when their first tokens came if known."""


def cpu_seconds() -> float:
    """Processor seconds of this process and of its children that have ended or still run."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(_of(child) for child in _children(os.getpid()))


def _children(parent: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{parent}/task"):
        with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
            for child in map(int, file.read().split()):
                found += [child, *_children(child)]
    return found


def _of(process: int) -> float:
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answer_jobs(run: Run) -> None:
    """Says that it is ready, then does a job for each line of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began_s, cpu_s = time.perf_counter(), cpu_seconds()
        answers, first_s = run(job["prompts"], job["tokens"])
        answer = {
            "wall_s": time.perf_counter() - began_s,
            "cpu_s": cpu_seconds() - cpu_s,
            "answers": answers,
            "ttft_s": [at_s - began_s for at_s in first_s],
        }
        print(json.dumps(answer), file=out, flush=True)
