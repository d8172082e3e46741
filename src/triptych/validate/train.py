"""Training runs: each row priced with its plan and program, and the figures of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.cost.kernels.rates import memory_limit_bytes
from triptych.cost.predict import Estimate, estimate_of
from triptych.cost.pricer import Pricer
from triptych.cost.uncertainty import ASSUMED
from triptych.units import GIB
from triptych.validate.case import Case, case_of
from triptych.validate.figures import Outcome, bars, fits, quantity, ranking
from triptych.validate.measured import MEMORY, TIMED, counted_bytes
from triptych.validate.report import Report
from triptych.validate.table import Skip, read_table

REQUIRED = ("id", "gpu", "n_gpus", "seq_len", "dp", "tp", "pp", "micro_batch_size")
MEASURED = (*TIMED, MEMORY)


def validate_training(path: Path) -> Report:
    """Predicted beside measured for a table of training runs (DESIGN section 8).

    Raises InputError if the file is not such a table.
    """
    rows = read_table(path, REQUIRED, MEASURED)
    outcomes, listed, skipped = [], [], Counter[str]()
    for row in rows:
        try:
            outcome = outcome_of(case_of(row))
        except Skip as reason:
            skipped[str(reason)] += 1
            listed.append({"id": row.id, "skipped": str(reason)})
            continue
        outcomes.append(outcome)
        listed.append(_line(outcome))
    return Report(document(outcomes, len(rows), skipped), listed)


def document(outcomes: Sequence[Outcome], rows: int, skipped: Counter[str]) -> dict[str, Any]:
    """The JSON document of `triptych validate`."""
    failed, ran = fits(outcomes)
    coverage, half_width = bars(outcomes)
    return {
        "task": "train",
        "rows": rows,
        "used": len(outcomes),
        "skipped": dict(skipped.most_common()),
        "step_time": quantity(outcomes, lambda one: one.time_error),
        "memory": quantity(outcomes, lambda one: one.memory_error),
        "ranking": ranking(outcomes),
        "oom": failed,
        "ran": ran,
        "coverage_80": coverage,
        "half_width_median": half_width,
    }


def outcome_of(case: Case) -> Outcome:
    """A case, priced."""
    found, seconds = price(case)
    half_width = math.hypot(found.half_width, ASSUMED if case.assumed else 0.0)
    timed = case.measured_s is not None
    total_bytes = found.memory.total_bytes
    return Outcome(
        id=case.row.id,
        source=case.row.source,
        group=case.group,
        plan=f"{case.plan.short()},{case.software.name}",
        predicted_s=seconds if timed else None,
        low_s=seconds * math.exp(-half_width),
        high_s=seconds * math.exp(half_width),
        measured_s=case.measured_s,
        predicted_bytes=counted_bytes(case.row, total_bytes, *found.overhead_bytes),
        measured_bytes=case.measured_bytes,
        fits=_fits(case, total_bytes),
        ran_out=case.ran_out,
        assumed=case.assumed,
    )


def _fits(case: Case, total_bytes: float) -> bool:
    """True if a case fits; where recomputation is not stated, if it fits with any."""
    limit = memory_limit_bytes(case.cluster)
    if total_bytes <= limit or "recompute" not in case.assumed:
        return total_bytes <= limit
    again = replace(case, plan=case.plan.with_(recompute="full"))
    return _price(again, math.floor(case.rounds)).memory.total_bytes <= limit


def price(case: Case) -> tuple[Estimate, float]:
    """The estimate, and the seconds of a step with a ragged last micro-batch."""
    whole = math.floor(case.rounds)
    found = _price(case, whole)
    seconds = found.step.total_s
    if case.rounds > whole:
        more = _price(case, whole + 1).step.total_s
        seconds += (case.rounds - whole) * (more - seconds)
    return found, seconds


def _price(case: Case, rounds: int) -> Estimate:
    workload = replace(case.workload, global_batch=rounds * case.plan.round_rows)
    pricer = Pricer(case.model, case.cluster, workload, case.software)
    return estimate_of(pricer, case.plan)


def _line(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "predicted_s": outcome.predicted_s,
        "low_s": outcome.low_s if outcome.predicted_s else None,
        "high_s": outcome.high_s if outcome.predicted_s else None,
        "measured_s": outcome.measured_s,
        "time_error": outcome.time_error,
        "predicted_gib": (outcome.predicted_bytes or 0.0) / GIB,
        "measured_gib": outcome.measured_bytes and outcome.measured_bytes / GIB,
        "memory_error": outcome.memory_error,
        "fits": outcome.fits,
        "plan": outcome.plan,
        "assumed": " ".join(outcome.assumed),
    }
