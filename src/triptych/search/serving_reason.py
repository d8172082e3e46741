"""Why a serving plan is where it is: what it falls short of, what limits it, how it compares."""

from __future__ import annotations

import math

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.rates import rates, slowest_device
from triptych.cost.serving.predict import ServingPrediction
from triptych.plan.serving import ServingWorkload
from triptych.units import GIB, format_bytes, format_count, format_seconds

WORDS = {
    "products": "products",
    "attention": "reading keys and values",
    "kernels": "norms, activations and other small kernels",
    "tensor": "all-reduces",
    "head": "head and sampling",
    "host": "the host",
}

_OBJECTIVES = {
    "rate": "arrivals outrun it",
    "ttft": "misses the objective for the first token",
    "tpot": "misses the objective between tokens",
}

BANDWIDTH_BOUND = 0.6
"""Share of the products' time that reading their weights takes where that is what limits them."""


BUSY = 0.7
"""Share of its time from which the process that streams answers is worth a word."""


def shortfall(prediction: ServingPrediction) -> str:
    """What a plan falls short of first; empty if of nothing."""
    if not prediction.fits:
        return "does not fit in memory"
    return next((words for name, words in _OBJECTIVES.items() if not _meets(prediction, name)), "")


def _meets(prediction: ServingPrediction, name: str) -> bool:
    return prediction.meets.get(name, True)


def binding(
    best: ServingPrediction, cluster: Cluster, workload: ServingWorkload
) -> tuple[str, ...]:
    """What limits the best plan, one line each."""
    step_s = sum(best.step_s.values())
    largest = sorted(best.step_s.items(), key=lambda term: -term[1])
    shown = ", ".join(
        f"{seconds / step_s:.0%} {WORDS[name]}" for name, seconds in largest[:3] if seconds
    )
    lines = [f"a step of {best.batch:.3g} sequences takes {format_seconds(step_s)}: {shown}"]
    lines += _products(best, cluster)
    lines += _room(best, workload)
    lines += _spare(best, workload)
    if best.streaming > BUSY:
        lines.append(
            f"the process that streams answers is at work {best.streaming:.0%} of the time"
        )
    return tuple(lines)


def objective(larger: ServingPrediction, workload: ServingWorkload) -> tuple[str, ...]:
    """Which objective a larger batch would miss."""
    seconds = {"ttft": larger.ttft_s, "tpot": larger.tpot_s}
    wanted = {"ttft": workload.ttft_s, "tpot": workload.tpot_s}
    names = {"ttft": "for the first token", "tpot": "between tokens"}
    return tuple(
        f"the objective {names[name]} limits the batch: with {larger.plan.batch} it would be "
        f"{format_seconds(seconds[name])}, {format_seconds(wanted[name] or 0.0)} are asked for"
        for name in names
        if not _meets(larger, name)
    )


def _products(best: ServingPrediction, cluster: Cluster) -> list[str]:
    """Whether products wait for weights or for arithmetic."""
    device = rates(slowest_device(cluster), "bf16")
    read_s = best.weights_gib * GIB / device.read_bytes_per_s
    if read_s < BANDWIDTH_BOUND * best.step_s["products"]:
        return ["products are bound by arithmetic"]
    if read_s > best.step_s["products"] + best.step_s["head"]:  # not all are read
        read = "the weights of the experts that any token visits are read once a step"
        return [f"products are bound by memory bandwidth: {read}"]
    return [
        f"products are bound by memory bandwidth: {format_seconds(read_s)} to read "
        f"{best.weights_gib:.3g} GiB of weights once a step, whatever the batch"
    ]


def _room(best: ServingPrediction, workload: ServingWorkload) -> list[str]:
    most = best.max_concurrency // best.plan.replicas
    users = (workload.concurrency or math.inf) / best.plan.replicas
    if workload.rate is None and best.batch < min(most, users) and not best.queue_s:
        return [
            f"a chunk of {best.plan.chunk} tokens has room for {best.batch:.0f} sequences beside "
            "the prompts that keep coming: it limits the batch"
        ]
    if most < best.plan.batch:
        return [
            f"the cache holds {most} sequences of {workload.tokens:.0f} tokens a replica in "
            f"{format_bytes(best.kv_cache_gib * GIB)} a device: its size limits the batch"
        ]
    return []


def _spare(best: ServingPrediction, workload: ServingWorkload) -> list[str]:
    """What is left beyond the rate."""
    if workload.rate is None:
        return []
    share = workload.rate / best.max_requests_per_s
    need = math.ceil(best.plan.replicas * share)
    text = f"the rate is {share:.0%} of what the plan can do"
    if need < best.plan.replicas:
        text += f"; {need} of {best.plan.replicas} replicas would keep up with it"
    return [text]


def compared(
    prediction: ServingPrediction, best: ServingPrediction, workload: ServingWorkload
) -> str:
    """The deciding difference to the best plan; for the best plan, what it is best in."""
    if prediction is best:
        if workload.rate is None and workload.concurrency is None:
            return f"most tokens: {format_count(best.output_tokens_per_s)}/s"
        return f"soonest: {format_seconds(_whole_s(best, workload))} for a whole answer"
    if workload.rate is None and workload.concurrency is None:
        fewer = 1.0 - prediction.output_tokens_per_s / best.output_tokens_per_s
        text = "as many tokens" if fewer < 0.0005 else f"{fewer:.1%} fewer tokens"
    else:
        later = _whole_s(prediction, workload) / _whole_s(best, workload) - 1.0
        text = "as soon" if later < 0.0005 else f"{later:.1%} later"
    return f"{text}; {_difference(prediction, best)}"


def _difference(prediction: ServingPrediction, best: ServingPrediction) -> str:
    """The larger of the two latencies' changes."""
    changes = {
        "to the first token": (prediction.ttft_s, best.ttft_s),
        "between tokens": (prediction.tpot_s, best.tpot_s),
    }
    name = max(changes, key=lambda key: abs(changes[key][0] / changes[key][1] - 1.0))
    mine, other = changes[name]
    return f"{format_seconds(mine)} {name} instead of {format_seconds(other)}"


def _whole_s(prediction: ServingPrediction, workload: ServingWorkload) -> float:
    return prediction.ttft_s + (workload.output_tokens - 1.0) * prediction.tpot_s
