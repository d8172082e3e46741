"""What the step time would be with other bandwidth, memory or batch, and if the choice changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from triptych.cluster.cluster import Cluster, Link, NodeGroup
from triptych.cost.predict import predict
from triptych.errors import PlanError
from triptych.plan.plan import Plan
from triptych.plan.rules import verify
from triptych.search.search import Question, answer

BANDWIDTHS = (0.5, 2.0)
MEMORIES = (0.9, 1.1)
BATCHES = (0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The best plan after a change; `plan` is None if nothing fits or nothing is legal then.

    `kept_step_time_s` is that of the present choice after the change; None if it cannot be kept.
    `speed` is in tokens per second, over the present best.
    """

    change: str
    plan: Plan | None
    step_time_s: float | None
    speed: float | None
    kept_step_time_s: float | None
    is_same: bool

    def to_json(self) -> dict[str, Any]:
        """The fields, the plan in one line."""
        return {
            "change": self.change,
            "plan": self.plan.short() if self.plan else None,
            "step_time_s": self.step_time_s,
            "speed": self.speed,
            "kept_step_time_s": self.kept_step_time_s,
            "is_same": self.is_same,
        }


def sensitivity(question: Question, best: Plan, step_time_s: float) -> tuple[Effect, ...]:
    """The effect of each change on the answer to a question, whose best plan is known."""
    tokens_per_s = question.workload.tokens / step_time_s
    return tuple(_effect(change, other, best, tokens_per_s) for change, other in _changed(question))


def _effect(change: str, question: Question, best: Plan, tokens_per_s: float) -> Effect:
    try:
        found = answer(question, top=1, with_closest=False).plans
    except PlanError:  # nothing is legal after the change
        found = ()
    prediction = found[0].prediction if found else None
    speed = question.workload.tokens / prediction.step_time_s if prediction else None
    return Effect(
        change=change,
        plan=found[0].plan if found else None,
        step_time_s=prediction.step_time_s if prediction else None,
        speed=speed / tokens_per_s if speed else None,
        kept_step_time_s=_kept_s(question, best),
        is_same=bool(found) and found[0].plan == best,
    )


def _kept_s(question: Question, best: Plan) -> float | None:
    asked = (question.model, question.cluster, question.workload)
    if verify(best, *asked):
        return None
    prediction = predict(*asked, best)
    return prediction.step_time_s if prediction.memory_spare >= question.spare else None


def _changed(question: Question) -> Iterator[tuple[str, Question]]:
    """Every changed question with the change in words."""
    cluster, workload = question.cluster, question.workload
    if sum(group.nodes for group in cluster.groups) > 1:
        for factor in BANDWIDTHS:
            other = replace(cluster, network=_faster(cluster.network, factor))
            yield f"network x{factor:g}", replace(question, cluster=other)
    if max(group.devices_per_node for group in cluster.groups) > 1:
        for factor in BANDWIDTHS:
            groups = (replace(g, link=_faster(g.link, factor)) for g in cluster.groups)
            other = replace(cluster, groups=tuple(groups))
            yield f"links in the node x{factor:g}", replace(question, cluster=other)
    for factor in MEMORIES:
        yield f"memory x{factor:g}", replace(question, cluster=_larger(cluster, factor))
    for factor in BATCHES:
        batch = workload.global_batch * factor
        if batch == int(batch) > 0:
            other_work = replace(workload, global_batch=int(batch))
            yield f"global batch x{factor:g}", replace(question, workload=other_work)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def _larger(cluster: Cluster, factor: float) -> Cluster:
    def grown(group: NodeGroup) -> NodeGroup:
        device = replace(group.device, memory_bytes=group.device.memory_bytes * factor)
        return replace(group, device=device)

    return replace(cluster, groups=tuple(map(grown, cluster.groups)))
