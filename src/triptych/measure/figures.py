"""The figures of a calibration, each a piece of work of seconds that all ranks do together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.cluster.measured import OPERATIONS
from triptych.cluster.measured_toml import OPERATORS
from triptych.measure.host import host
from triptych.measure.kernels import (
    Found,
    attention,
    copied,
    operator,
    optimizer,
    products,
    read,
)
from triptych.measure.messages import group_sizes, mean_of_members, messages
from triptych.measure.watch import Place, Watch
from triptych.runtime.precision import torch_dtype

Merge = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is measured under a name, and how the ranks' numbers become one."""

    name: str
    run: Callable[[Watch], Found]
    merge: Merge = statistics.fmean


def figures(place: Place, dtypes: Sequence[str]) -> list[Figure]:
    """All figures of a launch, the quickest kinds first."""
    found = [
        Figure(name="host", run=host),
        Figure(name="copy", run=copied),
        Figure(name="read", run=read),
        Figure(name="optimizer", run=optimizer),
    ]
    for word in dtypes:
        dtype = torch_dtype(word)
        found += [
            Figure(name=f"{word} {name}", run=partial(operator, dtype=dtype, name=name))
            for name in OPERATORS
        ]
        found.append(Figure(name=f"{word} attention", run=partial(attention, dtype=dtype)))
        found.append(Figure(name=f"{word} products", run=partial(products, dtype=dtype)))
    return found + link_figures(place)


def link_figures(place: Place) -> list[Figure]:
    """Messages within a node and between nodes, where there are several ranks or nodes."""
    found = []
    for words, between in (("link", False), ("network", True)):
        if group_sizes(place, between):
            found += [
                Figure(
                    name=f"{words} {name}",
                    run=partial(messages, name=name, between_nodes=between),
                    merge=mean_of_members,
                )
                for name in OPERATIONS
            ]
    return found
