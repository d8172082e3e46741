"""One sentence on why a plan is where it is in the ranking."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.cost.prediction import Prediction
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


def reason(prediction: Prediction, best: Prediction) -> str:
    """The deciding difference to the best plan; for the best plan, where its time goes."""
    text = _own(prediction) if prediction is best else _against(prediction, best)
    if not prediction.runnable:
        text += "; priced, not runnable: " + ", ".join(prediction.reasons)
    return text


def _own(prediction: Prediction) -> str:
    shares = _largest(prediction.time_s, prediction.step_time_s)
    memory = f"{prediction.peak_memory_gib:.3g} of {prediction.memory_limit_gib:.3g} GiB used"
    return f"fastest: {shares}; {memory}"


def _largest(time_s: Mapping[str, float], step_s: float) -> str:
    """The largest terms with their shares of the step."""
    order = sorted(time_s, key=lambda term: -time_s[term])
    shown = [term for term in order if time_s[term] >= 0.01 * step_s][:3]
    return ", ".join(f"{time_s[term] / step_s:.0%} {_WORDS[term]}" for term in shown)


def _against(prediction: Prediction, best: Prediction) -> str:
    """How much slower, the term that grew most, and the memory if it is what was bought."""
    slower = prediction.step_time_s / best.step_time_s - 1
    growth = {term: prediction.time_s[term] - best.time_s[term] for term in best.time_s}
    term = max(growth, key=lambda name: growth[name])
    saved_gib = best.peak_memory_gib - prediction.peak_memory_gib
    memory = f"; needs {saved_gib:.3g} GiB less" if saved_gib > 0.1 * best.peak_memory_gib else ""
    if slower < 0.0005:
        return "as fast as the best" + memory
    grown = format_seconds(growth[term])
    return f"{slower:.1%} slower: {grown} more {_WORDS[term]}{memory}"
