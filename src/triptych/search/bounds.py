"""What no plan of a set undercuts, from the model as a whole: admissible bounds of time and memory.

Pipeline ranks share the layers. The one with most work has at least the mean of it, and so has the
one that holds most; every schedule has a whole micro-batch in flight on each rank at some moment,
when its forwards are done and its backwards are to come. Stages, splits of layers, schedules and
ZeRO can do no better, so a set of plans whose bound is not good enough is not looked into.
"""

from __future__ import annotations

from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan

SLACK = 1 - 1e-8
"""Bounds are sums in another order than what they bound."""


class Bound(NamedTuple):
    """What a set of plans takes at least."""

    time_s: float
    memory_bytes: float


def whole_model(pricer: Pricer, plan: Plan, setting: Setting) -> Frame:
    """The model as the single stage of `plan`, with one micro-batch."""
    return Frame.build(pricer, plan.stages, (setting,), 1, False, 1)


def least_time(whole: Frame, num_microbatches: int, num_ranks: int) -> float:
    """Seconds that no plan with these degrees and settings undercuts."""
    (cost,) = whole.costs
    backward_s = min(cost.backward_s, cost.input_s + cost.weight_s)
    work_s = num_microbatches * (cost.forward_s + backward_s) / num_ranks
    through_s = cost.forward_s + min(cost.backward_s, cost.input_s)
    return SLACK * max(work_s, through_s)


def least_state(whole: Frame, storage: Storage, num_ranks: int) -> float:
    """Bytes of state on the fullest pipeline rank.

    Buffers are as large as their largest tenant: ranks together have no smaller ones than one.
    """
    return whole.state(storage)[0] / num_ranks


def least_work(whole: Frame, num_ranks: int) -> float:
    """Bytes of activations on the fullest pipeline rank."""
    pricer, (setting,), (cost,) = whole.pricer, whole.settings, whole.costs
    owns = (setting, setting.kept) if setting.recompute_every > 1 else (setting,)
    pieces = [pricer.piece(kind, own) for kind in range(len(pricer.kinds)) for own in owns]
    working = min([piece.working_bytes for piece in pieces])
    return working + cost.saved_bytes / num_ranks


def least_peak(whole: Frame, state_bytes: float, work_bytes: float) -> float:
    """The peak of the fullest rank, from what `least_state` and `least_work` say."""
    return SLACK * whole.peak_bytes([state_bytes], [work_bytes])
