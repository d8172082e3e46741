"""The loop of one rank, with a bigram model for an engine."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from token_samples import stream
from torch.nn import functional

from triptych.errors import RunError
from triptych.plan.share import Share
from triptych.runtime.data.live import LiveBytes
from triptych.runtime.engine import MicroBatch
from triptych.runtime.scaling import Scaling
from triptych.schedule.timeline import Timeline
from triptych.train.data import EvaluationData, TrainingData
from triptych.train.learning_rate import LearningRate
from triptych.train.loop import Lengths, Loop, NonFinite
from triptych.train.metrics import Metrics
from triptych.train.progress import Silent
from triptych.train.result import Position, Summary
from triptych.train.samples import StreamSamples
from triptych.train.status import StatusFile
from triptych.train.stop import StopRequest

VOCAB = 11


@dataclass
class Step:
    loss: float
    grad_norm: float
    tokens: int
    router: None = None
    time_s: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    scaling: Scaling | None = None
    flagged: bool = False


class Bigram:
    """A table of logits by the token before, trained by plain gradient descent."""

    def __init__(self, bad_step: int | None = None) -> None:
        self.table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64, requires_grad=True)
        self.rates: list[float] = []
        self.bad_step = bad_step

    def _loss(self, microbatches: Sequence[MicroBatch]) -> tuple[torch.Tensor, int]:
        ids = torch.cat([m.input_ids for m in microbatches]).flatten()
        labels = torch.cat([m.labels for m in microbatches]).flatten()
        total = functional.cross_entropy(self.table[ids], labels, reduction="sum")
        return total, int((labels != -100).sum())

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> Step:
        self.rates.append(learning_rate)
        total, tokens = self._loss(microbatches)
        (gradient,) = torch.autograd.grad(total / tokens, self.table)
        with torch.no_grad():
            self.table -= learning_rate * gradient
        loss = math.nan if len(self.rates) == self.bad_step else total.item() / tokens
        return Step(loss, float(gradient.norm()), tokens, flagged=flag)

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> tuple[float, int]:
        total, tokens = self._loss(microbatches)
        return total.item(), tokens

    def any_rank(self, flag: bool) -> bool:
        return flag

    def non_finite(self) -> list[str]:
        return ["table"]

    def timeline(self) -> Timeline:
        return Timeline((), 1)

    def differing_replicas(self) -> list[str]:
        return []

    def live_bytes(self) -> LiveBytes:
        return LiveBytes(*range(7))

    def all_spans(self) -> list[tuple[int, str, float, float]]:
        step = len(self.rates)
        return [(0, "0F0", step, step + 0.5), (1, "recv", step, step + 0.25)]


class Memory:
    def share(self) -> None: ...

    def own_bytes(self) -> int:
        return 1

    def largest_bytes(self) -> int:
        return 1


@dataclass
class Saver:
    saved: list[tuple[int, int]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    unseen: int = 0

    @property
    def newest(self) -> Path | None:
        return Path(f"step-{self.saved[-1][0]}") if self.saved else None

    def save(
        self, position: Position, eval_loss: float | None = None, *, waits: bool = False
    ) -> None:
        self.saved.append((position.step, position.samples))
        self.unseen = position.unseen
        self.waited += [position.step] if waits else []


@dataclass
class Stops(Saver):
    at: int = 0

    def save(
        self, position: Position, eval_loss: float | None = None, *, waits: bool = False
    ) -> None:
        super().save(position, eval_loss, waits=waits)
        if position.step == self.at:
            raise KeyboardInterrupt


@dataclass
class Run:
    engine: Bigram
    saver: Saver
    summary: Summary
    lines: list[str]


def run(
    folder: Path,
    *,
    steps: int = 10,
    engine: Bigram | None = None,
    start: Position | None = None,
    saver: Saver | None = None,
    lag: int = 0,
    reporter: Silent | None = None,
    non_finite: NonFinite | None = None,
    stop: StopRequest | None = None,
    **lengths: Any,
) -> Run:
    engine, saver = engine or Bigram(), saver or Saver()
    tokens = [i * 7 % VOCAB for i in range(400)]
    data, held_out = (StreamSamples(stream(part), 8) for part in (tokens, tokens[:60]))
    share = Share(microbatch=2)
    loop = Loop(
        engine,
        lengths=Lengths(steps=steps, global_batch=4, **lengths),
        rate=LearningRate(peak=5.0, minimum=0.0, warmup_steps=2, total_steps=steps),
        training=TrainingData([data], global_batch=4, share=share, seed=0),
        evaluation=EvaluationData(held_out, global_batch=4, share=share),
        saver=saver,
        memory=Memory(),
        status=StatusFile(folder / "status" / "rank-0"),
        reporter=reporter or Silent(),
        metrics=Metrics(folder / "metrics.jsonl"),
        lag=lag,
        non_finite=non_finite,
        stop=stop,
    )
    summary = loop.run(start or Position())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Run(engine, saver, summary, lines)


def test_the_loss_falls_to_that_of_a_text_without_doubt(tmp_path: Path) -> None:
    summary = run(tmp_path, steps=60).summary
    assert summary.loss is not None and summary.loss < 0.6 < math.log(VOCAB)
    assert summary.eval_loss is not None and summary.eval_loss < 0.6


def test_it_evaluates_and_saves_when_it_is_time_and_at_the_end(tmp_path: Path) -> None:
    done = run(tmp_path, steps=10, eval_every=4, save_every=3)
    assert done.saver.saved == [(3, 12), (6, 24), (9, 36), (10, 40)]
    evaluated = [line.split(",")[0] for line in done.lines if "eval_loss" in line]
    assert evaluated == ['{"step": 0', '{"step": 4', '{"step": 8', '{"step": 10']
    assert done.summary.checkpoint == Path("step-10")
    assert done.saver.waited == [10]  # the others are written beside the training


def test_every_token_of_evaluation_text_counts_once(tmp_path: Path) -> None:
    """User case pub_015."""
    assert all('"eval_tokens": 59' in x for x in run(tmp_path).lines if "eval_loss" in x)


def test_a_run_in_two_parts_is_the_unbroken_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps=10)
    engine, stops = Bigram(), Stops(at=6)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", steps=10, engine=engine, saver=stops, save_every=2)
    step, samples = stops.saved[-1]
    run(tmp_path / "parts", steps=10, engine=engine, start=Position(step, samples))
    assert torch.equal(engine.table, whole.engine.table)


def test_a_resumed_run_sees_the_rates_and_samples_that_were_left(tmp_path: Path) -> None:
    """User case pub_017."""
    whole = run(tmp_path / "whole", steps=10)
    rest = run(tmp_path / "rest", steps=10, start=Position(6, 24))
    assert rest.engine.rates == whole.engine.rates[6:]
    assert next(line for line in rest.lines if '"loss"' in line).startswith('{"step": 7,')


@pytest.mark.parametrize("lag", [0, 1])
def test_results_read_late_are_the_same_results(tmp_path: Path, lag: int) -> None:
    done = run(tmp_path, steps=7, lag=lag, save_every=3)
    steps = [line.split(",")[0] for line in done.lines if '"loss"' in line]
    assert steps == [f'{{"step": {i}' for i in range(1, 8)]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(tmp_path: Path, lag: int) -> None:
    saver = Saver()
    with pytest.raises(RunError, match="step 6: loss nan") as caught:
        run(tmp_path, engine=Bigram(bad_step=6), saver=saver, lag=lag, save_every=2)
    assert saver.saved == [(2, 8), (4, 16)]
    assert "step-4" in str(caught.value)


class Overflows(Bigram):
    """Its third step is not applied: the gradients were too large for fp16."""

    def __init__(self, may_help: bool) -> None:
        super().__init__()
        self.may_help = may_help

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> Step:
        done = super().step(microbatches, learning_rate, flag)
        skips = len(self.rates) == 3
        skipped = int(len(self.rates) >= 3)
        done.scaling = Scaling(2.0 ** (16 - skipped), skipped, skips and self.may_help)
        done.grad_norm = math.inf if skips else done.grad_norm
        return done


def test_a_step_that_overflowed_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, steps=4, engine=Overflows(may_help=True))
    steps = [json.loads(line) for line in done.lines if '"loss"' in line]
    assert [line["is_skipped"] for line in steps] == [False, False, True, False]
    assert [line["skipped_steps"] for line in steps] == [0, 0, 1, 1]
    assert steps[-1]["loss_scale"] == 2.0**15


def test_an_overflow_that_no_scale_mends_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"step 3: .*norm inf"):
        run(tmp_path, steps=4, engine=Overflows(may_help=False))


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(("least_s", "warns"), [(1e-9, False), (1e3, True), (None, False)])
def test_pub_110_a_utilisation_above_the_peak_is_doubted_once(
    tmp_path: Path, least_s: float | None, warns: bool
) -> None:
    heard = Heard()
    done = run(tmp_path, steps=4, reporter=heard, least_step_time_s=least_s)
    assert len([text for text in heard.said if "peak_tflops" in text]) == warns
    utilisations = [json.loads(line)["mfu"] for line in done.lines if '"loss"' in line]
    assert all((mfu is None) == (least_s is None) for mfu in utilisations)


def test_every_step_tells_how_long_it_waited_for_data(tmp_path: Path) -> None:
    waits = [json.loads(x)["data_wait_s"] for x in run(tmp_path).lines if '"loss"' in x]
    assert len(waits) == 10 and all(0 < wait_s < 1 for wait_s in waits)


class Unstable(Bigram):
    """Gradients of some steps are not finite, and are not applied."""

    def __init__(self, *bad_steps: int) -> None:
        super().__init__()
        self.bad_steps = bad_steps

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> Step:
        before = self.table.detach().clone()
        done = super().step(microbatches, learning_rate, flag)
        if len(self.rates) in self.bad_steps:
            with torch.no_grad():
                self.table.copy_(before)
            done.grad_norm = math.inf
        return done


def test_steps_with_gradients_that_are_not_finite_are_skipped_under_a_limit(tmp_path: Path) -> None:
    """User case pub_018."""
    skips = NonFinite(policy="skip", limit=2)
    done = run(tmp_path / "some", steps=8, engine=Unstable(2, 3, 6), non_finite=skips)
    assert done.summary.step == 8 and done.saver.unseen == 3
    saver = Saver()
    with pytest.raises(RunError, match=r"step 5: .*norm inf, not finite in table") as caught:
        run(
            tmp_path / "many",
            steps=8,
            engine=Unstable(3, 4, 5),
            non_finite=skips,
            saver=saver,
            save_every=2,
        )
    assert "at most 2 steps in a row" in str(caught.value) and "step-4" in str(caught.value)


class Asks(Unstable):
    """Asks the run to end in its third step."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> Step:
        if len(self.rates) == 2:
            with self.stop.listening():
                os.kill(os.getpid(), signal.SIGUSR1)
        return super().step(microbatches, learning_rate, flag)


@pytest.mark.parametrize(("lag", "end"), [(0, 4), (1, 5)])
def test_a_run_that_is_asked_to_end_saves_at_the_step_where_all_ranks_know_it(
    tmp_path: Path, lag: int, end: int
) -> None:
    """User case pub_106: noted in step 3, told with step 4, read `lag` steps later."""
    stop = StopRequest()
    done = run(tmp_path, steps=9, engine=Asks(stop), stop=stop, lag=lag)
    assert done.summary[::4] == (end, "SIGUSR1") and done.saver.waited == [end]
    steps = [json.loads(line)["step"] for line in done.lines if '"loss"' in line]
    assert steps == list(range(1, end + 1))
