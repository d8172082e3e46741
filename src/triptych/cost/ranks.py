"""Memory of every pipeline rank of a plan, by term."""

from __future__ import annotations

from triptych.cluster.cluster import Cluster
from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.workload import Workload
from triptych.units import GIB


def memory_by_rank_gib(
    model: Model, cluster: Cluster, workload: Workload, plan: Plan
) -> list[dict[str, float]]:
    """For each pipeline rank the peak of its devices by term, in GiB."""
    frame = Frame.of(Pricer(model, cluster, workload), plan)
    storage = Storage.of(plan)
    return [
        {
            term: size / GIB
            for term, size in frame.memory(rank, storage, plan.schedule)._asdict().items()
        }
        for rank in range(frame.num_ranks)
    ]
