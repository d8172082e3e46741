"""One rank of a training run: the modules, buckets, optimizer and program of a plan.

The life of a step: count trained tokens over the data axis (the loss is their mean over the global
batch, whatever the layout); run the pipeline program, buckets reducing behind the last backward;
end the reductions; gradient norm; clipped update; gather of updated values under ZeRO-1 and 2
(under ZeRO-3 when they are used).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from triptych.plan.context import sequence_unit
from triptych.plan.plan import Plan
from triptych.runtime.build.zoo import require_fixed_rotary
from triptych.runtime.comm import Pending
from triptych.runtime.data.live import LiveBytes, live_bytes, live_dtypes
from triptych.runtime.data.optimizer import OptimizerSettings
from triptych.runtime.data.pieces import weight_shards
from triptych.runtime.data.validation import LateValidation
from triptych.runtime.expert.balance import RouterLog, RouterResult, RouterSettings
from triptych.runtime.greedy import likeliest
from triptych.runtime.mesh import Mesh
from triptych.runtime.microbatch import MicroBatch, own_tokens
from triptych.runtime.parts import Parts, make_parts
from triptych.runtime.pipeline.channels import Channels
from triptych.runtime.pipeline.interpreter import Interpreter
from triptych.runtime.pipeline.rows import program_of
from triptych.runtime.precision import dtype_name, torch_dtype
from triptych.runtime.record import Recorder
from triptych.runtime.replicas import differing_replicas
from triptych.runtime.result import StepResult
from triptych.runtime.scaling import LossScale
from triptych.runtime.shard import Shard
from triptych.runtime.tensor.loss import IGNORED
from triptych.schedule.action import Action, Kind
from triptych.schedule.passes import without_frozen
from triptych.schedule.timeline import Span, Timeline
from triptych.schedule.traits import TRAITS

__all__ = [
    "Engine",
    "MicroBatch",
    "OptimizerSettings",
    "RouterResult",
    "RouterSettings",
    "StepResult",
]


class Engine:
    """A rank's share of a model under a plan, ready to train."""

    def __init__(self, parts: Parts) -> None:
        plan, mesh = parts.plan, parts.mesh
        self.plan, self.model, self.mesh = plan, parts.model, mesh
        self.stages, self.buckets, self.optimizer = parts.stages, parts.buckets, parts.optimizer
        self._masks, self._lowest = parts.masks, parts.lowest_trained
        self.frozen = parts.frozen
        self.loss_scale = LossScale(mesh.device) if plan.precision.scales_loss else None
        self._late = LateValidation(parts.optimizer) if self._goes_ahead() else None
        self._recorder = Recorder(mesh.device)
        self._router_log = RouterLog(mesh.device) if parts.model.experts else None
        self._interpreter = Interpreter(
            {stage.index: stage for stage in parts.stages},
            channels=Channels(mesh),
            deferral=parts.deferral,
            recorder=self._recorder,
            dtype=torch_dtype(plan.precision.parameter),
            hidden=parts.model.hidden,
            sequence_split=mesh.tensor.size if plan.sequence_parallel else 1,
            router_log=self._router_log,
            masks=parts.masks,
            lowest_trained=parts.lowest_trained,
        )

    @classmethod
    def build(
        cls,
        plan: Plan,
        config: Mapping[str, Any],
        mesh: Mesh,
        *,
        seed: int = 0,
        optimizer: OptimizerSettings | None = None,
        freeze: Sequence[str] = (),
        router: RouterSettings | None = None,
    ) -> Engine:
        """Makes this rank's engine from a Hugging Face configuration, weights drawn from `seed`.

        Parameters that a pattern of `freeze` matches (`plan/freeze.py`) do not train. Raises
        ModelError for a family outside the allow-list, and for a pattern that matches nothing,
        PlanError for settings of routers that model or plan cannot have.
        """
        return cls(
            make_parts(
                plan,
                config,
                mesh,
                seed=seed,
                optimizer=optimizer or OptimizerSettings(),
                freeze=freeze,
                router=router or RouterSettings(),
            )
        )

    # ---- a step ------------------------------------------------------------------------------

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> StepResult:
        """One optimizer step on this replica's micro-batches; collective over all ranks.

        The result is flagged on all ranks if one of them raised its `flag`.

        Ranks that differ only in tensor or pipeline coordinates pass the same micro-batches. Where
        stages differ in their data degrees, each of a stage's data ranks passes an equal share of
        the rows of every micro-batch: the first ones, the next ones, and so on.
        """
        self.mesh.counters.reset()
        self._recorder.begin()
        loss, tokens = self.gradients(microbatches)
        with self._recorder.span("optimizer"):
            squared = self.optimizer.squared_norm()
            scalars = self._scalars(loss, squared, flag)
            summing = self.mesh.world.start_all_reduce(scalars, finish=scalars[1].sqrt_)
            told = self._update(summing, learning_rate)
        self._masks.step += 1
        return StepResult(summing, tokens, self._times(), self._bytes(), told)

    def _update(self, scalars: Pending, learning_rate: float) -> torch.Tensor | None:
        """Updates the weights; makes the norm that of gradients without loss scale."""
        if self._late is not None:
            self._late.update(learning_rate, scalars)
            return None
        norm = scalars.wait()[1]
        if self.loss_scale is None:
            self.optimizer.step(learning_rate, norm)
            return None
        norm.div_(self.loss_scale.value)
        self.optimizer.step(learning_rate, norm, self.loss_scale.value)
        return self.loss_scale.update(norm)

    def _scalars(self, loss: torch.Tensor, squared: torch.Tensor, flag: bool) -> torch.Tensor:
        """This rank's parts of what a step tells; they add up over all ranks."""
        scalars = torch.stack((loss, squared, torch.full_like(loss, flag)))
        if self._router_log is None:
            return scalars
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return torch.cat((scalars, self._router_log.total(scale)))

    def _goes_ahead(self) -> bool:
        """True if updates do not wait for the norm: not with a loss scale or state in host memory,
        which would have to be put back besides.
        """
        is_late = TRAITS[self.plan.schedule].validates_late and self.plan.pp > 1
        return is_late and self.loss_scale is None and not self.optimizer.is_offloaded

    def gradients(self, microbatches: Sequence[MicroBatch]) -> tuple[torch.Tensor, int]:
        """Leaves global gradients in the buckets; this rank's part of the loss, and the tokens.

        The parts of the loss add up over all ranks. Gradients are multiplied by the loss scale.
        """
        prepared, tokens = self._prepare(microbatches)
        self._set_training(True)
        self.buckets.begin_step()
        if self._router_log is not None:
            self._router_log.begin()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        points = program_of(self.plan, len(prepared)).looks_back
        losses = self._interpreter.run(
            self._actions(len(prepared)),
            prepared,
            scale / max(tokens, 1),
            self.buckets.begin_final,
            (points[self.mesh.coordinates.pp], self.settle),
        )
        with self._recorder.span("data_comm"):
            self.buckets.finish()
        return self._owned_loss(losses) / scale, tokens

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Summed loss and trained tokens over all replicas' micro-batches, without gradients.

        Replicas may pass different numbers of micro-batches, none included, if all stages have the
        same degrees.
        """
        self.settle()
        prepared, tokens = self._prepare(microbatches)
        prepared += self._idle(len(prepared))
        self._set_training(False)
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if prepared:
            actions = [a for a in self._actions(len(prepared)) if a.kind in _FORWARD]
            with torch.no_grad(), self._recorder.muted():
                loss = self._owned_loss(self._interpreter.run(actions, prepared, 1.0))
        return float(self.mesh.world.all_reduce(loss)), tokens

    def _prepare(self, microbatches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], int]:
        """This rank's tokens on its device, and the trained tokens of the global batch."""
        if any(microbatch.documents for microbatch in microbatches):
            rule = "documents of one row would share the frequencies of the longest"
            require_fixed_rotary(self.stages[0].causal_lm, rule, "rows of one document each")
        mine, start, stage = [], 0, self.plan.stages[self.mesh.coordinates.pp]
        for microbatch in microbatches:
            own = own_tokens(microbatch, self.plan, self.mesh.coordinates)
            rows = len(microbatch.input_ids)
            mine.append(replace(own, first=start + self.mesh.coordinates.dp * rows))
            start += stage.data * rows
        tokens = self._count_tokens(mine)
        return [microbatch.to(self.mesh.device) for microbatch in mine], tokens

    def _idle(self, count: int) -> list[MicroBatch]:
        """Empty micro-batches for a replica with fewer than others, if all must work together."""
        if not self.buckets.divides_values and self.mesh.expert.size == 1:
            return []
        most = int(self.mesh.data.all_reduce(torch.tensor([count]), maximum=True))
        length = sequence_unit(self.plan) // self.mesh.context.size
        ids = torch.zeros(1, length, dtype=torch.int64, device=self.mesh.device)
        return [MicroBatch(ids, torch.full_like(ids, IGNORED))] * (most - count)

    def _count_tokens(self, microbatches: Sequence[MicroBatch]) -> int:
        """Trained tokens of the global batch, counted on the host: labels come from there."""
        count = sum(int((m.labels != IGNORED).sum()) for m in microbatches)
        return int(self.mesh.data.all_reduce(torch.tensor([count])))

    def _set_training(self, training: bool) -> None:
        for stage in self.stages:
            if stage.training is not training:  # it walks over every module
                stage.train(training)

    def _actions(self, num_microbatches: int) -> tuple[Action, ...]:
        rows = program_of(self.plan, num_microbatches).rows
        return without_frozen(rows[self.mesh.coordinates.pp], self._lowest)

    def _owned_loss(self, losses: torch.Tensor | None) -> torch.Tensor:
        """The loss on one tensor rank of the last stage, zero elsewhere: parts that add up."""
        if losses is None or self.mesh.coordinates.tp > 0:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return losses.double().sum()

    @property
    def validates_late(self) -> bool:
        """True if results should be read a step later: reading one waits for all ranks."""
        return self._late is not None

    def settle(self) -> bool:
        """Makes the last update final where it went ahead of the norm; True if weights changed.

        Collective. Done in the next step, and ahead of whatever looks at the weights.
        """
        return self._late is not None and self._late.settle()

    # ---- what others see ---------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Everything that a checkpoint holds of this rank: weights, moments, master weights."""
        self.settle()
        at = self.mesh.coordinates
        is_first = at.tp == at.cp == at.dp == 0
        buffers = [shard for stage in self.stages for shard in stage.buffer_shards(is_first)]
        weights = [shard for b in self.buckets.buckets for shard in weight_shards(b)]
        return weights + buffers + self.optimizer.shards()

    def live_bytes(self) -> LiveBytes:
        """Bytes of the live tensors of the model's state on this rank, by term."""
        return live_bytes(self.buckets, self.optimizer)

    def dtypes(self) -> dict[str, str]:
        """The dtypes of this rank's live tensors, by what they are for."""
        return {
            kind: dtype_name(dtype)
            for kind, dtype in live_dtypes(self.buckets, self.optimizer).items()
        }

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the shards, the same on all ranks."""
        return {} if self.loss_scale is None else {"scaling": self.loss_scale.state()}

    def after_load(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Takes what was loaded into the shards as the state after `step` steps."""
        skipped = 0.0
        if self.loss_scale is not None and state and "scaling" in state:
            self.loss_scale.load(state["scaling"])
            skipped = state["scaling"]["skipped_steps"]
        skipped += (state or {}).get("unseen", 0)
        self.optimizer.after_load(step - int(skipped))
        self._masks.step = step

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if one of them says so; collective."""
        return bool(self.mesh.world.all_reduce(torch.tensor([int(flag)]), maximum=True))

    def non_finite(self) -> list[str]:
        """Parameters whose last gradients are not finite, on any rank; collective."""
        found = {p.slot.name for p in self.optimizer.pieces if not p.gradient.isfinite().all()}
        gathered: list[Any] = [found]
        if self.mesh.world.size > 1:
            gathered = [None] * self.mesh.world.size
            dist.all_gather_object(gathered, found)
        return sorted(set().union(*gathered))

    def differing_replicas(self) -> list[str]:
        """Parameters whose copies are not bitwise equal, with the ranks; collective."""
        return differing_replicas(self.shards())

    def timeline(self) -> Timeline:
        """The last step's spans of all pipeline ranks of replica 0; collective over all ranks.

        On ranks other than 0 it holds this rank's spans only.
        """
        mine = (self._recorder.origin_s, self._recorder.marks())
        at = self.mesh.coordinates
        shown = at.tp == at.cp == at.dp == 0
        gathered: list[Any] = [None] * self.mesh.world.size
        if self.mesh.world.size > 1:
            dist.all_gather_object(gathered, (at.pp, *mine) if shown else None)
        else:
            gathered = [(at.pp, *mine)]
        rows = [row for row in gathered if row is not None]
        origin_s = min(begun_s for _, begun_s, _ in rows)
        spans = [
            Span(rank, m.label, m.start_s + begun_s - origin_s, m.end_s + begun_s - origin_s)
            for rank, begun_s, marks in rows
            for m in marks
        ]
        return Timeline(spans=tuple(spans), num_ranks=self.plan.pp)

    def all_spans(self) -> list[tuple[int, str, float, float]]:
        """The last step's spans of all ranks: rank, label, start and end on the wall clock.

        Collective; empty on ranks other than 0.
        """
        begun_s = self._recorder.origin_s
        mine = [(m.label, m.start_s + begun_s, m.end_s + begun_s) for m in self._recorder.marks()]
        gathered = [mine] if self.mesh.world.size == 1 else [mine] * self.mesh.world.size
        if self.mesh.world.size > 1:
            dist.all_gather_object(gathered, mine)
        if self.mesh.world.index > 0:
            return []
        return [(rank, *span) for rank, spans in enumerate(gathered) for span in spans]

    def next_tokens(self, ids_BS: torch.Tensor, places: Sequence[int]) -> list[int]:
        """The likeliest token after the one at a place of each row; collective over all ranks.

        All ranks pass the same rows, and all get the answer.
        """
        self.settle()
        marks = torch.full_like(ids_BS, IGNORED)
        marks[torch.arange(len(places)), torch.tensor(places)] = 0
        own = own_tokens(MicroBatch(ids_BS, marks), self.plan, self.mesh.coordinates)
        self._set_training(False)
        copies = 1 if self.plan.chunks == 1 else 2 * self.plan.pp  # what every schedule takes
        actions = [a for a in self._actions(copies) if a.kind in _FORWARD]
        head = partial(likeliest, len(places))
        with torch.no_grad(), self._recorder.muted():
            batch = [own.to(self.mesh.device)] * copies
            found = self._interpreter.run(actions, batch, 1.0, head=head)
        at = self.mesh.coordinates
        if found is None or at.dp > 0 or at.tp > 0:
            found = torch.zeros(1, len(places), dtype=torch.int64, device=self.mesh.device)
        answer: list[int] = self.mesh.world.all_reduce(found[0]).tolist()
        return answer

    def _times(self) -> dict[str, float]:
        """Seconds of the step on this rank by term; on CUDA only what the host waited for."""
        waited = {f"{axis}_comm": c.wait_s for axis, c in self.mesh.counters.by_axis.items()}
        if self.mesh.device.type == "cuda":
            return waited
        marks = self._recorder.marks()
        end_s = max((m.end_s for m in marks), default=0.0)
        compute_s = sum(m.end_s - m.start_s for m in marks if _is_compute(m.label))
        optimizer_s = sum(m.end_s - m.start_s for m in marks if m.label == "optimizer")
        tensor_s = waited.get("tensor_comm", 0.0)
        return waited | {
            "compute": max(0.0, compute_s - tensor_s),
            "optimizer": optimizer_s,
            "step": end_s,
        }

    def _bytes(self) -> dict[str, int]:
        return {axis: c.bytes_sent for axis, c in self.mesh.counters.by_axis.items()}


_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})


def _is_compute(label: str) -> bool:
    return label[:1].isdigit()
