"""The decision: how a model is split over devices. A frozen value, written by search or by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage: layers `start` to `stop` (excluded), its degrees, its devices.

    `devices` lists global ranks; empty means "by the plan's rank order".
    """

    start: int
    stop: int
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    devices: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Transformer layers in the stage."""
        return self.stop - self.start

    @property
    def num_devices(self) -> int:
        """Ranks that run the stage. Expert parallelism lives inside data x context."""
        return self.data * self.tensor * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes and arithmetic: dtypes of storage, gradients, reduction, master weights, moments."""

    parameter: str = "fp32"
    gradient: str = "fp32"
    reduction: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"

    @classmethod
    def mixed(cls) -> Precision:
        """bf16 parameters and compute over fp32 gradients, master weights and moments."""
        return cls(parameter="bf16")

    @property
    def has_master(self) -> bool:
        """True if master weights are a copy of their own."""
        return self.master != self.parameter

    @property
    def scales_loss(self) -> bool:
        """True if gradients pass through fp16, whose range is too small for them as they are."""
        return "fp16" in (self.parameter, self.gradient, self.reduction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages x degrees x ZeRO x recomputation x schedule, with every default written out.

    `stages` has one entry per pipeline chunk: pipeline ranks x `chunks` of them, in model order.
    Most plans are uniform: every stage has the same degrees (`Plan.uniform`).
    """

    stages: tuple[Stage, ...]
    version: int = VERSION
    zero: int = 0
    hybrid_shard: int = 0  # ranks that share one ZeRO shard set; 0: the whole data axis
    accumulation: str = "auto"  # reduce_each or reduce_last: see `reduces_each`
    bucket_bytes: int = 32 * 1024 * 1024
    prefetch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatch: int = 1
    recompute: str = "none"
    recompute_every: int = 1  # 2: only layers 0, 2, 4, ... are recomputed
    shard_activations: bool = False  # inputs of recomputed layers, over the tensor ranks
    sequence_parallel: bool = False
    offload: str = "none"
    precision: Precision = field(default_factory=Precision)
    rank_order: str = "tp-cp-ep-dp-pp"
    attention: str = "sdpa"
    context_method: str = "ring"  # or ulysses: see `plan/context.py`
    compile: bool = False
    layouts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        chunks: int = 1,
        layers: Sequence[int] | None = None,
        **settings: Any,
    ) -> Plan:
        """The short form: one set of degrees, layers split evenly (or as `layers` says)."""
        counts = tuple(layers) if layers else even_split(num_layers, pp * chunks)
        bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
        stages = tuple(
            Stage(start=start, stop=stop, data=dp, tensor=tp, context=cp, expert=ep)
            for start, stop in pairwise(bounds)
        )
        return cls(stages=stages, chunks=chunks, **settings)

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.stages) // self.chunks

    @property
    def tp(self) -> int:
        """Tensor degree of the first stage."""
        return self.stages[0].tensor

    @property
    def dp(self) -> int:
        """Data degree of the first stage."""
        return self.stages[0].data

    @property
    def cp(self) -> int:
        """Context degree of the first stage."""
        return self.stages[0].context

    @property
    def ep(self) -> int:
        """Expert degree of the first stage."""
        return self.stages[0].expert

    @property
    def is_uniform(self) -> bool:
        """True if every stage has the same degrees and devices follow the rank order."""
        degrees = {(s.data, s.tensor, s.context, s.expert, s.devices) for s in self.stages}
        return len(degrees) == 1 and not self.stages[0].devices

    @property
    def world_size(self) -> int:
        """Ranks of the whole plan."""
        return sum(stage.num_devices for stage in self.stages[: self.pp])

    @property
    def num_layers(self) -> int:
        """Layers that the stages hold together."""
        return sum(stage.num_layers for stage in self.stages)

    def shards_of(self, stage: Stage) -> int:
        """Ranks that divide one copy of a stage's state among them: 1 without ZeRO.

        Context ranks share it with data ranks: both see other tokens of the global batch.
        """
        return (self.hybrid_shard or stage.data * stage.context) if self.zero else 1

    @property
    def reduces_each(self) -> bool:
        """True if gradients are reduce-scattered in the backward of each micro-batch.

        `reduce_each` keeps gradients divided at all times, for a message per micro-batch: ZeRO-2's
        and 3's memory, hence what `auto` means there. `reduce_last` keeps whole gradients until
        the last micro-batch, for one message a step: all that ZeRO-0 and 1 know, since theirs are
        whole anyway (domain.md section 2).
        """
        return self.zero >= 2 and self.accumulation != "reduce_last"

    def recomputes(self, layer: int) -> bool:
        """True if the backward runs a layer, or its attention, again."""
        return self.recompute != "none" and layer % self.recompute_every == 0

    @property
    def round_rows(self) -> int:
        """Sequences of one micro-batch over all data ranks; `microbatch` is the first stage's."""
        return self.microbatch * self.dp

    def microbatch_of(self, stage: Stage) -> int:
        """Sequences of one micro-batch on a data rank of a stage; legality says if this divides."""
        return self.round_rows // stage.data

    def num_microbatches(self, global_batch: int) -> int:
        """Micro-batches a step, the same on every stage; legality says when this divides."""
        return global_batch // self.round_rows

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def short(self) -> str:
        """The degrees in one line: `tp=2,pp=2,dp=1,zero=1,microbatch=1`, non-defaults only.

        Degrees that differ are given by pipeline rank, `tp=2+1`; devices are left out.
        """
        words = [f"tp={self._degrees('tensor')}", f"pp={self.pp}", f"dp={self._degrees('data')}"]
        if self._degrees("context") != "1":
            words.append(f"cp={self._degrees('context')}")
            is_ring = self.context_method == "ring"
            words += [] if is_ring else [f"context_method={self.context_method}"]
        words += [f"ep={self._degrees('expert')}"] if self._degrees("expert") != "1" else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"hybrid_shard={self.hybrid_shard}"] if self.hybrid_shard else []
        words += self._non_defaults("accumulation", "bucket_bytes", "prefetch")
        words += ["sp=1"] if self.sequence_parallel else []
        words += [f"microbatch={self.microbatch}"]
        words += [f"schedule={self.schedule}"] if self.pp > 1 or self.chunks > 1 else []
        words += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        words += [f"recompute_every={self.recompute_every}"] if self.recompute_every > 1 else []
        words += ["shard_activations=1"] if self.shard_activations else []
        words += [f"offload={self.offload}"] if self.offload != "none" else []
        words += self._non_defaults("attention", "compile")
        words += [f"precision={self.precision.parameter}"]
        counts = [stage.num_layers for stage in self.stages]
        if tuple(counts) != even_split(sum(counts), len(counts)):
            words.append("layers=" + counts_text(counts))
        return ",".join(words)

    def _non_defaults(self, *names: str) -> list[str]:
        """`name=value` of settings that are not as a plan has them if nobody says anything."""
        defaults = {field.name: field.default for field in fields(self)}
        values = {name: getattr(self, name) for name in names}
        return [
            f"{name}={int(value) if isinstance(value, bool) else value}"
            for name, value in values.items()
            if value != defaults[name]
        ]

    def _degrees(self, name: str) -> str:
        """A degree of all pipeline ranks, or of each: `2`, `2+1`."""
        values = [getattr(stage, name) for stage in self.stages[: self.pp]]
        return str(values[0]) if len(set(values)) == 1 else "+".join(map(str, values))


def counts_text(counts: Sequence[int]) -> str:
    """Counts joined by `+`, three or more equal ones in a row as one: `1+2x62+1`."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    words = [[f"{count}x{times}"] if times > 2 else [str(count)] * times for count, times in runs]
    return "+".join(word for run in words for word in run)


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """Splits a count as evenly as possible, the larger parts first: (10, 4) -> (3, 3, 2, 2)."""
    quotient, remainder = divmod(total, parts)
    return tuple(quotient + (index < remainder) for index in range(parts))


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of one part of `even_split`."""
    counts = even_split(total, parts)
    start = sum(counts[:index])
    return start, start + counts[index]
