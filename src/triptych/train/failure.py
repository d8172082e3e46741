"""How a run failed: one rank's error on disk, the first cause among all ranks, the last words.

When a rank dies, the others fail a moment later because their connection broke. Those errors stay
in the files; what the user sees is the rank that failed by itself.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import InputError
from triptych.train.folder import RunFolder, write_text
from triptych.train.status import Phase, Status, read_status

LAST_LINES = 8  # of the traceback, in the block on the screen
_LISTED = 4

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed? ?out|pair closure"
    r"|socket|nccl|remote process|no other rank|store",
    re.IGNORECASE,
)
_WAITS = re.compile(r'File ".*(runtime/comm|distributed_c10d|runtime/mesh)\.py"')
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError", re.IGNORECASE)
_LESS_MEMORY = "a smaller microbatch, more ranks, ZeRO or recomputation need less memory"
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFile:
    """What a rank wrote about its own failure."""

    rank: int
    host: str
    step: int
    phase: str
    time_s: float
    is_lost_peer: bool  # only because another rank was gone
    is_echo: bool  # the error of another rank, raised on all
    is_input: bool  # the user's input cannot work
    text: str  # the traceback, or the message alone for bad input


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    status: Status | None
    error: ErrorFile | None
    exit_code: int | None  # negative: a signal; None: not known
    was_ended: bool = False  # by the launcher, because another rank failed or all hung
    stack: str = ""  # where it was when it was asked to end

    @property
    def is_done(self) -> bool:
        """True if the rank finished its work."""
        return self.status is not None and self.status.phase is Phase.DONE

    @property
    def waited(self) -> bool:
        """True if it stood in a collective when it was asked to end: it waited for another."""
        return _WAITS.search(self.stack) is not None


# --- one rank -----------------------------------------------------------------------------------


def write_error(run: RunFolder, rank: int, status: Status, error: BaseException) -> None:
    """The rank's error file exists, with where it was and the traceback."""
    is_input = isinstance(error, InputError)
    text = str(error) if is_input else "".join(traceback.format_exception(error))
    header = {
        "rank": rank,
        "host": status.host,
        "step": status.step,
        "phase": _phase(status, error).value,
        "time_s": time.time(),
        "lost_peer": int(is_lost_peer(error)),
        "echo": int(is_echo(error)),
        "input": int(is_input),
    }
    lines = [f"{key}: {value}" for key, value in header.items()]
    write_text(run.error(rank), "\n".join([*lines, "", text]))


def is_lost_peer(error: BaseException) -> bool:
    """True for errors of a connection to another rank, which is then the one to look at."""
    if isinstance(error, ConnectionError) or type(error).__name__ in _LOST_PEER_TYPES:
        return True
    return type(error) is RuntimeError and _LOST_PEER.search(str(error)) is not None


def is_echo(error: BaseException) -> bool:
    """True for an error that `checkpoint.together` raises on all ranks for the failure of one."""
    frames = traceback.extract_tb(error.__traceback__)
    is_shared = bool(frames) and os.path.basename(frames[-1].filename) == "together.py"
    return is_shared and error.__cause__ is None


def _phase(status: Status, error: BaseException) -> Phase:
    """The engine does not say when its optimizer begins; the traceback does."""
    names = (os.path.basename(f.filename) for f in traceback.extract_tb(error.__traceback__))
    if status.phase is Phase.STEP and "optimizer.py" in names:
        return Phase.OPTIMIZER
    return status.phase


def read_error(run: RunFolder, rank: int) -> ErrorFile | None:
    """What `write_error` wrote; None if the rank did not."""
    try:
        head, _, text = run.error(rank).read_text("utf-8").partition("\n\n")
    except OSError:
        return None
    values = dict(line.split(": ", 1) for line in head.splitlines())
    return ErrorFile(
        rank=int(values["rank"]),
        host=values["host"],
        step=int(values["step"]),
        phase=values["phase"],
        time_s=float(values["time_s"]),
        is_lost_peer=values["lost_peer"] == "1",
        is_echo=values["echo"] == "1",
        is_input=values["input"] == "1",
        text=text,
    )


# --- all ranks ----------------------------------------------------------------------------------


