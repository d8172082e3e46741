"""An engine: requests in, tokens out, under a plan. docs/engine.md says how it is used.

The driver's loop of the scheduler: after each event (a request, an abort, a step that ended) plan
until there is nothing to add; steps are taken in before requests.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from triptych.errors import InputError, Problem, RunError, TriptychError
from triptych.plan.plan import Plan
from triptych.runtime.local import local_ranks
from triptych.serve.core.budget import Allowance
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import Admission, Progress, Reason, Request, State
from triptych.serve.core.scheduler import Load, Scheduler
from triptych.serve.core.step import Took
from triptych.serve.engine.executor import Executor, RankExecutor
from triptych.serve.engine.grammars import Grammars
from triptych.serve.engine.replica import Rank, follow_rank, load_rank
from triptych.serve.engine.sampler import Asked
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.suitable import require_suitable
from triptych.serve.engine.values import Ask, Logprob, Output, PromptLogprob, bare_outputs
from triptych.serve.engine.worker import Done, Work

Clock = Callable[[], float]
_MOST_TOOK = 256  # steps that are remembered until somebody asks


class Engine:
    """Runs one model for many requests; one thread calls all of it.

    Args:
        executor: the ranks.
        limits: sizes, as all ranks have them.
        policy: latency classes.
        end_ids: token ids that end an answer.
        vocab: rows of the vocabulary.
        grammars: checks grammars.
        clock: seconds.
        stack: what is to be closed behind the engine.
        allowance: its part of memory that it shares with other engines.

    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        *,
        policy: Policy | None = None,
        end_ids: frozenset[int] = frozenset(),
        vocab: int = 1 << 31,
        grammars: Grammars | None = None,
        clock: Clock = time.monotonic,
        stack: ExitStack | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, policy, allowance)
        self._executor = executor
        self._end_ids = end_ids
        self._vocab = vocab
        self._grammars = grammars or Grammars(None, end_ids)
        self._clock = clock
        self._stack = stack or ExitStack()
        self._asks: dict[int, Ask] = {}  # the living
        self._asked: dict[int, Asked] = {}
        self._ends: set[int] = set()  # what ends some answer
        self._begun: list[tuple[int, Asked]] = []
        self._ended: list[int] = []
        self._prompts: dict[int, list[PromptLogprob]] = {}
        self._failure: TriptychError | None = None
        self._sizes: deque[tuple[int, int]] = deque()  # of steps in flight: decodes, prompt tokens
        self._took: deque[Took] = deque(maxlen=_MOST_TOOK)

    @classmethod
    def open(
        cls,
        folder: Path,
        plan: Plan | None = None,
        settings: EngineSettings | None = None,
        policy: Policy | None = None,
        *,
        is_fresh: bool = False,
        strict: bool = False,
    ) -> Engine:
        """An engine of the model in a folder, with the other ranks of its plan.

        Within a process group that is there already (torchrun) the other ranks must call
        `replica.follow_rank`; else they are started here, from this process if it `is_fresh` (see
        `local_ranks`). Raises TriptychError for what does not fit or cannot be loaded.
        """
        source, settings = ModelSource.open(folder), settings or EngineSettings()
        stack = ExitStack()
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if plan is not None and plan.world_size > 1 and not dist.is_initialized():
            processes = plan.world_size
            require_suitable(plan, source.model(), processes)
            follow = partial(follow_rank, folder, plan, settings)
            stack.enter_context(local_ranks(processes, follow, is_fresh=is_fresh))
        try:
            rank = load_rank(source, plan, settings, processes, strict=strict)
        except BaseException as error:
            stack.__exit__(type(error), error, error.__traceback__)
            raise
        return cls.of(rank, RankExecutor(rank.worker), policy=policy, stack=stack)

    @classmethod
    def of(
        cls,
        rank: Rank,
        executor: Executor,
        *,
        policy: Policy | None = None,
        stack: ExitStack | None = None,
        allowance: Allowance | None = None,
    ) -> Engine:
        """An engine of a rank 0 that is loaded."""
        return cls(
            executor,
            rank.limits,
            policy=policy,
            end_ids=rank.source.end_tokens(),
            vocab=rank.model.vocab,
            grammars=rank.grammars,
            stack=stack,
            allowance=allowance,
        )

    # ---- requests -----------------------------------------------------------------------------

    def add_request(self, ask: Ask, arrival_s: float | None = None) -> Admission:
        """Takes a request in, or says why not; `arrival_s` on the engine's clock, else now.

        Raises:
            InputError: for values that cannot work whatever else is there.
            RunError: if a rank is lost.

        """
        self._require_life()
        self._check(ask)
        now_s = self._clock()
        sampling = ask.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        request = Request(
            id=ask.id,
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            n=ask.n,
            latency_class=ask.latency_class,
            arrival_s=now_s if arrival_s is None else arrival_s,
            salt=secrets.token_bytes(16) if sampling.prompt_logprobs else ask.salt,
        )
        admission = self.scheduler.admit(request, now_s)
        if admission.state is State.WAITING:
            ends = frozenset() if sampling.ignores_end else self._end_ids
            counted = tuple(ask.prompt) if sampling.repetition_penalty != 1 else ()
            asked = Asked(sampling, ends | sampling.stop_ids, counted)
            self._ends |= asked.end_ids
            self._asks[ask.id], self._asked[ask.id] = ask, asked
            self._begun.append((ask.id, asked))
            self.plan()
        return admission

    def abort(self, request_id: int) -> int:
        """Ends all answers of a request; returns how many lived. Nothing more comes for it."""
        found = self.scheduler.abort(request_id)
        self._forget(request_id)
        self.plan()
        return found

    def stop(self, request_id: int, continuation: int) -> bool:
        """Ends one answer whose text is complete; False if it has ended."""
        found = self.scheduler.stop(request_id, continuation)
        self._forget_ended(request_id)
        self.plan()
        return found

    # ---- steps --------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request lives or a step is in flight."""
        return bool(self._asks or self.scheduler.flights)

    @property
    def load(self) -> Load:
        """How busy it is."""
        return self.scheduler.load

    def took(self) -> Sequence[Took]:
        """The steps that ended since this was asked last."""
        found = list(self._took)
        self._took.clear()
        return found

    def fileno(self) -> int:
        """Readable when a step has ended."""
        return self._executor.fileno()

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """What the oldest step in flight brought; empty if it takes longer than the time-out.

        Raises RunError if a rank is lost.
        """
        self._require_life()
        is_idle = not self.scheduler.flights  # then only the end of a rank may come
        try:
            done = self._executor.collect(0 if is_idle else timeout_s)
        except BaseException as error:
            raise self._lost(error) from error
        return [] if done is None else self._complete(done)

    def stream(self, asks: Iterable[Ask]) -> Iterator[Output]:
        """The outputs of many requests, which wait their turn here, until all have ended.

        Raises InputError for a request that is refused for good.
        """
        for ask in asks:
            while (admission := self.add_request(ask)).state is State.REFUSED:
                refusal = admission.refusal
                assert refusal is not None
                if refusal.retry_after_s is None:
                    raise InputError(f"request {ask.id}: {refusal.message}")
                yield from self.step()
            if admission.state is State.FINISHED:
                for continuation in range(ask.n):
                    yield Output(ask.id, continuation, None, Reason.LENGTH)
        while self.is_busy:
            yield from self.step()

    def tell_ranks(self, message: bytes) -> None:
        """Ends the steps, and sends a last message to ranks that were not started here."""
        self._executor.close(message)

    def leave(self) -> None:
        """Ends this model only: its ranks are shared."""
        self._executor.close()

    def close(self) -> None:
        """Ends all ranks."""
        self._executor.close()
        self._stack.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within -------------------------------------------------------------------------------

    def plan(self) -> None:
        """Plans and submits all that may be in flight; also when shared memory came free."""
        while (step := self.scheduler.plan(self._clock())) is not None:
            completed = self.scheduler.flights[0].step_id - 1
            work = Work(step, tuple(self._begun), tuple(self._ended), completed)
            self._begun, self._ended = [], []
            prompt_tokens = self.scheduler.flights[-1].prefill_tokens
            self._sizes.append((len(step.decodes), prompt_tokens))
            self._executor.submit(work)

    def _complete(self, done: Done) -> list[Output]:
        if done.prompt:
            self._take_prompts(done)
        self._took.append(Took(*self._sizes.popleft(), done.seconds))
        stopped = self._stopped(done.tokens)
        progress = self.scheduler.complete(done.step_id, done.tokens, self._clock(), stopped)
        self.plan()
        outputs = bare_outputs(progress.answers, progress.tokens)
        if progress.finished or done.chances or self._prompts:
            self._add_details(outputs, progress, done)
        for finished in progress.finished:
            self._forget_ended(finished.request_id)
        return outputs

    def _stopped(self, tokens: Sequence[int]) -> Collection[int]:
        """The places of tokens that end their answers."""
        if self._ends.isdisjoint(tokens):
            return ()
        found = set()
        for place, sequence in enumerate(self.scheduler.flights[0].samplers):
            asked = self._asked.get(sequence.request.id)
            if asked is not None and tokens[place] in asked.end_ids:
                found.add(place)
        return found

    def _add_details(self, outputs: list[Output], progress: Progress, done: Done) -> None:
        """How answers end, and what the model thought of tokens."""
        reasons = {(f.request_id, f.continuation): f.reason for f in progress.finished}
        for number, (answer, place) in enumerate(
            zip(progress.answers, progress.places, strict=True)
        ):
            changes: dict[str, Any] = {}
            if answer in reasons:
                changes["finish"] = reasons[answer]
            if (found := done.chances.get(place)) is not None:
                top = tuple(Logprob(*pair) for pair in found.top)
                changes |= {"logprob": found.logprob, "top": top}
            if self._prompts and answer[1] == 0 and answer[0] in self._prompts:
                changes["prompt"] = tuple(self._prompts.pop(answer[0]))
            if changes:
                outputs[number] = outputs[number]._replace(**changes)

    def _take_prompts(self, done: Done) -> None:
        """Collects what the model thought of prompts; again after a preemption is too late."""
        for request_id, position, token, chance in done.prompt:
            ask = self._asks.get(request_id)
            if ask is None or position >= len(ask.prompt):
                continue
            found = self._prompts.setdefault(request_id, [PromptLogprob(ask.prompt[0], None)])
            if position == len(found):
                top = tuple(Logprob(*pair) for pair in chance.top)
                found.append(PromptLogprob(token, chance.logprob, top))

    def _forget_ended(self, request_id: int) -> None:
        if request_id not in self.scheduler.book.living:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        self._prompts.pop(request_id, None)
        if self._asks.pop(request_id, None) is not None:
            del self._asked[request_id]
            if any(begun == request_id for begun, _ in self._begun):
                self._begun = [pair for pair in self._begun if pair[0] != request_id]
            else:
                self._ended.append(request_id)

    def _check(self, ask: Ask) -> None:
        sampling, problems = ask.sampling, []
        if ask.id in self._asks:
            problems.append(Problem(f"request {ask.id}", "lives already", "another number"))
        named = {"prompt": ask.prompt, "logit_bias": sampling.logit_bias, "stop": sampling.stop_ids}
        for name, ids in named.items():
            wrong = sorted({i for i in ids if not 0 <= i < self._vocab})
            if wrong:
                what = f"{name} has token {wrong[0]}"
                works = f"from 0 to {self._vocab - 1}, the rows of the vocabulary"
                problems.append(Problem(what, works=works))
        if problems:
            raise InputError(problems)
        self._grammars.check(sampling.grammar)

    def _require_life(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _lost(self, error: BaseException) -> TriptychError:
        """What ended a rank, as an error of ours; the others are ended too."""
        try:
            self._stack.__exit__(type(error), error, error.__traceback__)
        except TriptychError as known:
            self._failure = known
        if self._failure is None and isinstance(error, TriptychError):
            self._failure = error
        self._failure = self._failure or RunError(f"a rank failed: {error!r}")
        return self._failure
