"""The ranks as the scheduler sees them: steps go in, what they brought comes out in order.

Rank 0 works in a thread beside the scheduler, so that the next step is planned while this one runs;
the other ranks follow in processes of their own.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
from collections import deque
from typing import Protocol

from triptych.serve.engine.worker import Done, Work, Worker, receive_bytes

HEARTBEAT = b"-"
HEARTBEAT_S = 20.0
"""Ranks that wait for a step hear from rank 0 at least so often: groups have a time-out."""


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
    """Runs a worker, and those of the other ranks of its mesh."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._awaited: deque[Work] = deque()  # of other ranks' samplers
        self._thread = threading.Thread(target=self._live, name="rank 0", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Runs a step after those before it."""
        self._steps.put(work)

    def collect(self, timeout_s: float | None) -> Done | None:
        """What the oldest step brought; see `Executor`."""
        try:
            found = self._done.get(timeout=timeout_s) if timeout_s != 0 else self._done.get_nowait()
        except queue.Empty:
            return None
        self._bell.recv(1)
        if isinstance(found, BaseException):
            self._publish(found)  # then and always
            raise found
        return found

    def fileno(self) -> int:
        """Readable when a step has ended."""
        return self._bell.fileno()

    def close(self, message: bytes | None = None) -> None:
        """Lets all ranks end, with a last message to the others; once."""
        if not self._thread.is_alive() and self._bell.fileno() < 0:
            return
        self._steps.put(None)
        self._thread.join()
        if message is not None:
            self._send(message)
            self._worker.finish()
        self._bell.close()
        self._ring.close()

    # ---- in the thread of rank 0 --------------------------------------------------------------

    def _live(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._send(pickle.dumps(work))
                done = self._worker.run(work)
                if done is not None:
                    self._publish(done)
                elif self._worker.route.sampler != 0:
                    self._awaited.append(work)
            self._send(b"")
            self._worker.finish()
        except BaseException as error:  # handed to whoever collects
            self._publish(error)

    def _next(self) -> Work | None:
        """The next step when what it needs is there; None at the end."""
        while True:
            try:
                work = self._steps.get(timeout=0 if self._awaited else HEARTBEAT_S)
            except queue.Empty:
                if self._awaited:
                    self._receive()
                else:
                    self._worker.settle()
                    self._send(HEARTBEAT)
                continue
            while self._awaited and (work is None or self._needs_oldest(work)):
                self._receive()
            return work

    def _needs_oldest(self, work: Work) -> bool:
        oldest = self._awaited[0].step.id
        return work.step.id - self._worker.route.num_stages >= oldest

    def _receive(self) -> None:
        """Waits for what the oldest step brought on another rank."""
        work = self._awaited.popleft()
        done = self._worker.hear()
        self._worker.learn(work.step.samples, [choice.token for choice in done.choices])
        self._publish(done)

    def _send(self, message: bytes) -> None:
        for rank in range(1, self._worker.mesh.world.size):
            self._worker.send(message, rank)

    def _publish(self, found: Done | BaseException) -> None:
        self._done.put(found)
        self._ring.send(b"\0")


def follow(worker: Worker) -> None:
    """The life of a rank but rank 0: runs what comes until an empty message."""
    while message := receive_bytes(worker.mesh, 0):
        if message != HEARTBEAT:
            worker.run(pickle.loads(message))
    worker.finish()
