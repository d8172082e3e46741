"""The verbs of the command line, called in this process so that torch is imported once.

Ranks come from one fork server whose screen is a file: what the ranks of a run wrote is what the
file grew by.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from job_samples import write_job
from tiny_runs import stop_fork_server

from triptych.cli.main import run
from triptych.train import launch
from triptych.train.fork_server import start_fork_server
from triptych.train.result import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended and what it and its ranks wrote."""

    code: int
    out: str
    err: str

    @property
    def problems(self) -> str:
        """The error, as the user sees it."""
        assert self.code != 0 and "Traceback" not in self.err, self.err
        return self.err[self.err.index("error:\n") :]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Runs verbs; `log` is what the ranks write to."""

    log: Path

    def __call__(self, *args: str | Path) -> Ended:
        """Runs one command line in this process."""
        words = [str(arg) for arg in args]
        before = self.log.stat().st_size
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(words)
        with self.log.open("rb") as stream:
            stream.seek(before)
            said = stream.read().decode()
        return Ended(code=code, out=out.getvalue(), err=said + err.getvalue())

    def done(self, *args: str | Path) -> Ended:
        """As a call, for a command that must succeed."""
        ended = self(*args)
        assert ended.code == 0, ended.err
        return ended


@contextlib.contextmanager
def rank_log(path: Path) -> Iterator[Ranks]:
    """Inside, ranks are forked from a server that writes to `path`."""
    stop_fork_server()
    path.touch()
    kept = [os.dup(number) for number in (1, 2)]
    target = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        for number in (1, 2):
            os.dup2(target, number)
        start_fork_server(2, "llama")
    finally:
        for number, former in zip((1, 2), kept, strict=True):
            os.dup2(former, number)
            os.close(former)
        os.close(target)
    try:
        yield Ranks(path)
    finally:
        stop_fork_server()


def process(*args: str | Path, folder: Path, **environment: str) -> Ended:
    """Runs a command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def entry_of_ranks(patch: pytest.MonkeyPatch, entry: Callable[[str], Summary]) -> None:
    """`triptych train` in this process starts its ranks with another entry."""
    patch.setattr(launch, "launch", partial(launch.launch, entry=entry))


def job(folder: Path, **config: int | str | bool) -> Path:
    """A job for a 4-layer Llama, with these keys of its config changed or added."""
    path = write_job(folder)
    lines = {key: f"{key} = {json.dumps(value)}" for key, value in config.items()}
    text = path.read_text("utf-8")
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if key in lines:
            text = text.replace(line, lines.pop(key))
    path.write_text(text.replace("[tokenizer]", "\n".join([*lines.values(), "\n[tokenizer]"])))
    return path


def tree(folder: Path) -> list[Path]:
    """Everything in a folder."""
    return sorted(folder.rglob("*"))
