"""What rank 0 shows while it trains: a bar on a terminal, plain lines in a file or a pipe.

Everything goes to stderr: stdout belongs to the command's result.
"""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from triptych.train.metrics import EvaluationRecord, StepRecord
from triptych.units import format_count, format_seconds

_PLAIN_LINES = 20


class Reporter(Protocol):
    """Where rank 0 tells how it goes."""

    def say(self, text: str) -> None:
        """Shows a line that stays."""

    def step(self, record: StepRecord) -> None:
        """Shows that a step is done."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Shows the loss of an evaluation."""

    def close(self) -> None:
        """Leaves the screen as it was found."""


class Silent:
    """The reporter of all ranks but the first."""

    def say(self, text: str) -> None:
        """Shows nothing."""

    def step(self, record: StepRecord) -> None:
        """Shows nothing."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Nothing to do."""


class Lines:
    """One plain line every few steps."""

    def __init__(self, total: int, every: int, stream: TextIO) -> None:
        self._total = total
        self._every = every or max(1, total // _PLAIN_LINES)
        self._stream = stream
        self._begun_at: int | None = None
        self._spent_s = 0.0

    def say(self, text: str) -> None:
        """Writes a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def step(self, record: StepRecord) -> None:
        """Writes a line for the first step, every few and the last."""
        if self._begun_at is None:
            self._begun_at = record.step
        self._spent_s += record.step_time_s
        if record.step in (self._begun_at, self._total) or record.step % self._every == 0:
            mean_s = self._spent_s / (record.step - self._begun_at + 1)
            left_s = (self._total - record.step) * mean_s
            left = f"  left {format_seconds(left_s)}" if left_s else ""
            self.say(
                f"step {record.step}/{self._total}  loss {record.loss:.4f}  {_speed(record)}{left}"
            )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Writes a line."""
        self.say(evaluation_text(record))

    def close(self) -> None:
        """Nothing to do."""


class Bar:
    """A progress bar with loss, speed and the time that is left."""

    def __init__(self, total: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,  # it draws on the cores that train
        )
        self._task: TaskID = self._progress.add_task("", total=total)
        self._started = False

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Moves the bar; the first step draws it."""
        if not self._started:
            self._progress.update(self._task, completed=record.step - 1)
            self._progress.start()
            self._started = True
        text = f"loss {record.loss:.4f}  {_speed(record)}  left"
        self._progress.update(self._task, completed=record.step, description=text)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Writes a line above the bar."""
        self.say(evaluation_text(record))

    def close(self) -> None:
        """Draws the bar a last time and gives the cursor back."""
        self._progress.stop()


def make_reporter(rank: int, total: int, every: int) -> Reporter:
    """The reporter for a rank: nothing but for rank 0, a bar if somebody is watching."""
    if rank > 0:
        return Silent()
    if sys.stderr.isatty():
        return Bar(total, Console(stderr=True))
    return Lines(total, every, sys.stderr)


def evaluation_text(record: EvaluationRecord) -> str:
    """One line about an evaluation."""
    tokens = format_count(record.tokens)
    return f"step {record.step}: evaluation loss {record.loss:.4f} over {tokens} tokens"


def _speed(record: StepRecord) -> str:
    used = "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
    return f"{format_count(record.tokens_per_s)} tokens/s{used}"
