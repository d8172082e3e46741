"""What the cost of a layer depends on, and what that cost consists of."""

from __future__ import annotations

from typing import NamedTuple

from triptych.plan.plan import Plan


class Setting(NamedTuple):
    """The choices of a plan that change the work of one layer for one micro-batch."""

    tensor: int
    context: int
    expert: int
    sequence_parallel: bool
    microbatch: int  # sequences
    recompute: str  # none, selective, full
    attention: str  # sdpa, flash, eager
    compile: bool
    dtype: str  # of parameters and compute
    context_method: str = "ring"  # or ulysses
    recompute_every: int = 1  # of a stage's layers, those with a multiple of it are recomputed
    shard_activations: bool = False  # the inputs of recomputed layers, over the tensor ranks
    offloads_activations: bool = False  # those inputs wait in host memory

    @classmethod
    def of(cls, plan: Plan) -> Setting:
        """The setting of a uniform plan."""
        return cls(
            tensor=plan.tp,
            context=plan.cp,
            expert=plan.ep,
            sequence_parallel=plan.sequence_parallel and plan.tp > 1,
            microbatch=plan.microbatch,
            recompute=plan.recompute,
            attention=plan.attention,
            compile=plan.compile,
            dtype=plan.precision.parameter,
            context_method=plan.context_method,
            recompute_every=plan.recompute_every,
            shard_activations=plan.shard_activations,
            offloads_activations=plan.offload == "activations",
        )

    @property
    def kept(self) -> Setting:
        """The setting of the layers that are not recomputed."""
        return self._replace(recompute="none", recompute_every=1)

    @property
    def sequence_split(self) -> int:
        """Parts that the activations outside of tensor-parallel regions are cut into."""
        return self.tensor if self.sequence_parallel else 1


class Parts(NamedTuple):
    """Seconds of one pass of one micro-batch by what they are spent on; communication exposed."""

    compute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    data_s: float = 0.0  # ZeRO-3's gathers and scatters inside the pass

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.tensor_s + self.context_s + self.expert_s + self.data_s

    def plus(self, other: Parts, times: float = 1) -> Parts:
        """The sum with `times` another, term by term."""
        return Parts(
            self.compute_s + times * other.compute_s,
            self.tensor_s + times * other.tensor_s,
            self.context_s + times * other.context_s,
            self.expert_s + times * other.expert_s,
            self.data_s + times * other.data_s,
        )

    def times(self, count: float) -> Parts:
        """`count` passes."""
        return Parts(*(part * count for part in self))


class PieceCost(NamedTuple):
    """What one layer, the embedding or the head costs a rank for one micro-batch."""

    forward: Parts
    backward: Parts
    recomputed_flops: float  # FLOPs of the layer's forward that the backward repeats, all ranks
    saved_bytes: float  # kept between forward and backward
    working_bytes: float  # extra while the backward of this piece runs
    logits_bytes: float = 0.0  # head only: a chunk's logits
    head_gradient_bytes: float = 0.0  # head only: kept between forward and backward
    weight_s: float = 0.0  # products that W of a split backward does; the host issues them in I
    input_s: float | None = None  # I of a split backward; None: all of the backward
    deferred_bytes: float = 0.0  # kept between the halves I and W of a split backward

    @property
    def split_input_s(self) -> float:
        """Seconds of I."""
        return self.backward.total_s if self.input_s is None else self.input_s
