"""The watch of a launch looks at the agent's processes and leaves asking them to the agent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import popen_forkserver
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from triptych.train import watch as module
from triptych.train.folder import RunFolder
from triptych.train.status import Phase, StatusFile
from triptych.train.watch import Watch


def begins(status: str, may_leave: Event) -> None:
    """A rank that begins its first step and leaves with exit code 0 when it may."""
    StatusFile(Path(status)).set(1, Phase.STEP)
    may_leave.wait()


def test_only_the_agents_thread_asks_a_rank_for_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server tells it once: the second who asks would take it for 255."""
    askers: set[str] = set()
    poll = popen_forkserver.Popen.poll

    def noted(process: popen_forkserver.Popen, flag: int = os.WNOHANG) -> int | None:
        askers.add(threading.current_thread().name)
        return poll(process, flag)

    monkeypatch.setattr(popen_forkserver.Popen, "poll", noted)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    run = RunFolder(tmp_path)
    context = multiprocessing.get_context("forkserver")
    may_leave = context.Event()
    rank = context.Process(target=begins, args=(str(run.status(0)), may_leave))
    with Watch(run, 1, hang_s=60, grace_s=60) as watch:
        rank.start()
        while rank.pid not in watch.seen:
            assert rank.is_alive()
        may_leave.set()
        rank.join()
    assert watch.exit_codes() == [0]
    assert askers == {threading.main_thread().name}
