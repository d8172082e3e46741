"""Why a plan is where it is in the ranking, and what holds the best one back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triptych.cost.frame import Frame
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.cost.traffic import frame_traffic
from triptych.cost.work import rank_work
from triptych.units import format_seconds

_WORDS = {
    "compute": "computing",
    "tensor_comm": "tensor-parallel communication",
    "pipeline_comm": "pipeline messages",
    "data_comm": "gradient and parameter exchange",
    "context_comm": "context-parallel communication",
    "expert_comm": "expert dispatch",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}

_WORK = (
    ("arithmetic", "matrix products"),
    ("arithmetic", "attention"),
    ("memory bandwidth", "operators that memory bounds"),
    ("host", "loss, host and gradient sums"),
)
"""What binds if most of the work is of a kind, and that kind."""

BINDS = 0.05
"""Share of a step from which a term is said to bind."""

FULL = 0.85
"""Share of the memory from which memory is said to bind."""


def reason(prediction: Prediction, best: Prediction, *, by_memory: bool = False) -> str:
    """The deciding difference to the best plan; for the best plan, where its time goes."""
    if prediction is best:
        text = _own(prediction, "smallest" if by_memory else "fastest")
    else:
        text = _against(prediction, best)
    if not prediction.runnable:
        text += "; priced, not runnable: " + ", ".join(prediction.reasons)
    return text


def _own(prediction: Prediction, what: str) -> str:
    shares = _largest(prediction.time_s, prediction.step_time_s)
    memory = f"{prediction.peak_memory_gib:.3g} of {prediction.memory_limit_gib:.3g} GiB used"
    return f"{what}: {shares}; {memory}, {prediction.memory_spare:.1%} to spare"


def _largest(time_s: Mapping[str, float], step_s: float) -> str:
    """The largest terms with their shares of the step."""
    order = sorted(time_s, key=lambda term: -time_s[term])
    shown = [term for term in order if time_s[term] >= 0.01 * step_s][:3]
    return ", ".join(f"{time_s[term] / step_s:.0%} {_WORDS[term]}" for term in shown)


def difference(prediction: Prediction, best: Prediction) -> tuple[str, float]:
    """The term of the step time that grew most against the best plan, and by how many seconds."""
    growth = {term: prediction.time_s[term] - best.time_s[term] for term in best.time_s}
    term = max(growth, key=lambda name: growth[name])
    return term, growth[term]


def _against(prediction: Prediction, best: Prediction) -> str:
    """How much slower, the term that grew most, and the memory if it is what was bought."""
    slower = prediction.step_time_s / best.step_time_s - 1
    term, more_s = difference(prediction, best)
    saved_gib = best.peak_memory_gib - prediction.peak_memory_gib
    memory = ""
    if abs(saved_gib) > 0.1 * best.peak_memory_gib:
        memory = f"; needs {abs(saved_gib):.3g} GiB {'less' if saved_gib > 0 else 'more'}"
    if abs(slower) < 0.0005:
        return "as fast as the best" + memory
    if slower < 0:
        return f"{-slower:.1%} faster" + memory
    return f"{slower:.1%} slower: {format_seconds(more_s)} more {_WORDS[term]}{memory}"


# --- what binds --------------------------------------------------------------------------------


def binding(prediction: Prediction, pricer: Pricer) -> tuple[str, ...]:
    """What the best plan would gain from, strongest first: bandwidth, batch, memory, arithmetic."""
    found = [*_bandwidth(prediction, pricer), *_batch(prediction, pricer), *_memory(prediction)]
    found.append(_arithmetic(prediction, pricer))
    return tuple(text for _, text in sorted(found, reverse=True))


Found = tuple[float, str]
"""A share of the step that could be won, and the sentence."""


def _arithmetic(prediction: Prediction, pricer: Pricer) -> Found:
    """Computing, and what it is spent on where most of it is; the largest part binds."""
    share = prediction.time_s["compute"] / prediction.step_time_s
    frame = Frame.of(pricer, prediction.plan)
    work = max((rank_work(frame, rank) for rank in frame.distinct), key=sum)
    parts = list(zip(work, _WORK, strict=True))
    spent = ", ".join(f"{part_s / sum(work):.0%} {word}" for part_s, (_, word) in parts)
    _, (binds, _) = max(parts)
    return share, f"{binds}: {share:.0%} of the step computes; of that {spent}"


def _bandwidth(prediction: Prediction, pricer: Pricer) -> Iterator[Found]:
    """Exposed communication of each axis, with the links that it crosses."""
    plan = prediction.plan
    inside = pricer.cluster.groups[0].devices_per_node
    spans = {
        "tensor_comm": plan.tp,
        "context_comm": plan.tp * plan.cp,
        "expert_comm": plan.tp * plan.ep,
        "data_comm": plan.tp * plan.cp * plan.dp,
        "pipeline_comm": plan.world_size,
    }
    for term, ranks in spans.items():
        share = prediction.time_s[term] / prediction.step_time_s
        if share >= BINDS:
            link = "network" if ranks > inside else "links within a node"
            yield share, f"bandwidth ({link}): {share:.0%} of the step is exposed {_WORDS[term]}"


def _batch(prediction: Prediction, pricer: Pricer) -> Iterator[Found]:
    """A bubble that more micro-batches would fill."""
    share = prediction.time_s["bubble"] / prediction.step_time_s
    if share >= BINDS:
        plan = prediction.plan
        count = plan.num_microbatches(pricer.workload.global_batch)
        yield (
            share,
            f"bubble: {share:.0%} of the step waits, with {count} micro-batches on {plan.pp} "
            "pipeline ranks; a larger global batch has more of them",
        )


def _memory(prediction: Prediction) -> Iterator[Found]:
    """Memory that is full, or that is bought with recomputation."""
    plan, again = prediction.plan, prediction.hfu / prediction.mfu - 1 if prediction.mfu else 0.0
    used = prediction.peak_memory_gib / prediction.memory_limit_gib
    texts = [f"{used:.0%} of it is used"] if used >= FULL else []
    if plan.recompute != "none" and again >= BINDS:
        texts.append(f"{again:.0%} more FLOPs are spent on recomputation to save it")
    if plan.zero == 3:
        texts.append("ZeRO-3 gathers weights to save it")
    if texts:
        yield max(again / (1 + again), 0.0), "memory: " + "; ".join(texts)


def zero_bytes(prediction: Prediction, pricer: Pricer) -> dict[str, float]:
    """Bytes that a rank of a plan sends over its data axis in a step, under ZeRO-1, 2 and 3.

    ZeRO-1 sends once a step; with a pipeline ZeRO-2 and 3 send in each of its micro-batches.
    """
    plan = prediction.plan
    if plan.dp * plan.cp == 1:
        return {}
    frame = Frame.of(pricer, plan)
    storages = {z: Storage.of(plan.with_(zero=z, accumulation="auto")) for z in (1, 2, 3)}
    return {
        str(zero): float(frame_traffic(frame, storage, plan.schedule).data)
        for zero, storage in storages.items()
    }
