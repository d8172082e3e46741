"""The training loop of one rank: steps, evaluations, checkpoints, metrics.

It sees the engine and the checkpoints through what it calls of them, so that a few lines of a
test can stand for either.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from triptych.errors import RunError
from triptych.runtime.engine import MicroBatch
from triptych.runtime.scaling import Scaling
from triptych.schedule.timeline import Timeline
from triptych.train.data import Arrays, EvaluationData, TrainingData
from triptych.train.learning_rate import LearningRate
from triptych.train.metrics import EvaluationRecord, Metrics, StepRecord
from triptych.train.needs import Memory, Saves, Step, Trains
from triptych.train.progress import Reporter
from triptych.train.result import Position, Summary
from triptych.train.status import Phase, StatusFile
from triptych.train.stop import StopRequest
from triptych.train.trace import RankSpan, Trace

_LISTED = 3  # parameters in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long a run is and what happens how often (0: not in between)."""

    steps: int
    global_batch: int
    eval_every: int = 0
    save_every: int = 0
    check_every: int = 0
    trace_steps: frozenset[int] = frozenset()
    least_step_time_s: float | None = None  # at the devices' peak; None if that is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """What happens when gradients are not finite: `skip` at most `limit` steps in a row."""

    policy: Literal["stop", "skip"] = "stop"
    limit: int = 10


class _Waiting(NamedTuple):
    """A step that was issued and whose numbers were not read yet."""

    step: int
    learning_rate: float
    data_wait_s: float
    result: Step


