"""Looks after the ranks of a launch while torch's elastic agent runs them.

The agent starts ranks and sees those that fail. It does not see a rank that leaves with exit code 0
in the middle of the run, nor ranks that hang; and it waits long for those that hang to end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from triptych.train.folder import RunFolder
from triptych.train.status import Phase, Status, read_status

_LOOK_S = 0.2
_GRACE_S = 2.0  # a rank that is done needs a moment to leave, one that lost a peer to write it down


class Watch:
    """Ends what is left of an attempt, and passes signals on to the ranks.

    Args:
        run: the folder where ranks write where they are.
        ranks: how many there are.
        hang_s: seconds without any news from any rank after which they hang.
        grace_s: seconds that ranks have after a signal that asks them to end.

    """

    def __init__(self, run: RunFolder, ranks: int, *, hang_s: float, grace_s: float) -> None:
        self._run, self._ranks = run, ranks
        self._hang_s, self._grace_s = hang_s, grace_s
        is_main = threading.current_thread() is threading.main_thread()
        self._main = threading.get_ident() if is_main else None
        self._processes: dict[int, BaseProcess] = {}  # of all attempts: they tell exit codes
        self._dying: tuple[float, frozenset[int]] | None = None  # since when, and who still lives
        self._asked: tuple[float, int] | None = None  # when, and by which signal
        self._told: set[int] = set()
        self._killed: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="rank-watch")
        self.ended_agent = False
        """True if the agent waited for nobody and was told to end."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def ask(self, number: int) -> None:
        """Asks the ranks to save and end; called by a signal handler."""
        if self._asked is None:
            self._asked = (time.monotonic(), number)

    @property
    def seen(self) -> set[int]:
        """The processes of all attempts that were seen."""
        return set(self._processes)

    def exit_codes(self) -> list[int | None]:
        """How each rank ended, by its process; None where that was not seen."""
        processes = [self._processes.get(s.pid) if s else None for s in self._statuses()]
        return [process.exitcode if process else None for process in processes]

    def ended(self) -> set[int]:
        """The ranks that were ended from here."""
        return {rank for rank, s in enumerate(self._statuses()) if s and s.pid in self._killed}

    # ---- the thread ----------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._processes |= {p.pid: p for p in _children() if p.pid is not None}
            statuses = [s for s in self._statuses() if s is not None]
            self._pass_on(statuses)
            self._end_hung(statuses)
            self._end_survivors(statuses)

    def _statuses(self) -> list[Status | None]:
        return [read_status(self._run.status(rank)) for rank in range(self._ranks)]

    def _pass_on(self, statuses: Iterable[Status]) -> None:
        """Tells each rank once to end; after the time of grace it must."""
        if self._asked is None:
            return
        since_s, number = self._asked
        for status in statuses:
            if status.pid not in self._told and _is_alive(status.pid):
                self._told.add(status.pid)
                _send(status.pid, number)
        if time.monotonic() - since_s > self._grace_s:
            self._kill(self._told)

    def _end_hung(self, statuses: list[Status]) -> None:
        """Ends ranks that all stand still; each leaves its stack first."""
        if not statuses or any(s.phase in (Phase.START, Phase.LOAD, Phase.DONE) for s in statuses):
            return
        if time.time() - max(status.time_s for status in statuses) > self._hang_s:
            alive = {status.pid for status in statuses if _is_alive(status.pid)}
            self._killed |= alive
            for pid in alive:
                _send(pid, signal.SIGTERM)
            self._stop.wait(_GRACE_S)
            self._kill(alive)

    def _end_survivors(self, statuses: list[Status]) -> None:
        """A moment after a rank was gone without being done, ends those that lived then."""
        gone = {s.pid for s in statuses if s.phase is not Phase.DONE and not _is_alive(s.pid)}
        if not gone:
            self._dying = None
        elif self._dying is None:
            alive = frozenset(s.pid for s in statuses if _is_alive(s.pid))
            self._dying = (time.monotonic(), alive)
        elif time.monotonic() - self._dying[0] > _GRACE_S:
            self._kill(self._dying[1])
            codes = [_known_code(process) for process in self._processes.values()]
            if not any(codes) and None not in codes and self._main is not None:
                self.ended_agent = True  # all left with exit code 0: the agent waits for nobody
                signal.pthread_kill(self._main, signal.SIGHUP)
                self._stop.set()

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if _is_alive(pid):
                self._killed.add(pid)
                _send(pid, signal.SIGKILL)


# A fork server tells an exit code once. Were it asked by this thread while the agent asks too
# (`active_children` and `exitcode` do), one of them would find none and take it for 255.


def _children() -> list[BaseProcess]:
    """The processes of the agent, without asking whether they have ended."""
    return list(vars(multiprocessing.process)["_children"])


def _known_code(process: BaseProcess) -> int | None:
    """The exit code of a process that the agent has seen end."""
    code: int | None = vars(process)["_popen"].returncode
    return code


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
