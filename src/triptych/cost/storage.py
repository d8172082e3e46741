"""How a plan stores a model's state: bytes per element, and over how many ranks."""

from __future__ import annotations

from typing import NamedTuple

from triptych.plan.plan import Plan
from triptych.units import DTYPE_BYTES


class Storage(NamedTuple):
    """Bytes per parameter element of each kind of state, and how ZeRO divides them."""

    zero: int
    shards: int  # ranks that share the state of dense parameters
    expert_shards: int
    parameter_bytes: float
    gradient_bytes: float
    reduction_bytes: float  # per gradient element on the wire
    optimizer_bytes: float
    moment_bytes: float  # of one moment, which is all that Muon keeps of a matrix
    bucket_bytes: int
    prefetch: int
    is_offloaded: bool
    accumulation: str
    converts: bool = False  # gradients are copied to another dtype to travel
    is_hybrid: bool = False  # `shards` are the same for every stage, however many ranks it has

    @property
    def reduces_each(self) -> bool:
        """True if gradients are reduce-scattered in each micro-batch (`Plan.reduces_each`)."""
        return self.zero >= 2 and self.accumulation != "reduce_last"

    @property
    def divisor(self) -> int:
        """Over how many ranks the optimizer state of a dense parameter is divided."""
        return self.shards if self.zero else 1

    @classmethod
    def of(cls, plan: Plan, stage_index: int = 0) -> Storage:
        """A stage's storage: two moments, and a master copy if weights are narrower."""
        precision, stage = plan.precision, plan.stages[stage_index]
        ranks = stage.data * stage.context
        shards = plan.hybrid_shard or ranks
        master = DTYPE_BYTES[precision.master] if precision.has_master else 0.0
        return cls(
            zero=plan.zero,
            shards=shards,
            expert_shards=max(1, shards // stage.expert),
            parameter_bytes=max(2.0, DTYPE_BYTES[precision.parameter]),
            gradient_bytes=DTYPE_BYTES[precision.gradient],
            reduction_bytes=DTYPE_BYTES[precision.reduction],
            optimizer_bytes=2 * DTYPE_BYTES[precision.moments] + master,
            moment_bytes=DTYPE_BYTES[precision.moments],
            bucket_bytes=plan.bucket_bytes,
            prefetch=plan.prefetch,
            is_offloaded=plan.offload == "optimizer",
            accumulation=plan.accumulation,
            converts=precision.reduction != precision.gradient,
            is_hybrid=plan.hybrid_shard > 0,
        )
