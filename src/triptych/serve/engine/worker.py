"""What a rank does with a step: its rows through this rank's part of the model, and tokens.

The last stage's first rank samples. Its tokens go to the ranks of the first stage, which need them
as inputs before the step that comes as many steps later as there are stages (or sooner, if the
scheduler knew them when it planned), and what it sampled to rank 0, where the scheduler is.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from triptych.plan.plan import Plan
from triptych.plan.ranks import axis_groups
from triptych.runtime.comm import Pending
from triptych.runtime.mesh import Mesh
from triptych.serve.core.limits import Limits
from triptych.serve.core.step import Step
from triptych.serve.core.tables import Ints, Rows, Tables
from triptych.serve.engine.cache import Pool
from triptych.serve.engine.sampler import Asked, Chance, Drawn, Sampler, chance
from triptych.serve.engine.stage import Stage


class Work(NamedTuple):
    """What is broadcast for a step."""

    step: Step
    begun: tuple[tuple[int, Asked], ...] = ()  # requests that are new
    ended: tuple[int, ...] = ()  # requests that nobody waits for any more
    completed: int = -1  # the last step whose tokens the scheduler knew


class PromptChance(NamedTuple):
    """A prompt token that was computed, and what the model had thought of it."""

    request_id: int
    position: int
    token: int
    chance: Chance


class Done(NamedTuple):
    """What a step brought, in the order of its samples."""

    step_id: int
    tokens: Sequence[int]
    chances: Mapping[int, Chance] = {}  # by place among the samples, for requests that ask
    prompt: Sequence[PromptChance] = ()
    seconds: float = 0.0  # from its start on rank 0 until its tokens were there


class Route(NamedTuple):
    """Who samples, and who embeds: global ranks."""

    sampler: int
    first_stage: tuple[int, ...]
    num_stages: int

    @classmethod
    def of(cls, plan: Plan) -> Route:
        """The route of a plan with one replica."""
        pipeline = next(group for group in axis_groups(plan, "pp") if 0 in group)
        tensor = next(group for group in axis_groups(plan, "tp") if 0 in group)
        return cls(pipeline[-1], tuple(tensor), len(pipeline))


class Worker:
    """One rank of an engine. `sampler` is None on all ranks but one."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        route: Route,
        limits: Limits,
        pool: Pool,
        hidden: tuple[int, torch.dtype],
        sampler: Sampler | None,
    ) -> None:
        self.mesh = mesh
        self.route = route
        self._stage = stage
        self._tables = Tables(limits)
        self._pool = pool
        self._hidden, self._dtype = hidden
        self._sampler = sampler
        self._answers: dict[int, tuple[int, int]] = {}  # by slot: request, continuation
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot, if asked for their chances
        self._asked: dict[int, Asked] = {}
        self._last = np.zeros(limits.max_running, np.int64)  # token of each slot
        self._awaited: deque[tuple[int, tuple[int, ...]]] = deque()  # steps and their samples
        self._sending: deque[tuple[int, Pending]] = deque()  # by step
        self._now = 0  # the step that runs
        self._pipeline = mesh.forward[0]
        self._is_first = mesh.coordinates.pp == 0
        self._is_last = mesh.coordinates.pp == route.num_stages - 1
        stage.use(pool)

    def run(self, work: Work) -> Done | None:
        """Runs a step; what it brought if this rank samples."""
        step = work.step
        self._begin(work)
        rows = self._tables.apply(step)
        self._note(step)
        self._pool.copy(step.copies)
        self._now = step.id
        self._clear(step.id - self.route.num_stages)
        ids_R = torch.from_numpy(self._inputs(work, rows))
        with torch.inference_mode():
            hidden_RH = self._forward(ids_R, rows)
            done = self._sample(step, rows, hidden_RH) if self._is_last else None
        self._end(work)
        if done is not None:
            self._tell(rows.samples, done)
        elif self._is_first and self.mesh.rank != 0:
            self._awaited.append((step.id, step.samples))
            if self.route.sampler == 0:  # rank 0 says the tokens before it says the next step
                self.drain(step.id)
        return done

    def learn(self, samples: ArrayLike, tokens: Sequence[int]) -> None:
        """Takes in the tokens of slots, the inputs of their next rows."""
        self._last[np.asarray(samples, np.int64)] = tokens

    def hear(self) -> Done:
        """What the oldest step brought, from the rank that sampled; for rank 0."""
        done: Done = pickle.loads(receive_bytes(self.mesh, self.route.sampler))
        return done

    def drain(self, last_step: int) -> None:
        """Receives the tokens of the steps up to one; for ranks of the first stage but rank 0."""
        while self._awaited and self._awaited[0][0] <= last_step:
            _, samples = self._awaited.popleft()
            if samples:
                tokens = torch.empty(len(samples), dtype=torch.int64)
                self.mesh.world.start_receive(tokens, self.route.sampler).wait()
                self.learn(samples, tokens.tolist())

    def finish(self) -> None:
        """Receives and sends what is under way."""
        self.drain(self._now)
        self._clear(self._now)

    def settle(self) -> None:
        """Waits until all that was sent is taken: when nothing runs. Raises if a rank is lost."""
        self._clear(self._now)

    def send(self, message: bytes, to: int) -> None:
        """Sends bytes to a rank, which may take them later."""
        self._sending += [(self._now, pending) for pending in start_bytes(self.mesh, message, to)]

    def _clear(self, last_step: int) -> None:
        """Forgets what was sent up to a step that all ranks have run or will run by themselves.

        A send ends when the other side takes it: to wait for one at once is a deadlock.
        """
        while self._sending and self._sending[0][0] <= last_step:
            self._sending.popleft()[1].wait()

    # ---- before and after ---------------------------------------------------------------------

    def _begin(self, work: Work) -> None:
        for request_id, asked in work.begun:
            self._asked[request_id] = asked
            if self._sampler is not None:
                self._sampler.begin(request_id, asked)

    def _end(self, work: Work) -> None:
        for request_id in work.ended:
            self._asked.pop(request_id, None)
            if self._sampler is not None:
                self._sampler.end(request_id)

    def _note(self, step: Step) -> None:
        """Keeps whose the slots are."""
        for start in step.started:
            self._answers[start.slot] = (start.request_id, start.continuation)
            self._prompts.pop(start.slot, None)
            asked = self._asked.get(start.request_id)
            if asked is not None and asked.sampling.prompt_logprobs and start.computed == 0:
                self._prompts[start.slot] = start.tokens
        for fork in step.forks:
            self._answers[fork.slot] = (fork.request_id, fork.continuation)

    def _inputs(self, work: Work, rows: Rows) -> Any:
        """Token ids of all rows; those of decodes are what their slots sampled last."""
        step = work.step
        if self._is_first and self.mesh.rank not in (0, self.route.sampler):
            self.drain(max(work.completed, step.id - self.route.num_stages))
        ids = rows.tokens.astype(np.int64)
        decodes = rows.slots[: len(step.decodes)]
        ids[: len(decodes)] = self._last[decodes]
        return ids

    # ---- the model ----------------------------------------------------------------------------

    def _forward(self, ids_R: torch.Tensor, rows: Rows) -> torch.Tensor:
        received = None
        if not self._is_first:
            shape = (len(ids_R), self._hidden)
            empty = torch.empty(shape, dtype=self._dtype, device=self.mesh.device)
            received = self._pipeline.start_receive(empty, self._pipeline.index - 1).wait()
        ids_R = ids_R.to(self.mesh.device)
        hidden_RH = self._stage.forward(ids_R, received, rows, self._tables)
        if not self._is_last:
            sent = hidden_RH.contiguous()
            pending = self._pipeline.start_send(sent, self._pipeline.index + 1)
            self._sending.append((self._now, pending))
        return hidden_RH

    def _sample(self, step: Step, rows: Rows, hidden_RH: torch.Tensor) -> Done | None:
        """The head on the last rows only, and a token for each."""
        drawn = Drawn([], {})
        if len(rows.samples):
            at = torch.from_numpy(rows.sample_rows).to(hidden_RH.device, torch.int64)
            logits_NV = self._stage.logits(hidden_RH[at])
            if self._sampler is not None:
                answers = [self._answers[slot] for slot in step.samples]
                drawn = self._sampler.sample(logits_NV, answers)
        prompt = self._prompt_chances(step, rows, hidden_RH) if self._prompts else []
        return None if self._sampler is None else Done(step.id, *drawn, prompt)

    def _prompt_chances(
        self, step: Step, rows: Rows, hidden_RH: torch.Tensor
    ) -> list[PromptChance]:
        """What the model thought of prompt tokens, for requests that ask: the head on all rows."""
        found: list[PromptChance] = []
        for number, chunk in enumerate(step.chunks, start=len(step.decodes)):
            tokens = self._prompts.get(chunk.slot)
            if tokens is None:
                continue
            first = int(rows.starts[number])
            targets = tokens[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
            logits = self._stage.logits(hidden_RH[first : first + len(targets)])
            request_id = self._answers[chunk.slot][0]
            count = self._asked[request_id].sampling.logprobs or 0
            for offset, token in enumerate(targets):
                about = request_id, chunk.start + 1 + offset, token
                found.append(PromptChance(*about, chance(logits[offset], token, count)))
        return found

    def _tell(self, samples: Ints, done: Done) -> None:
        """Sends what was sampled to those who need it."""
        if self.mesh.rank in self.route.first_stage:
            self.learn(samples, done.tokens)
        others = [rank for rank in self.route.first_stage if rank not in (0, self.mesh.rank)]
        if others and done.tokens:
            sent = torch.tensor(done.tokens, dtype=torch.int64)
            for rank in others:
                self._sending.append((self._now, self.mesh.world.start_send(sent, rank)))
        if self.mesh.rank != 0:
            self.send(pickle.dumps(done), 0)


MESSAGE_BYTES = 8192
"""Bytes of a message that go at once; the rest of a longer one follows."""


def start_bytes(mesh: Mesh, message: bytes, to: int) -> list[Pending]:
    """Sends bytes to a rank: their number and the first of them, then the rest."""
    head = len(message).to_bytes(8, "little") + message[: MESSAGE_BYTES - 8]
    parts = [head.ljust(MESSAGE_BYTES, b"\0"), message[MESSAGE_BYTES - 8 :]]
    values = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in filter(None, parts)]
    return [mesh.world.start_send(each, to) for each in values]


def receive_bytes(mesh: Mesh, source: int) -> bytes:
    """Receives what `start_bytes` sent."""
    head = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    mesh.world.start_receive(head, source).wait()
    whole = head.numpy().tobytes()
    size, message = int.from_bytes(whole[:8], "little"), whole[8:]
    if size <= len(message):
        return message[:size]
    rest = torch.empty(size - len(message), dtype=torch.uint8)
    mesh.world.start_receive(rest, source).wait()
    return message + rest.numpy().tobytes()
