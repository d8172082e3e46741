"""The steady state of a replica: sequences that run at once, their steps, and what users see.

Every running sequence computes a token a step. A new prompt shares its steps with the tokens of
the others, so that each sequence is held up by the prompts of all others while it runs (chunked
prefill: Agrawal et al. 2024, Sarathi-Serve). With a pipeline as many batches are in flight as
there are stages; each step of the slowest stage sets the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.cost.kernels.collectives import Group
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.step import Load, Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a replica does with `batch` sequences at once."""

    batch: float
    decode_s: float  # of a step without prompts
    mixed_s: float  # of a step with a piece of a prompt
    stall_s: float  # that one prompt costs everyone else
    prefill_s: float  # from a prompt's first step to its first token
    tpot_s: float
    cycle_s: float  # of one request, without waiting

    @property
    def requests_per_s(self) -> float:
        """Requests that finish."""
        return self.batch / self.cycle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Steps of one replica, priced; `hop` joins neighbouring stages."""

    stepper: Stepper
    engine: Engine
    hop: Group
    chunk: int
    input_tokens: float
    output_tokens: float
    stream_s: float = 0.0  # of the process that streams answers, for a whole one

    def most_rate(self, state: State) -> float:
        """Requests that a state finishes in a second and that can be streamed."""
        return min(state.requests_per_s, MOST_BUSY / self.stream_s if self.stream_s else math.inf)

    def stream_wait_s(self, rate: float) -> float:
        """Mean wait for the process that streams: one server, each answer the same work."""
        busy = min(MOST_BUSY, rate * self.stream_s)
        return self.stream_s * busy / (2.0 * (1.0 - busy))

    def closed_rate(self, users: float, state: State) -> float:
        """Requests a second of users who wait for their answers, with the cycle of a state."""
        low, high = 0.0, min(self.most_rate(state), users / state.cycle_s)
        for _ in range(40 if self.stream_s else 0):
            middle = (low + high) / 2.0
            if middle * (state.cycle_s + self.stream_wait_s(middle)) < users:
                low = middle
            else:
                high = middle
        return high

    def state(self, batch: float) -> State:
        """The steady state with `batch` sequences, new ones coming as others finish."""
        light = self._decodes(batch)
        light_s = self.stepper.stages_s(light)
        pieces, together = self._pieces(batch)
        stall_s = mixed_s = whole_s = 0.0
        for before in range(pieces):
            heavy = self._with_prompt(light, before, pieces, together)
            heavy_s = self.stepper.stages_s(heavy)
            whole_s = self._latency_s(heavy_s, heavy)
            alone = not self.engine.is_chunked  # prompts in steps of their own
            stall_s += max(heavy_s) - (0.0 if alone else max(light_s))
            mixed_s += whole_s
        stall_s /= together
        first_s = whole_s + (mixed_s - whole_s) / self._stages
        steps = max(1.0, self.output_tokens - 1.0)
        decode_s = max(self._latency_s(light_s, light), self._stages * max(light_s))
        held_s = max(0.0, batch - together) * stall_s
        tpot_s = decode_s + held_s / steps
        return State(
            batch=batch,
            decode_s=decode_s,
            mixed_s=mixed_s / pieces,
            stall_s=stall_s,
            prefill_s=first_s,
            tpot_s=tpot_s,
            cycle_s=first_s + (self.output_tokens - 1.0) * tpot_s,
        )

    @property
    def _stages(self) -> int:
        return len(self.stepper.layout.stages)

    def _latency_s(self, stages_s: list[float], load: Load) -> float:
        """Seconds of a batch through all stages; each hands its hidden states to the next."""
        hidden_bytes = load.tokens * self.stepper.layout.hidden * 2.0
        return sum(stages_s) + (len(stages_s) - 1) * self.hop.send_s(hidden_bytes)

    def _decodes(self, batch: float) -> Load:
        """The decodes of one batch in flight."""
        sequences = batch / self._stages
        context = self.input_tokens + self.output_tokens / 2.0
        return Load(decodes=sequences, context=sequences * context, samples=sequences)

    def _pieces(self, batch: float) -> tuple[int, float]:
        """Steps that a prompt is cut into, and prompts that come together in one."""
        room = max(1.0, self.chunk - batch / self._stages if self.engine.is_chunked else self.chunk)
        if self.input_tokens > room:
            return math.ceil(self.input_tokens / room), 1.0
        each_step = batch / (self.output_tokens * self._stages)
        return 1, max(1.0, min(room / self.input_tokens, each_step))

    def _with_prompt(self, light: Load, before: int, pieces: int, together: float) -> Load:
        """A step with piece number `before` of a prompt, or with prompts that come together."""
        piece = self.input_tokens / pieces
        tokens = piece * together
        load = Load(
            prompt_tokens=tokens,
            prompt_pairs=tokens * (before * piece + piece / 2.0),
            samples=together,
        )
        if not self.engine.is_chunked:
            return load
        return load._replace(
            decodes=light.decodes, context=light.context, samples=light.samples + together
        )


MOST_BUSY = 0.999
"""Share of its time that the process which streams can be at work."""


def ttft_s(replica: Replica, state: State, waiting_s: float, busy: float) -> float:
    """Mean seconds to the first token.

    A prompt waits for the running step, and for those steps of others' prompts that begin before
    the engine has seen it (`lag_steps`); `busy` is the share of time or the chance of meeting them.
    """
    met_s = busy * state.mixed_s
    lag_s = met_s * replica.engine.lag_steps
    return replica.engine.request_s + waiting_s + lag_s + state.prefill_s


def burst_s(replica: Replica, state: State) -> float:
    """Mean seconds to the first token where all that run begin together: prompts one by one."""
    before = (state.batch - 1.0) / 2.0
    return replica.engine.request_s + before * state.stall_s + state.prefill_s
