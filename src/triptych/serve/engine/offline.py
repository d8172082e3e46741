"""Offline generation under a plan: many prompts at once, on the engine that serves."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from triptych.errors import InputError, Problem
from triptych.plan.plan import Plan
from triptych.serve.core.request import Reason
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.executor import follow
from triptych.serve.engine.replica import load_rank
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.stops import StopText
from triptych.serve.engine.text import TextStream
from triptych.serve.engine.values import Ask, Output
from triptych.serve.engine.worker import receive_bytes

_log = logging.getLogger(__name__)

OnText = Callable[[int, str], None]
"""Gets the number of a prompt and a piece of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The continuation of one prompt."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]  # without the token that ended it
    finish: str  # "stop": the model, or a stop string, ended the text; "length": the limit did


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of every prompt."""

    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=lambda: Sampling(seed=0))
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            what = f"max_new_tokens = {self.max_new_tokens}"
            raise InputError(Problem(what, works="from 1"))
        StopText(self.stop)

    def of(self, index: int) -> Sampling:
        """The sampling of one prompt, with draws of its own."""
        return replace(self.sampling, seed=(self.sampling.seed or 0) * 1_000_003 + index)


def generate(
    model_dir: Path,
    prompts: Sequence[str],
    plan: Plan | None = None,
    wanted: Wanted | None = None,
    *,
    settings: EngineSettings | None = None,
    on_text: OnText | None = None,
    is_fresh: bool = False,
    strict: bool = False,
) -> list[Generation]:
    """Continues each prompt. The ranks of the plan are started here, unless they are there already
    (torchrun): then every rank calls this and returns the same.

    Args:
        model_dir: a Hugging Face directory, a checkpoint or a run folder.
        prompts: texts to continue.
        plan: tensor and pipeline degrees and the dtype; None: one process, dtype as stored.
        wanted: how long and how; None: 64 tokens, the likeliest ones.
        settings: sizes of the engine.
        on_text: gets the number of a prompt and a piece of its text, as it becomes certain. Prompts
            are continued side by side and told in their order: later ones wait for the first.
        is_fresh: nothing was computed with torch in this process yet: ranks are forked from it.
        strict: communicate under strict mode (tests).

    Raises:
        InputError: the model, the plan, the prompts or the settings do not work, all said at once
            for each of them.
        RunError: a rank died.

    """
    wanted, settings = wanted or Wanted(), settings or EngineSettings()
    source = ModelSource.open(model_dir)
    is_launched = dist.is_initialized()  # else the ranks are started here, and hear nothing more
    if is_launched and dist.get_rank() != 0:
        return _follow(source, plan, settings, strict)
    for note in source.notes:
        _log.warning("%s", note)
    with Engine.open(source.folder, plan, settings, is_fresh=is_fresh, strict=strict) as engine:
        try:
            found = Generator(engine, source, wanted, on_text or _nobody_listens).run(prompts)
        except InputError as error:
            if is_launched:
                engine.tell_ranks(pickle.dumps(error))
            raise
        if is_launched:
            engine.tell_ranks(pickle.dumps(found))
    return found


def _follow(
    source: ModelSource, plan: Plan | None, settings: EngineSettings, strict: bool
) -> list[Generation]:
    """The same on another rank of a launch that is not ours."""
    rank = load_rank(source, plan, settings, dist.get_world_size(), strict=strict)
    follow(rank.worker)
    told: list[Generation] | InputError = pickle.loads(receive_bytes(rank.worker.mesh, 0))
    if isinstance(told, InputError):
        raise told
    return told


def _nobody_listens(_: int, __: str) -> None:
    return None


class Generator:
    """Continues texts with an engine."""

    def __init__(
        self, engine: Engine, source: ModelSource, wanted: Wanted, on_text: OnText
    ) -> None:
        self._engine = engine
        self._tokenizer = source.tokenizer()
        self._end_ids = source.end_tokens()
        self._wanted = wanted
        self._tell = _InOrder(on_text)
        self._vocab = source.model().vocab

    def run(self, prompts: Sequence[str]) -> list[Generation]:
        """Continues each prompt; raises InputError that lists every one that cannot be run."""
        encoded = self.encode(prompts)
        answers = [_Answer(TextStream(self._tokenizer, i), self._wanted.stop) for i in encoded]
        for output in self._engine.stream(self._asks(encoded)):
            answer = answers[output.request_id]
            self._take(answer, output)
            if answer.finish is not None and output.finish is None:
                self._engine.stop(output.request_id, 0)
        return [
            Generation(
                prompt=prompt,
                text=answer.text,
                token_ids=tuple(answer.token_ids),
                finish=answer.finish or "length",
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts; raises InputError that lists every one that cannot be run."""
        encoded = [list(self._tokenizer.encode(prompt).ids) for prompt in prompts]
        problems = [
            Problem(f"prompt {index}: {problem}")
            for index, ids in enumerate(encoded)
            for problem in self._faults(ids)
        ]
        if problems:
            raise InputError(problems)
        return encoded

    def _faults(self, ids: Sequence[int]) -> Iterator[str]:
        context = self._engine.limits.context
        if not ids:
            yield "is empty, there is nothing to continue"
        if len(ids) >= context:
            yield f"has {len(ids)} tokens, the model has {context} positions"
        if any(token_id >= self._vocab for token_id in ids):
            yield f"has token {max(ids)}, the model has {self._vocab} rows in its embedding"

    def _asks(self, encoded: Sequence[Sequence[int]]) -> Iterator[Ask]:
        for index, ids in enumerate(encoded):
            room = self._engine.limits.context - len(ids)
            count = min(self._wanted.max_new_tokens, room)
            yield Ask(id=index, prompt=ids, max_tokens=count, sampling=self._wanted.of(index))

    def _take(self, answer: _Answer, output: Output) -> None:
        if output.token is None or answer.finish is not None:
            return
        ends = output.token in self._end_ids and not self._wanted.sampling.ignores_end
        ends = ends or output.token in self._wanted.sampling.stop_ids
        piece = "" if ends else answer.add(output.token)
        if answer.stops.is_stopped or output.finish is Reason.STOP:
            answer.finish = "stop"
        elif output.finish is not None:
            answer.finish = "length"
        if answer.finish is not None:
            piece += answer.end()
        answer.text += piece
        self._tell.add(output.request_id, piece, answer.finish is not None)


class _InOrder:
    """Tells pieces of several texts one text after the other."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()
        self._turn = 0

    def add(self, index: int, piece: str, is_last: bool) -> None:
        """Takes in a piece; tells what has its turn."""
        self._waiting[index] = self._waiting.get(index, "") + piece
        if is_last:
            self._ended.add(index)
        while self._turn in self._waiting:
            if told := self._waiting[self._turn]:
                self._waiting[self._turn] = ""
                self._on_text(self._turn, told)
            if self._turn not in self._ended:
                return
            del self._waiting[self._turn]
            self._turn += 1


class _Answer:
    """A text on its way."""

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self.stops = StopText(stop)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._stream = stream

    def add(self, token: int) -> str:
        """What a token adds to what may be shown."""
        self.token_ids.append(token)
        return self.stops.add(self._stream.add(token))

    def end(self) -> str:
        """What was not certain before."""
        if self.stops.is_stopped:
            return ""
        return self.stops.add(self._stream.finish()) + self.stops.finish()
