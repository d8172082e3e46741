"""A trace through replicas: the loop over requests and completed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.serve.core.request import Request
from triptych.simulate.replica import Record, Replica
from triptych.simulate.trace import Trace

# The replica that a request goes to.
Dispatch = Callable[[Request, Sequence[Replica]], int]
# The latency class of the request with an index in the trace.
ClassOf = Callable[[int], str]


def least_loaded(request: Request, replicas: Sequence[Replica]) -> int:
    """The replica with the fewest requests waiting and running; of several, the first."""
    loads = [replica.scheduler.load for replica in replicas]
    return min(range(len(loads)), key=lambda i: loads[i].num_waiting + loads[i].num_running)


def simulate(
    trace: Trace,
    replicas: Sequence[Replica],
    dispatch: Dispatch = least_loaded,
    class_of: ClassOf = lambda index: "default",
    max_tokens: int | None = None,
) -> list[Record]:
    """Runs all requests to their ends and returns their records, in the order of the trace.

    Events come by time; at equal times completed steps (of the first replica first) come before
    requests. Prompts are simulated without content: nothing is shared between them. Clients ask
    for `max_tokens`, or for exactly the length of the answer.
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
        replica = replicas[dispatch(request, replicas)]
        records.append(replica.submit(request, output_tokens, arrival_s))
    _complete_until(replicas, float("inf"))
    return records


def _complete_until(replicas: Sequence[Replica], now_s: float) -> None:
    while True:
        first = min(replicas, key=lambda replica: replica.next_s)
        if first.next_s > now_s or first.next_s == float("inf"):
            return
        first.complete()