class Loop:
    """One rank's loop over a run.

    `metrics` is where rank 0 writes and None on other ranks. A result is read `lag` steps after it
    was issued: 1 on a GPU, so that the host runs ahead. `sampler` shows what the model says after
    so many steps; `trace` takes the spans of chosen steps, on rank 0.
    """

    def __init__(
        self,
        engine: Trains,
        *,
        lengths: Lengths,
        rate: LearningRate,
        training: TrainingData,
        evaluation: EvaluationData | None,
        saver: Saves,
        memory: Memory,
        status: StatusFile,
        reporter: Reporter,
        metrics: Metrics | None,
        lag: int = 0,
        sampler: Callable[[int], None] | None = None,
        trace: Trace | None = None,
        non_finite: NonFinite | None = None,
        stop: StopRequest | None = None,
        between: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._engine = engine
        self._lengths = lengths
        self._rate = rate
        self._training = training
        self._evaluation = evaluation
        self._saver = saver
        self._memory = memory
        self._status = status
        self._reporter = reporter
        self._metrics = metrics
        self._lag = lag
        self._sampler, self._trace = sampler, trace
        self._non_finite = non_finite or NonFinite()
        self._stop = stop or StopRequest()
        self._between = between
        self._stopping = False  # all ranks know that one of them was asked to end
        self._unseen = self._skipped_in_a_row = 0
        self._waiting: deque[_Waiting] = deque()
        self._last_end_s = 0.0
        self._loss: float | None = None
        self._doubts_peak = False
        self._evaluated: EvaluationRecord | None = None
        self.timeline: Timeline | None = None
        """Of the last step, once the run is through."""

    def run(self, start: Position) -> Summary:
        """Trains from `start` to the last step; evaluates at both ends, saves after the last.

        Asked to end, it finishes the step (or the batch of an evaluation), saves and returns.

        Raises RunError when loss or gradient norm is not finite, before anything is saved.
        """
        self._unseen = start.unseen
        self._evaluate(start.step)
        position = start
        self._last_end_s = time.perf_counter()
        while position.step < self._lengths.steps and not self._stopping:
            position = self._step(position)
            self._after(position, start)
        if position.step < self._lengths.steps:
            self._save(position, waits=True)
        self._memory.share()
        eval_loss = self._evaluated.loss if self._evaluated else None
        stopped_by = self._stop.words if position.step < self._lengths.steps else None
        return Summary(position.step, self._loss, eval_loss, self._saver.newest, stopped_by)

    # ---- one step ------------------------------------------------------------------------------

    def _step(self, position: Position) -> Position:
        step = position.step + 1
        self._status.set(step, Phase.DATA)
        begun_s = time.perf_counter()
        microbatches = [
            _on_host(arrays) for arrays in self._training.microbatches(position.samples)
        ]
        data_wait_s = time.perf_counter() - begun_s
        learning_rate = self._rate.at(step)
        self._status.set(step, Phase.STEP)
        result = self._engine.step(microbatches, learning_rate, self._stop.is_made)
        self._waiting.append(_Waiting(step, learning_rate, data_wait_s, result))
        self._read(self._lag)
        return Position(step, position.samples + self._lengths.global_batch)

    def _read(self, leave: int) -> None:
        """Reads the results of all steps but the last `leave`."""
        while len(self._waiting) > leave:
            waiting = self._waiting.popleft()
            record = self._record(waiting)
            self._stopping |= waiting.result.flagged
            self._require_finite(record)
            if record.is_skipped:
                self._reporter.say(_skipped(record))
            if record.mfu is not None and record.mfu > 1 and not self._doubts_peak:
                self._doubts_peak = True
                self._reporter.say(_too_fast(record))
            self._loss = record.loss
            if self._metrics is not None:
                self._metrics.step(record)
            self._reporter.step(record)

    def _record(self, waiting: _Waiting) -> StepRecord:
        result = waiting.result
        loss, norm = result.loss, result.grad_norm  # on a GPU this waits for the step
        now_s = time.perf_counter()
        step_time_s, self._last_end_s = now_s - self._last_end_s, now_s
        return StepRecord(
            step=waiting.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=waiting.learning_rate,
            tokens=result.tokens,
            step_time_s=step_time_s,
            data_wait_s=waiting.data_wait_s,
            mfu=self._utilisation(step_time_s),
            time_s=result.time_s,
            bytes_sent=result.bytes_sent,
            memory_bytes=self._memory.largest_bytes(),
            router=result.router._asdict() if result.router is not None else None,
            **_scaled(result.scaling),
        )

    def _utilisation(self, step_time_s: float) -> float | None:
        least_s = self._lengths.least_step_time_s
        return least_s / step_time_s if least_s is not None and step_time_s > 0 else None

    def _require_finite(self, record: StepRecord) -> None:
        """Returns if the step was applied or may be skipped. Raises RunError otherwise."""
        applied = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
        if applied or (math.isfinite(record.loss) and record.is_skipped):
            self._skipped_in_a_row = 0
            return
        may_skip = self._non_finite.policy == "skip" and not math.isfinite(record.grad_norm)
        self._unseen += 1
        self._skipped_in_a_row += 1
        what = (
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}"
            f"{_in_what(self._engine.non_finite())}"
        )
        if not may_skip or self._skipped_in_a_row > self._non_finite.limit:
            raise RunError(f"{what}\n{self._rule_of_skipping(may_skip)}")
        self._reporter.say(f"{what}: skipped ({self._skipped_in_a_row} in a row)")

    def _rule_of_skipping(self, may_skip: bool) -> str:
        rule = "both are finite; the step was not applied and nothing was saved after it"
        if may_skip:
            rule = f"at most {self._non_finite.limit} steps in a row are skipped"
        return (
            f"    rule: {rule}\n"
            "    works: a lower learning_rate or longer warmup_steps, from the last checkpoint "
            f"({self._saver.newest or 'there is none'})"
        )

    # ---- between steps -------------------------------------------------------------------------

    def _after(self, position: Position, start: Position) -> None:
        """Evaluates and saves if it is time to; neither counts into the next step's time."""
        evaluates = self._is_due(position.step, self._lengths.eval_every)
        saves = self._is_due(position.step, self._lengths.save_every)
        checks = _is_multiple(position.step, self._lengths.check_every)
        traces = position.step in self._lengths.trace_steps
        if position.step == start.step + 2 or evaluates or saves or checks or traces:
            self._read(0)
            self._memory.share()
        if position.step == start.step + 2 and self._metrics is not None:
            terms = self._engine.live_bytes()._asdict()
            self._metrics.memory(position.step, terms | {"peak": self._memory.own_bytes()})
        if position.step == self._lengths.steps:
            self.timeline = self._engine.timeline()  # before an evaluation adds to it
        if traces:
            spans = [RankSpan(*span) for span in self._engine.all_spans()]
            if self._trace is not None:
                self._trace.add(position.step, spans)
        if checks:
            self._check_replicas(position.step)
        if evaluates:
            self._evaluate(position.step)
        if saves:
            self._save(position, waits=position.step == self._lengths.steps)
        self._between(position.step)
        if evaluates or saves or checks or traces:
            self._last_end_s = time.perf_counter()

    def _save(self, position: Position, *, waits: bool) -> None:
        self._read(0)
        self._status.set(position.step, Phase.SAVE)
        at = self._evaluated
        eval_loss = at.loss if at is not None and at.step == position.step else None
        self._saver.save(position._replace(unseen=self._unseen), eval_loss, waits=waits)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._lengths.steps or _is_multiple(step, every)

    def _check_replicas(self, step: int) -> None:
        differing = self._engine.differing_replicas()
        if differing:
            more = len(differing) - _LISTED
            lines = [*differing[:_LISTED], *([f"and {more} more"] if more > 0 else [])]
            raise RunError(
                f"step {step}: copies of {len(differing)} parameters differ over the ranks\n"
                + "".join(f"    {line}\n" for line in lines)
                + "    rule: ranks that hold the same parameters hold the same bits\n"
                f"    works: the last checkpoint ({self._saver.newest or 'there is none'}) on "
                "other devices: a difference means that one of them is faulty"
            )
        self._reporter.say(f"step {step}: all replicas are bitwise equal")

    def _evaluate(self, step: int) -> None:
        self._status.set(step, Phase.EVALUATE)
        if self._evaluation is not None:
            self._measure(step, self._evaluation)
        if self._sampler is not None:
            self._sampler(step)

    def _measure(self, step: int, evaluation: EvaluationData) -> None:
        loss_sum, tokens = 0.0, 0
        for batch in evaluation.batches():
            self._stopping |= self._engine.any_rank(self._stop.is_made)
            if self._stopping:
                return
            batch_loss, batch_tokens = self._engine.evaluate([_on_host(arrays) for arrays in batch])
            loss_sum += batch_loss
            tokens += batch_tokens
        record = EvaluationRecord(step, loss_sum / max(1, tokens), tokens)
        self._evaluated = record
        if self._metrics is not None:
            self._metrics.evaluation(record)
        self._reporter.evaluation(record)


def _scaled(scaling: Scaling | None) -> dict[str, Any]:
    return {} if scaling is None else scaling._asdict()


def _skipped(record: StepRecord) -> str:
    return (
        f"step {record.step}: gradients overflowed and were not applied; the loss scale is now "
        f"{record.loss_scale:g} ({record.skipped_steps} steps skipped so far)"
    )


def _too_fast(record: StepRecord) -> str:
    return (
        f"warning: step {record.step} has a utilisation of {record.mfu:.0%}: the peak that it is "
        "measured against is too low; [run] peak_tflops states the right one"
    )


def _in_what(names: Sequence[str]) -> str:
    """Where gradients are not finite; empty if that is not known any more."""
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f", not finite in {', '.join(names[:_LISTED])}{more}"


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _on_host(arrays: Arrays) -> MicroBatch:
    """A micro-batch as tensors; the engine brings them to its device."""
    return MicroBatch(
        input_ids=torch.from_numpy(arrays.input_ids),
        labels=torch.from_numpy(arrays.labels),
        documents=arrays.documents,
    )
