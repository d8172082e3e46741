"""How many parameters ZeRO-3 gathers in a step, by the rule of `runtime/data/units.py`.

Each layer is gathered for its forward and for its backward, the embedding and the head for the
forward alone. What is whole and among the units that are made whole next is not gathered again:
the last layer of a stage if its backward follows its forward, the first one if its next forward
follows its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.pricer import EMBEDDING, HEAD
from triptych.cost.storage import Storage
from triptych.schedule.action import Action, Kind

_WINDOW = 4
"""Micro-batches per pipeline rank after which a schedule's steady state is known."""


class Gathered(NamedTuple):
    """Elements gathered by one rank in a step."""

    dense: float = 0.0
    expert: float = 0.0


def gathered(
    frame: Frame, storage: Storage, schedule: str, stage_index: int, rank: int
) -> Gathered:
    """What a stage gathers in a step."""
    pricer, setting = frame.pricer, frame.settings[stage_index]
    stage, rounds = frame.stages[stage_index], frame.num_microbatches
    layers = range(stage.start, stage.stop)
    is_first, is_last = stage_index == 0, stage_index == len(frame.stages) - 1
    times = dict.fromkeys(layers, 2.0 * rounds)
    times[HEAD] = float(rounds)
    for part, count in _kept(frame, storage, schedule, stage_index, rank).items():
        times[part] -= count
    dense = expert = 0.0
    for layer in layers:
        unit = pricer.unit(pricer.kind_of_layer[layer], setting)
        dense, expert = dense + times[layer] * unit.dense, expert + times[layer] * unit.expert
    if is_first:
        dense += rounds * pricer.unit(EMBEDDING, setting).dense
    if is_last:
        norm = pricer.local(HEAD, setting)[0].weight_elements
        dense += times[HEAD] * (pricer.unit(HEAD, setting).dense - norm)
        dense += times[layers[-1]] * norm
    return Gathered(dense, expert)


def _kept(
    frame: Frame, storage: Storage, schedule: str, stage_index: int, rank: int
) -> Mapping[int, float]:
    """How often in a step each layer (or the head) is still whole when it is used again."""

    def of(num_microbatches: int) -> Counter[int]:
        program = frame.program(schedule, num_microbatches)
        return _kept_in(program.actions[rank], frame, storage, stage_index)

    count, ranks = frame.num_microbatches, frame.num_ranks
    window = ranks * _WINDOW + count % ranks
    if count <= window:
        return of(count)
    seen, before = of(window), of(window - ranks)
    rounds = (count - window) / ranks
    return {layer: n + rounds * (n - before[layer]) for layer, n in seen.items()}


def _kept_in(
    actions: Sequence[Action], frame: Frame, storage: Storage, stage_index: int
) -> Counter[int]:
    stage, is_first = frame.stages[stage_index], stage_index == 0
    is_last = stage_index == len(frame.stages) - 1
    kept: Counter[int] = Counter()
    for one, other in pairwise(action for action in actions if _runs(action)):
        if one.stage != stage_index or other.stage != stage_index:
            continue
        whole = stage.stop - 1 if one.kind is Kind.F else stage.start
        if one.kind is Kind.F and is_last and storage.prefetch == 0:
            continue  # released for the head
        if one.kind is other.kind is Kind.F and is_last:
            kept[HEAD] += stage.num_layers + int(is_first) <= storage.prefetch
        back = stage.stop - 1 - whole
        ahead = whole - stage.start + int(is_first) if other.kind is Kind.F else back
        kept[whole] += ahead <= storage.prefetch
    return kept


def _runs(action: Action) -> bool:
    """True for what runs through the layers: weight gradients need no weights."""
    return action.kind in (Kind.F, Kind.B, Kind.I)
