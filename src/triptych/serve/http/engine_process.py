"""The engine process: requests from a pipe into the engine, what steps bring back into the pipe."""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from triptych.errors import InputError, RunError, TriptychError
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.values import Ask
from triptych.serve.http.messages import Abort, Admitted, Close, Ended, News, Open, Opened, Stop


def main(pipe: Connection) -> None:
    """The life of an engine process. It ends when its parent says so or is gone, at no signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        message = pipe.recv()
    except EOFError:
        return
    assert isinstance(message, Open)
    run_engine(pipe, lambda: Engine.open(*message))


def run_engine(pipe: Connection, open_engine: Callable[[], Engine]) -> None:
    """Opens an engine and serves what comes through the pipe until it is closed; a failure is sent
    as `Ended`.
    """
    try:
        with open_engine() as engine:
            pipe.send(Opened(engine.limits))
            _Driver(engine, pipe).run()
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
    """Waits for commands and for steps that end."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self._engine, self._pipe = engine, pipe

    def run(self) -> None:
        """Until it is told to end, the pipe does (EOFError) or a rank is lost (RunError)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            selector.register(self._engine, selectors.EVENT_READ)
            while True:
                selector.select()
                if not self._turn():
                    return

    def _turn(self) -> bool:
        """A step comes before requests; one message tells what both brought. False at the end."""
        outputs = self._engine.step(0)
        while self._pipe.poll():
            command = self._pipe.recv()
            if isinstance(command, Close):
                return False
            self._obey(command)
        self._pipe.send(News(outputs, self._engine.load))
        return True

    def _obey(self, command: object) -> None:
        match command:
            case Ask():
                self._admit(command)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Stop(request_id, continuation):
                self._engine.stop(request_id, continuation)
            case _:
                raise AssertionError(f"no command: {command!r}")

    def _admit(self, ask: Ask) -> None:
        try:
            result = self._engine.add_request(ask)
        except InputError as error:
            self._pipe.send(Admitted(ask.id, error))
        else:
            self._pipe.send(Admitted(ask.id, result))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