def rank_ends(
    run: RunFolder, exit_codes: Sequence[int | None], ended: Collection[int] = ()
) -> list[RankEnd]:
    """How every rank ended, from its files and its exit code; `ended` by the launcher."""
    return [
        RankEnd(
            rank=rank,
            status=read_status(run.status(rank)),
            error=read_error(run, rank),
            exit_code=code,
            was_ended=rank in ended,
            stack=_read(run.stack(rank)),
        )
        for rank, code in enumerate(exit_codes)
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first and by itself; None if every rank is done."""
    failed = [end for end in ends if not end.is_done or end.error is not None]
    return min(failed, key=_order, default=None)


def _order(end: RankEnd) -> tuple[int, float]:
    """Own errors, deaths without a word, hangs, echoes, lost peers, those that waited; by time."""
    since_s = end.status.time_s if end.status else 0.0
    if end.error is not None:
        kind = 4 if end.error.is_lost_peer else 3 if end.error.is_echo else 0
        return kind, end.error.time_s
    if end.was_ended:
        return (5 if end.waited else 2), since_s
    was_told_to_end = end.exit_code in (-signal.SIGTERM, -signal.SIGINT)
    return (5 if was_told_to_end else 1), since_s


def last_words(run: RunFolder, ends: Sequence[RankEnd], checkpoint: Path | None) -> str:
    """The block that ends the output of a failed run: at most 15 lines."""
    cause = first_cause(ends)
    if cause is None:
        return "the launch failed, though every rank was done"
    lines = [f"training failed: {where(cause)}"]
    lines += [f"    {line}" for line in _what(cause)]
    lines += _files(run, cause, ends)
    if checkpoint is not None:
        lines.append(f"the same command goes on from {checkpoint}")
    return "\n".join(lines)


def headline(end: RankEnd) -> str:
    """How a rank failed, in one line."""
    return f"{where(end)}: {_what(end)[-1].strip()}"


def where(end: RankEnd) -> str:
    """The rank, its host, step and phase."""
    if end.error is not None:
        place = f"host {end.error.host}, step {end.error.step}, phase {end.error.phase}"
    elif end.status is not None:
        place = f"host {end.status.host}, step {end.status.step}, phase {end.status.phase}"
    else:
        place = "before it reported any phase"
    return f"rank {end.rank}, {place}"


def _what(end: RankEnd) -> list[str]:
    if end.error is not None:
        lines = [line for line in end.error.text.splitlines() if line.strip(" ^~")]
        hint = [_LESS_MEMORY] if _OUT_OF_MEMORY.search(end.error.text) else []
        return lines[-LAST_LINES + len(hint) :] + hint
    if end.was_ended:
        return list(_hang_words(end))
    code = end.exit_code
    if code is not None and code < 0:
        return list(_signal_words(-code))
    ending = "ended" if code is None else f"ended with exit code {code}"
    return [f"the process {ending} in the middle of the run without an error"]


def _hang_words(end: RankEnd) -> Iterator[str]:
    """That it hung, and where its main thread was; it comes last in the file."""
    yield "the process hung: it did not go on, and the others waited for it"
    lines = [
        line.strip() for line in end.stack.rpartition("(most recent call first):")[2].splitlines()
    ]
    yield from [line for line in lines if line][: LAST_LINES - 2] or [
        "nor did it answer: it was stopped, or stands in a call of the system"
    ]


def _signal_words(number: int) -> Iterator[str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    yield f"the process was killed by {name}"
    if name == "SIGKILL":
        yield "if nobody sent it, the machine ran out of memory (`dmesg` says so)"
        yield _LESS_MEMORY


def _files(run: RunFolder, cause: RankEnd, ends: Sequence[RankEnd]) -> Iterator[str]:
    if cause.error is not None:
        yield f"traceback: {run.error(cause.rank)}"
    elif cause.stack:
        yield f"stacks: {run.stack(cause.rank)}"
    others = [run.error(end.rank) for end in ends if end.error and end.rank != cause.rank]
    if others:
        names = ", ".join(path.name for path in others[:_LISTED])
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        yield f"other ranks: {names}{more} in {others[0].parent}"
