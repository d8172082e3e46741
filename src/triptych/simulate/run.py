"""A trace through replicas: the loop over requests and completed steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from triptych.serve.core.request import Request, State
from triptych.simulate.replica import Record, Replica
from triptych.simulate.trace import Trace

# The replica that a request goes to; None refuses it.
Dispatch = Callable[[Request, Sequence[Replica]], int | None]
# The latency class of the request with an index in the trace.
ClassOf = Callable[[int], str]

_next_s = attrgetter("next_s")


def least_loaded(request: Request, replicas: Sequence[Replica]) -> int:
    """The replica with the fewest requests waiting and running; of several, the first."""
    books = [replica.scheduler.book for replica in replicas]
    return min(range(len(books)), key=lambda i: len(books[i].waiting) + books[i].num_running)


def simulate(
    trace: Trace,
    replicas: Sequence[Replica],
    dispatch: Dispatch = least_loaded,
    class_of: ClassOf = lambda index: "default",
    max_tokens: int | None = None,
) -> list[Record]:
    """Runs all requests to their ends and returns their records, in the order of the trace.

    Events come by time; at equal times completed steps (of the first replica first) come before
    requests. What one replica gives back of a shared budget is an event for the others of its line.
    Prompts are simulated without content: nothing is shared between them. Clients ask for
    `max_tokens`, or for exactly the length of the answer.
    """
    records = []
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    for index, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        arrival_s, prompt_tokens, output_tokens = row
        _complete_until(replicas, arrival_s)
        request = Request(
            id=index,
            prompt=(0,) * prompt_tokens,
            max_tokens=output_tokens if max_tokens is None else max_tokens,
            latency_class=class_of(index),
            arrival_s=arrival_s,
            salt=index.to_bytes(8, "little"),
        )
        chosen = dispatch(request, replicas)
        if chosen is None:
            refused = Record(
                index,
                request.latency_class,
                arrival_s,
                prompt_tokens,
                output_tokens,
                State.REFUSED,
            )
            records.append(refused)
        else:
            records.append(replicas[chosen].submit(request, output_tokens, arrival_s))
    _complete_until(replicas, math.inf)
    return records


def _complete_until(replicas: Sequence[Replica], now_s: float) -> None:
    shared = list({id(r.line): r.line for r in replicas if len(r.line.runners) > 1}.values())
    for line in shared:
        line.run(now_s)
    while True:
        first = min(replicas, key=_next_s)
        if first.next_s > now_s or math.isinf(first.next_s):
            return
        first.complete()
        first.line.run(now_s)  # what completes changes no other line
