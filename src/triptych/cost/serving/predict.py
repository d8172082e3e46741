"""What a serving plan is predicted to do: latencies, throughput, memory, and what binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.collectives import group
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.layout import Layout, layout
from triptych.cost.serving.memory import Memory, memory
from triptych.cost.serving.steady import Replica, State, burst_s, ttft_s
from triptych.cost.serving.step import Load, StepParts, Stepper
from triptych.cost.uncertainty import serving_bar
from triptych.model.model import Model
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.units import GIB

SETTLING = 3
"""Rounds in which running sequences and their cycle are brought together."""

ROUNDS = 12
"""Halvings of the range of batch sizes when the one for a rate is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPrediction:
    """A plan under a workload. Seconds are means; tokens and requests are of all replicas.

    `step_s` are the terms of the slowest stage's step without prompts. `stages_s` are the seconds
    of that step by stage.
    """

    plan: ServingPlan
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    requests_per_s: float
    max_requests_per_s: float
    max_concurrency: int
    batch: float  # sequences of a replica that run at once under this workload
    kv_cache_gib: float  # of a device
    weights_gib: float
    workspace_gib: float
    memory_limit_gib: float
    fits: bool
    over_bytes: float
    step_s: Mapping[str, float]
    stages_s: tuple[float, ...]
    prefill_s: float
    stall_s: float
    queue_s: float
    streaming: float  # share of its time that a process which streams answers is at work
    meets: Mapping[str, bool]  # objectives by name

    @property
    def is_good(self) -> bool:
        """True if it fits and meets every objective."""
        return self.fits and all(self.meets.values())

    @property
    def bars(self) -> Mapping[str, tuple[float, float]]:
        """The ends of 80 % bars. Tokens a second have none where arrivals set them."""
        found = {
            "ttft_s": serving_bar("ttft", self.ttft_s),
            "tpot_s": serving_bar("tpot", self.tpot_s),
        }
        if "rate" not in self.meets:
            found["output_tokens_per_s"] = serving_bar("throughput", self.output_tokens_per_s)
        return found

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `triptych predict --task serve`."""
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "bars_80": {name: list(ends) for name, ends in self.bars.items()},
            "requests_per_s": self.requests_per_s,
            "max_requests_per_s": self.max_requests_per_s,
            "max_concurrency": self.max_concurrency,
            "running": self.batch,
            "kv_cache_gib": self.kv_cache_gib,
            "memory_gib": {
                "weights": self.weights_gib,
                "workspace": self.workspace_gib,
                "kv_cache": self.kv_cache_gib,
            },
            "memory_limit_gib": self.memory_limit_gib,
            "fits": self.fits,
            "step_s": dict(self.step_s),
            "stages_s": list(self.stages_s),
            "prefill_s": self.prefill_s,
            "queue_s": self.queue_s,
            "streaming_share": self.streaming,
            "objectives_met": dict(self.meets),
            "plan": self.plan.to_json(),
        }


class ServingPricer:
    """Prices one plan for one model, cluster and engine under any workload of some lengths."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        plan: ServingPlan,
        engine: Engine = TRIPTYCH,
        known: Layout | None = None,  # of a plan that differs in batch and chunk alone
    ) -> None:
        self.plan, self.engine = plan, engine
        self.layout = known or layout(model, plan)
        self.memory: Memory = memory(self.layout, cluster, plan, engine)
        self.stepper = Stepper(self.layout, cluster, plan, engine)
        self.hop = group(cluster, plan.pp, plan.tensor)

    def predict(self, workload: ServingWorkload) -> ServingPrediction:
        """What users see. A plan that does not fit has infinite latencies."""
        room = self._room(workload)
        if room < 1.0:
            return self._unfit(workload)
        most = self._keeps_up(workload, room)
        replica = self._replica(workload)
        state, queue_s = self._settle(replica, workload, most)
        full = state if state.batch == most else replica.state(most)
        busy = self._busy(state, workload)
        ttft = ttft_s(replica, state, queue_s, busy)
        if workload.rounds is not None:
            ttft += (burst_s(replica, state) - ttft + queue_s) / max(1.0, workload.rounds)
        rate = replica.most_rate(state) * self.plan.replicas
        if workload.rate is not None:
            rate = min(rate, workload.rate)
        elif workload.concurrency is not None:
            rate = min(rate, workload.concurrency / (state.cycle_s + queue_s))
        return self._prediction(
            workload,
            ttft_s=ttft,
            tpot_s=state.tpot_s if workload.output_tokens > 1 else 0.0,
            output_tokens_per_s=rate * workload.output_tokens,
            requests_per_s=rate,
            max_requests_per_s=replica.most_rate(full) * self.plan.replicas,
            max_concurrency=int(room) * self.plan.replicas,
            batch=state.batch,
            state=state,
            queue_s=queue_s,
            streaming=rate / self.plan.replicas * replica.stream_s,
            load=replica._decodes(state.batch),
        )

    def _room(self, workload: ServingWorkload) -> float:
        """Sequences of a replica that batch and cache have room for."""
        share = 1.0 if self.engine.reserves_output else 0.5
        length = workload.input_tokens + share * workload.output_tokens
        whole = self.memory.sequences(workload.tokens)
        if whole < 1.0:
            return 0.0
        return min(float(self.plan.batch), max(1.0, self.memory.sequences(length)))

    def _keeps_up(self, workload: ServingWorkload, room: float) -> float:
        """Of these, how many a step has tokens for, with the prompts that keep coming besides."""
        if not self.engine.is_chunked:
            return room
        per_step = 1.0 + workload.input_tokens / max(1.0, workload.output_tokens)
        return max(1.0, min(room, self.plan.pp * self.plan.chunk / per_step))

    def _replica(self, workload: ServingWorkload) -> Replica:
        return Replica(
            stepper=self.stepper,
            engine=self.engine,
            hop=self.hop,
            chunk=self.plan.chunk,
            input_tokens=workload.input_tokens,
            output_tokens=max(1.0, workload.output_tokens),
            stream_s=self.engine.token_s * workload.output_tokens if workload.streams else 0.0,
        )

    def _settle(
        self, replica: Replica, workload: ServingWorkload, most: float
    ) -> tuple[State, float]:
        """The state that a workload leads to, and the seconds that requests wait outside of it."""
        if workload.rate is not None:
            return self._open(replica, workload.rate / self.plan.replicas, most)
        if workload.concurrency is None:
            return replica.state(most), 0.0
        return self._closed(replica, max(1.0, workload.concurrency / self.plan.replicas), most)

    def _closed(self, replica: Replica, users: float, most: float) -> tuple[State, float]:
        """Users who wait for their answers: those that do not run wait, for room or to be streamed.

        By Little's law all users are either in their cycle or waiting; fewer running sequences
        make the cycle shorter, hence a few rounds.
        """
        state = replica.state(min(users, most))
        for _ in range(SETTLING if replica.stream_s else 0):
            rate = replica.closed_rate(users, state)
            running = max(1.0, min(most, users, rate * state.cycle_s))
            state = replica.state(running)
        rate = replica.closed_rate(users, state)
        return state, max(0.0, users / rate - state.cycle_s)

    def _open(self, replica: Replica, rate: float, most: float) -> tuple[State, float]:
        """Arrivals at a rate: as many run as arrive in the time that one takes (Little).

        Waiting is that of a queue with one server of constant service, the prompts' steps; beyond
        what the replica can do it has no end.
        """
        full = replica.state(most)
        if rate >= replica.most_rate(full):
            return full, float("inf")
        low, high = min(1.0, most), most
        for _ in range(ROUNDS):
            middle = (low + high) / 2.0
            if replica.state(middle).requests_per_s < rate:
                low = middle
            else:
                high = middle
        state = replica.state(high)
        used = min(0.999, rate * state.stall_s)
        service_s = max(state.stall_s, 1e-9)
        waiting_s = used * service_s / (2.0 * (1.0 - used)) + state.decode_s / 2.0
        return state, waiting_s + replica.stream_wait_s(rate)

    def _busy(self, state: State, workload: ServingWorkload) -> float:
        """How surely a new prompt meets the steps of others' prompts.

        Users who send the next request on an answer do so together: their sequences have the same
        number of steps. Arrivals at random meet the share of time that prompts take.
        """
        if workload.rate is not None:
            return min(1.0, state.requests_per_s * state.mixed_s)
        return 0.0 if state.batch <= 1.0 else 1.0

    def _prediction(
        self, workload: ServingWorkload, state: State, load: Load, **known: Any
    ) -> ServingPrediction:
        stages = [self.stepper.stage(index, load) for index in range(self.plan.pp)]
        slowest = max(stages, key=lambda parts: parts.total_s)
        return ServingPrediction(
            plan=self.plan,
            **known,
            **self._memory_terms(),
            fits=True,
            over_bytes=0.0,
            step_s=_terms(slowest),
            stages_s=tuple(parts.total_s for parts in stages),
            prefill_s=state.prefill_s,
            stall_s=state.stall_s,
            meets=_objectives(workload, known["ttft_s"], known["tpot_s"], known),
        )

    def _memory_terms(self) -> dict[str, Any]:
        tightest = min(self.memory.stages, key=lambda stage: stage.free_bytes)
        return {
            "kv_cache_gib": self.memory.cache_bytes / GIB,
            "weights_gib": tightest.weights_bytes / GIB,
            "workspace_gib": tightest.workspace_bytes / GIB,
            "memory_limit_gib": self.memory.limit_bytes / GIB,
        }

    def _unfit(self, workload: ServingWorkload) -> ServingPrediction:
        """One sequence does not fit beside the weights."""
        lacking = max(
            stage.sequence_bytes(workload.tokens) - stage.free_bytes for stage in self.memory.stages
        )
        nothing = float("inf")
        return ServingPrediction(
            plan=self.plan,
            ttft_s=nothing,
            tpot_s=nothing,
            output_tokens_per_s=0.0,
            requests_per_s=0.0,
            max_requests_per_s=0.0,
            max_concurrency=0,
            batch=0.0,
            **self._memory_terms(),
            fits=False,
            over_bytes=lacking,
            step_s={},
            stages_s=(),
            prefill_s=nothing,
            stall_s=nothing,
            queue_s=nothing,
            streaming=0.0,
            meets=_objectives(workload, nothing, nothing, {}),
        )


def _terms(parts: StepParts) -> dict[str, float]:
    return {name.removesuffix("_s"): value for name, value in parts._asdict().items()}


def _objectives(
    workload: ServingWorkload, ttft: float, tpot: float, known: Mapping[str, Any]
) -> dict[str, bool]:
    met = {}
    if workload.ttft_s is not None:
        met["ttft"] = ttft <= workload.ttft_s
    if workload.tpot_s is not None:
        met["tpot"] = tpot <= workload.tpot_s
    if workload.rate is not None:
        met["rate"] = known.get("max_requests_per_s", 0.0) > workload.rate
    return met


def predict_serving(
    model: Model,
    cluster: Cluster,
    workload: ServingWorkload,
    plan: ServingPlan,
    engine: Engine = TRIPTYCH,
) -> ServingPrediction:
    """One plan, priced."""
    return ServingPricer(model, cluster, plan, engine).predict(workload)
