"""What of a bucket is divided, among which ranks, and when gradients are reduced: ZeRO's stages.

    stage  values    gradients                      optimizer state
    0      whole     whole, all-reduced             whole
    1      whole     whole, reduce-scattered        divided
    2      whole     divided                        divided
    3      divided   divided                        divided

Stage 0 is sharding over one rank with every data rank a replica, so all stages are one mechanism:
scatter over the `shard` ranks, then sum over the `replicas`. Hybrid sharding lies in between.

Experts are divided in the same way, but among the ranks that hold the same ones: under expert
parallelism their gradients already are sums over the tokens of all ranks of an expert group
(domain.md section 3).

Source: Rajbhandari et al. 2020, sec. 5; Zhao et al. 2023 (FSDP), sec. 3.2 for hybrid sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triptych.plan.plan import Plan
from triptych.runtime.comm import Communicator
from triptych.runtime.data.slot import Slot
from triptych.runtime.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a rank's buckets are divided.

    `divides_values` and `divides_gradients` say that whole tensors exist only while they are used.
    `reduces_each`: gradients are scattered in the backward of each micro-batch.
    """

    shard: Communicator
    replicas: Communicator
    divides_values: bool
    divides_gradients: bool
    reduces_each: bool

    @classmethod
    def of(cls, plan: Plan, shard: Communicator, replicas: Communicator) -> Sharding:
        """The sharding of a plan among some ranks; with one rank a shard nothing is divided."""
        is_divided = shard.size > 1
        return cls(
            shard=shard,
            replicas=replicas,
            divides_values=is_divided and plan.zero >= 3,
            divides_gradients=is_divided and plan.zero >= 2,
            reduces_each=is_divided and plan.reduces_each,
        )

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks that speak for their replicas: norms count, checkpoints save once."""
        return self.replicas.index == 0


class Shardings(NamedTuple):
    """How dense parameters are divided, and how experts are."""

    dense: Sharding
    expert: Sharding

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> Shardings:
        """The shardings of a plan."""
        dense = Sharding.of(plan, mesh.shard, mesh.replicas)
        return cls(dense, Sharding.of(plan, mesh.expert_shard, mesh.expert_replicas))

    def of_slot(self, slot: Slot) -> Sharding:
        """That of a parameter."""
        return self.expert if slot.is_expert else self.dense
