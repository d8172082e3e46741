"""Which requests may wait at all: everything refused is refused here, on arrival, with numbers."""

from __future__ import annotations

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import LatencyClass, Refusal, Request


def total_tokens(request: Request, limits: Limits) -> int:
    """Prompt and answer of one continuation at its longest."""
    if request.max_tokens is None:
        return limits.context
    return len(request.prompt) + request.max_tokens


def unfit(request: Request, limits: Limits) -> Refusal | None:
    """Why a request could never run, if so."""
    prompt, total = len(request.prompt), total_tokens(request, limits)
    if prompt == 0:
        return Refusal("the prompt has no tokens; at least 1 is needed")
    if request.max_tokens is not None and request.max_tokens < 0:
        return Refusal(f"max_tokens is {request.max_tokens}; 0 or more is needed")
    if not 1 <= request.n <= limits.max_running:
        return Refusal(
            f"n is {request.n}; from 1 to {limits.max_running} continuations run at once"
        )
    if prompt > limits.context:
        return Refusal(
            f"the prompt has {prompt} tokens; the context limit is {limits.context} tokens, "
            "prompt and answer together"
        )
    if total > limits.context:
        return Refusal(
            f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}, together "
            f"{total}; the context limit is {limits.context} tokens: max_tokens of at most "
            f"{limits.context - prompt} would fit"
        )
    return None


def full(limits: Limits, retry_after_s: float) -> Refusal:
    """The refusal of a request that finds no place to wait."""
    message = f"{limits.max_waiting} requests are waiting, as many as may"
    return Refusal(message, max(1.0, retry_after_s))


def late(latency: LatencyClass, margin: float, ttft_s: float) -> Refusal | None:
    """The refusal of a request whose first token is predicted to miss its objective."""
    if ttft_s <= latency.ttft_s * (1 - margin):
        return None
    return Refusal(
        f"the first token would come after about {ttft_s:.3g} s; the objective of class "
        f"{latency.name} is {latency.ttft_s:.3g} s less {margin:.0%}",
        max(0.1, ttft_s - latency.ttft_s * (1 - margin)),
    )
