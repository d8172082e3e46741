"""Engines without a model: tokens from a script, or from what the block tables lead to."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from fake_engine import Device
from serve_samples import END, byte_tokenizer, config_of

from triptych.errors import RunError
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.step import Step
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.worker import Done, Work

Script = Callable[[int, int, int], int]
"""The token of a request, a continuation and a place."""
Run = Callable[[Step], list[int]]


class ThreadRanks:
    """An executor whose steps take a moment in a thread, as those of ranks do."""

    def __init__(self, run: Run, step_s: float = 0.0005) -> None:
        self.num_steps = 0
        self._run, self._step_s = run, step_s
        self._steps: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while (work := self._steps.get()) is not None:
            time.sleep(self._step_s)
            try:
                tokens = self._run(work.step)
                self._publish(Done(work.step.id, tokens, seconds=self._step_s))
            except RunError as error:
                self._publish(error)
            self.num_steps += 1

    def _publish(self, found: Done | BaseException) -> None:
        self._done.put(found)
        self._ring.send(b"\0")

    def submit(self, work: Work) -> None:
        self._steps.put(work)

    def collect(self, timeout_s: float | None) -> Done | None:
        try:
            found = self._done.get(timeout=timeout_s) if timeout_s else self._done.get_nowait()
        except queue.Empty:
            return None
        self._bell.recv(1)
        if isinstance(found, BaseException):
            raise found
        return found

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self, message: bytes | None = None) -> None:
        self._steps.put(None)
        self._thread.join()
        self._bell.close()
        self._ring.close()


class Scripted:
    """Runs steps by a script; requests are numbered by the server from 1."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers: dict[int, tuple[int, int]] = {}
        self._places: dict[tuple[int, int], int] = {}

    def __call__(self, step: Step) -> list[int]:
        for start in step.started:
            self._answers[start.slot] = (start.request_id, start.continuation)
        for fork in step.forks:
            self._answers[fork.slot] = (fork.request_id, fork.continuation)
        return [self._next(self._answers[slot]) for slot in step.samples]

    def _next(self, answer: tuple[int, int]) -> int:
        place = self._places.get(answer, 0)
        self._places[answer] = place + 1
        return self._script(*answer, place)


def engine_of(
    run: Run, limits: Limits, step_s: float = 0.0005, policy: Policy | None = None
) -> Engine:
    """An engine whose vocabulary is the byte tokenizer's and a token more."""
    ranks = ThreadRanks(run, step_s)
    return Engine(ranks, limits, policy=policy, vocab=byte_tokenizer().get_vocab_size() + 1)


def table_engine(limits: Limits) -> Engine:
    """An engine whose next token is `fake_engine.next_token` of what its block tables hold."""
    return engine_of(Device(SimpleNamespace(limits=limits)).run, limits)  # type: ignore[arg-type]


def tokenizer_folder(folder: Path, **config: object) -> Path:
    """A model's folder without weights."""
    (folder / "config.json").write_text(json.dumps(config_of()))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **config}))
    return folder
