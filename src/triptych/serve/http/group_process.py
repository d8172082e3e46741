"""The process of a group: requests from a pipe into its engines, what steps bring into the pipe."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from triptych.errors import InputError, RunError, TriptychError
from triptych.serve.core.request import Admission
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.hosts import Hosts
from triptych.serve.engine.values import Ask, Output
from triptych.serve.http.messages import (
    Abort,
    Admitted,
    Bring,
    Close,
    Drop,
    Ended,
    Gone,
    News,
    Opened,
    Start,
    Stop,
    To,
)


def main(pipe: Connection) -> None:
    """The life of such a process. It ends when its parent says so or is gone, at no signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        message = pipe.recv()
    except EOFError:
        return
    assert isinstance(message, Start)
    if message.gpus:  # before CUDA is asked for any
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(message.gpus)
    run_group(pipe, lambda: _opened(message))


def _opened(message: Start) -> Hosts:
    hosts = Hosts(message.world, message.cache_bytes)
    try:
        hosts.start(message.models)
    except BaseException:
        hosts.close()
        raise
    return hosts


def run_group(pipe: Connection, open_hosts: Callable[[], Hosts]) -> None:
    """Opens the engines and serves what comes through the pipe until it is closed; a failure of all
    is sent as `Ended`.
    """
    try:
        with open_hosts() as hosts:
            for name, engine in hosts.engines.items():
                pipe.send(Opened(name, engine.limits))
            _Driver(hosts, pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody is there any more
    except TriptychError as error:
        _tell_end(pipe, error)
    except BaseException as error:
        _tell_end(pipe, RunError(f"the engine failed: {error!r}"))
        raise
    finally:
        pipe.close()


def _tell_end(pipe: Connection, error: TriptychError) -> None:
    with contextlib.suppress(OSError):
        pipe.send(Ended(error))


class _Driver:
    """Waits for commands, for steps that end and for models that come."""

    def __init__(self, hosts: Hosts, pipe: Connection) -> None:
        self._hosts, self._pipe = hosts, pipe
        self._selector = selectors.DefaultSelector()
        self._watched: dict[str, Engine] = {}

    def run(self) -> None:
        """Until it is told to end, the pipe does (EOFError) or the last engine fails."""
        with self._selector:
            self._selector.register(self._pipe, selectors.EVENT_READ)
            self._selector.register(self._hosts, selectors.EVENT_READ)
            while True:
                self._watch()
                self._selector.select()
                if not self._turn():
                    return

    def _watch(self) -> None:
        """Listens to the engines that are there."""
        engines = self._hosts.engines
        for name, engine in list(self._watched.items()):
            if engines.get(name) is not engine:
                self._unwatch(name)
        for name, engine in engines.items():
            if name not in self._watched:
                self._selector.register(engine, selectors.EVENT_READ)
                self._watched[name] = engine

    def _unwatch(self, name: str) -> None:
        self._selector.unregister(self._watched.pop(name))

    def _turn(self) -> bool:
        """Steps come before requests; one message tells what both brought. False at the end."""
        outputs = [output for name in list(self._hosts.engines) for output in self._step(name)]
        while self._pipe.poll():
            command = self._pipe.recv()
            if isinstance(command, Close):
                return False
            self._obey(command)
        engines = self._hosts.engines
        for engine in engines.values() if self._hosts.shares_memory else ():
            engine.plan()  # what one gave back another may use
        loads = {name: engine.load for name, engine in engines.items()}
        took = {name: found for name, engine in engines.items() if (found := engine.took())}
        self._pipe.send(News(outputs, loads, took))
        for name, error in self._hosts.loaded():
            self._pipe.send(Gone(name, error) if error else Opened(name, engines[name].limits))
        return True

    def _step(self, name: str) -> list[Output]:
        """What the oldest step of an engine brought. One that fails goes; the last one ends all."""
        try:
            return self._hosts.engines[name].step(0)
        except TriptychError as error:
            if len(self._hosts.engines) == 1:
                raise
            self._drop(name)
            self._pipe.send(Gone(name, error))
            return []

    def _drop(self, name: str, cache_bytes: int | None = None) -> None:
        self._unwatch(name)
        self._hosts.drop(name, cache_bytes)

    def _obey(self, command: object) -> None:
        match command:
            case To(model, inner):
                self._tell(model, inner)
            case Bring(hosted, cache_bytes):
                self._hosts.load(hosted, cache_bytes)
            case Drop(model, cache_bytes):
                if model in self._hosts.engines:
                    self._drop(model, cache_bytes)
                self._pipe.send(Gone(model))
            case _:
                raise AssertionError(f"no command: {command!r}")

    def _tell(self, model: str, command: Ask | Abort | Stop) -> None:
        engine = self._hosts.engines.get(model)
        match command:
            case Ask():
                self._pipe.send(Admitted(command.id, self._admitted(engine, command)))
            case Abort(request_id) if engine is not None:
                engine.abort(request_id)
            case Stop(request_id, continuation) if engine is not None:
                engine.stop(request_id, continuation)

    def _admitted(self, engine: Engine | None, ask: Ask) -> Admission | TriptychError:
        if engine is None:
            return RunError("the model has just left this group")
        try:
            return engine.add_request(ask)
        except InputError as error:
            return error


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
