"""The operators of a layer in order, and who reads what."""

from __future__ import annotations

from triptych.capture.graph import ENTRY
from triptych.capture.operators import Reader
from triptych.errors import ModelError
from triptych.model.operator import Captured, Operator


def captured(reader: Reader) -> Captured:
    """The operators of a layer and who reads what, tokens on their way to experts included."""
    order = _order(reader)
    operators: list[Operator] = []
    place = {ENTRY: 0}
    flows: list[tuple[int, int]] = []

    def put(operator: Operator, sources: list[int]) -> int:
        operators.append(operator)
        flows.extend((source, len(operators)) for source in dict.fromkeys(sources))
        return len(operators)

    for number in order:
        operator = reader.operators[number]
        sources = [
            place[source]
            for source in reader.grouped.sources(number)
            if source not in reader.routers or operator.name == "router"
        ]
        if operator.kind == "attention":  # values travel with the queries and keys made beside them
            sources = [s for s in sources if not any(_leads(flows, s, o) for o in sources)]
        if operator.name == "experts_up":
            router = [place[router] for router in reader.routers]
            sources = [put(_dispatch(operator), [*sources, *router])]
        place[number] = put(operator, sources)
    flows.append((place[reader.grouped.result], 0))
    return Captured(operators=tuple(operators), flows=tuple(flows))


def _leads(flows: list[tuple[int, int]], start: int, end: int) -> bool:
    """True if what `start` writes comes to `end`."""
    return start != end and any(
        source == start and (target == end or _leads(flows, target, end))
        for source, target in flows
    )


def _dispatch(up: Operator) -> Operator:
    moved = float(up.tokens_factor * up.k)
    return Operator(
        name="dispatch", kind="memory", split="sequence", elements=2.0 * moved, saved=moved
    )


def _order(reader: Reader) -> list[int]:
    """Groups, each after what it reads, else as they were called."""
    done: list[int] = []
    left = sorted(reader.groups)
    while left:
        ready = next((n for n in left if _needs(reader, n) <= {ENTRY, *done}), None)
        if ready is None:
            raise ModelError("what it calls cannot be brought into groups")
        left.remove(ready)
        done.append(ready)
    return done


def _needs(reader: Reader, number: int) -> set[int]:
    chosen = reader.groups[number].chosen_by
    return {*reader.grouped.sources(number), *(() if chosen is None else (chosen,))} - {number}
