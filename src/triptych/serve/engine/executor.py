"""The ranks as schedulers see them: steps go in, what they brought comes out in order.

Rank 0 works in a thread beside the schedulers, so that the next step is planned while this one
runs; the other ranks follow in processes of their own. Several models may share the ranks: each has
a seat on their line, and their steps run in turns (`serve.core.turns`).
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from triptych.runtime.comm import Pending
from triptych.runtime.mesh import Mesh
from triptych.serve.core.turns import Turns
from triptych.serve.engine.worker import Done, Work, Worker, receive_bytes, start_bytes

HEARTBEAT = b"-"
HEARTBEAT_S = 20.0
"""Ranks that wait for a step hear from rank 0 at least so often: groups have a time-out."""
_MOST_UNDER_WAY = 16  # messages to each other rank


class Executor(Protocol):
    """What an engine drives."""

    def submit(self, work: Work) -> None:
        """Runs a step after those before it."""

    def collect(self, timeout_s: float | None) -> Done | None:
        """What the oldest step brought, or None if it has not ended in time. Raises what ended a
        rank.
        """
        ...

    def fileno(self) -> int:
        """Readable when a step has ended."""
        ...

    def close(self, message: bytes | None = None) -> None:
        """Lets all ranks end, with a last message to the others; once."""


class RankExecutor:
    """Runs a worker, and those of the other ranks of its mesh.

    With a `line` it shares the ranks with others there, and to close it frees its seat only.
    """

    def __init__(self, worker: Worker, line: RankLine | None = None) -> None:
        self.worker = worker
        self.steps: deque[Work] = deque()
        self.num_active = 0  # submitted and not collected
        self._done: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._owns_line = line is None
        self._line = line or RankLine()
        self.number = self._line.join(self)

    def submit(self, work: Work) -> None:
        """Runs a step after those before it."""
        self._line.submit(self, work)

    def collect(self, timeout_s: float | None) -> Done | None:
        """What the oldest step brought; see `Executor`."""
        try:
            found = self._done.get(timeout=timeout_s) if timeout_s != 0 else self._done.get_nowait()
        except queue.Empty:
            return None
        self._bell.recv(1)
        if isinstance(found, BaseException):
            self.publish(found)  # then and always
            raise found
        self.num_active -= 1
        return found

    def fileno(self) -> int:
        """Readable when a step has ended."""
        return self._bell.fileno()

    def close(self, message: bytes | None = None) -> None:
        """Lets all ranks end, with a last message to the others; once."""
        if self._bell.fileno() < 0:
            return
        if self._owns_line:
            self._line.close(message)
        else:
            self._line.leave(self)
        self._bell.close()
        self._ring.close()

    def publish(self, found: Done | BaseException) -> None:
        """Lets whoever collects have something; for the line."""
        self._done.put(found)
        with contextlib.suppress(OSError):  # it has left meanwhile
            self._ring.send(b"\0")


class RankLine:
    """Rank 0 of some ranks: a thread that runs the steps of all that have a seat, in turns.

    The first seat's mesh carries messages to the other ranks, also when it has gone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seats: dict[int, RankExecutor] = {}
        self._turns: Turns[int] = Turns({})
        self._calls: deque[Callable[[], None]] = deque()
        self._awaited: deque[tuple[RankExecutor, Work, float]] = deque()  # of other ranks' samplers
        self._sending: deque[Pending] = deque()
        self._next_number = 0
        self._mesh: Mesh | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._live, name="rank 0", daemon=True)

    def join(self, seat: RankExecutor) -> int:
        """The number of one seat more; all ranks count alike."""
        with self._changed:
            number, self._next_number = self._next_number, self._next_number + 1
            self._seats[number] = seat
            self._turns.share_out(dict.fromkeys(self._seats, 1.0))
            if self._mesh is None:
                self._mesh = seat.worker.mesh
                self._thread.start()
        return number

    def share_out(self, shares: Mapping[int, float]) -> None:
        """The shares of the seats when all are busy."""
        with self._changed:
            self._turns.share_out(shares)

    def submit(self, seat: RankExecutor, work: Work) -> None:
        """Runs a step after those of its seat before it."""
        with self._changed:
            if seat.num_active == 0 and seat.number in self._seats:
                self._turns.woke(seat.number)
            seat.num_active += 1
            seat.steps.append(work)
            self._changed.notify()

    def call(self, action: Callable[[], None]) -> None:
        """Does something on rank 0 between two steps; it raises nothing."""
        with self._changed:
            self._calls.append(action)
            self._changed.notify()

    def leave(self, seat: RankExecutor) -> None:
        """Ends a seat: behind its last step, on all ranks."""
        with self._changed:
            self._seats.pop(seat.number, None)

        def go() -> None:
            while any(awaited is seat for awaited, _, _ in self._awaited):
                self._receive()
            self.send(pickle.dumps((seat.number, None)))
            seat.worker.finish()

        self.call(go)

    def close(self, message: bytes | None = None) -> None:
        """Lets all ranks end, with a last message to the others; once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._mesh is not None:
            self._thread.join()
            if message is not None:
                self.send(message)
                self._settle()

    def send(self, message: bytes) -> None:
        """Sends bytes to all other ranks, which may take them later; for what runs on the line."""
        assert self._mesh is not None
        for rank in range(1, self._mesh.world.size):
            self._sending += start_bytes(self._mesh, message, rank)
        self._settle(_MOST_UNDER_WAY * self._mesh.world.size)

    def _settle(self, most: int = 0) -> None:
        """Waits until no more messages than that are under way.

        The others take the oldest by themselves: all that their steps need of rank 0 is sent.
        """
        while len(self._sending) > most:
            self._sending.popleft().wait()

    # ---- in the thread of rank 0 --------------------------------------------------------------

    def _live(self) -> None:
        try:
            while (found := self._next()) is not None:
                if isinstance(found, tuple):
                    self._run(*found)
                else:
                    found()
            self.send(b"")
            self._settle()
            for seat in self._seats.values():
                seat.worker.finish()
        except BaseException as error:  # handed to whoever collects
            for seat in self._seats.values():
                seat.publish(error)

    def _run(self, seat: RankExecutor, work: Work) -> None:
        began_s = time.perf_counter()
        is_alone = seat.worker.mesh.world.size == 1
        if not is_alone:
            self.send(pickle.dumps((seat.number, work)))
        try:
            done = seat.worker.run(work)
        except BaseException as error:
            if not is_alone or len(self._seats) == 1:
                raise
            with self._changed:
                self._seats.pop(seat.number, None)  # one model fails alone
            seat.publish(error)
            return
        seconds = time.perf_counter() - began_s
        with self._changed:
            self._turns.took(seat.number, seconds)
        if done is not None:
            seat.publish(done._replace(seconds=seconds))
        elif seat.worker.route.sampler != 0:
            self._awaited.append((seat, work, began_s))

    def _next(self) -> tuple[RankExecutor, Work] | Callable[[], None] | None:
        """The next step when what it needs is there, or something else to do; None at the end."""
        while True:
            with self._changed:
                found = self._chosen()
                if found is None and not self._is_closed and not self._awaited:
                    if not self._changed.wait(HEARTBEAT_S):
                        self._beat()
                    continue
            if found is None and self._awaited:
                self._receive()
            elif found is None:
                return None
            else:
                if isinstance(found, tuple):
                    while self._needs_oldest(*found):
                        self._receive()
                return found

    def _chosen(self) -> tuple[RankExecutor, Work] | Callable[[], None] | None:
        waiting = [number for number, seat in self._seats.items() if seat.steps]
        if self._calls:
            return self._calls.popleft()
        if not waiting:
            return None
        seat = self._seats[self._turns.next(waiting)]
        return seat, seat.steps.popleft()

    def _beat(self) -> None:
        self._settle()
        for seat in self._seats.values():
            seat.worker.settle()
        self.send(HEARTBEAT)

    def _needs_oldest(self, seat: RankExecutor, work: Work) -> bool:
        last = work.step.id - seat.worker.route.num_stages
        return any(s is seat and awaited.step.id <= last for s, awaited, _ in self._awaited)

    def _receive(self) -> None:
        """Waits for what the oldest step brought on another rank."""
        seat, work, began_s = self._awaited.popleft()
        done = seat.worker.hear()
        seat.worker.learn(work.step.samples, done.tokens)
        seat.publish(done._replace(seconds=time.perf_counter() - began_s))


def follow(worker: Worker) -> None:
    """The life of a rank but rank 0, with one model: runs what comes until an empty message."""
    follow_line({0: worker}, lambda _: None)


def follow_line(workers: dict[int, Worker], load: Callable[[object], Worker | None]) -> None:
    """The life of a rank but rank 0, with the workers of all seats by number; at least one.

    `load` makes the worker of a seat that comes later.
    """
    mesh, next_number = workers[0].mesh, len(workers)
    while message := receive_bytes(mesh, 0):
        if message == HEARTBEAT:
            continue
        number, what = pickle.loads(message)
        if isinstance(what, Work):
            workers[number].run(what)
        elif what is None:
            workers.pop(number).finish()
        elif (worker := load(what)) is not None:
            workers[next_number] = worker
            next_number += 1
    for worker in workers.values():
        worker.finish()
