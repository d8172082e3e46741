"""What the seconds of computing are spent on: products, attention, operators that memory bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.operators import operator_seconds
from triptych.cost.pricer import EMBEDDING, HEAD, Layers, Pricer
from triptych.cost.recompute import repeated


class Work(NamedTuple):
    """Seconds of a micro-batch on a pipeline rank; `other_s` are loss, waits for the host and
    adding up gradients.
    """

    products_s: float
    attention_s: float
    memory_s: float
    other_s: float


def rank_work(frame: Frame, rank: int) -> Work:
    """The work of a pipeline rank: forward, backward and what that runs again."""
    by_kind = {"gemm": 0.0, "attention": 0.0, "memory": 0.0}
    total_s = 0.0
    for stage in frame.stages_of(rank):
        cost, pricer = frame.costs[stage], frame.pricers[stage]
        total_s += cost.forward.compute_s + cost.backward.compute_s
        for layers in _pieces(frame, stage):
            for kind, seconds in _operators(pricer, layers):
                by_kind[kind] += layers.number * seconds
    other_s = max(0.0, total_s - sum(by_kind.values()))
    return Work(by_kind["gemm"], by_kind["attention"], by_kind["memory"], other_s)


def _pieces(frame: Frame, index: int) -> Iterator[Layers]:
    """The layers and ends of a stage."""
    pricer, stage, setting = frame.pricers[index], frame.stages[index], frame.settings[index]
    yield from pricer.layers(
        pricer.counts(stage.start, stage.stop, setting.recompute_every), setting
    )
    if index == 0:
        yield Layers(EMBEDDING, setting, 1)
    if index == len(frame.stages) - 1:
        yield Layers(HEAD, setting, 1)


def _operators(pricer: Pricer, layers: Layers) -> Iterator[tuple[str, float]]:
    """Kind and seconds of each operator of a piece; the loss is no operator here."""
    setting = pricer.as_compiled(layers.kind, layers.setting)
    site, local = pricer.site(setting), pricer.local(layers.kind, setting)
    again: list[int] = []
    if layers.kind >= 0:
        again = repeated(site, pricer.kinds[layers.kind], local, setting)
    for index, op in enumerate(local):
        if op.operator.name != "cross_entropy":
            seconds = operator_seconds(site, op, setting)
            repeated_s = again.count(index) * seconds.forward_s
            yield op.operator.kind, seconds.forward_s + seconds.backward_s + repeated_s
