"""How the cost model does on runs that none of its numbers has seen.

The numbers that measured runs decide (`sides/numbers.py`) are searched again from neutral guesses
on one half of the rows of each source (split by a hash of the id) and scored on the other, both
ways; with --leave-out, on all sources but one, scored on that one. Rows that are known to be
unusable are left out of both (--unusable, a file of ids).

    python benchmarks/validate_halves.py measurements.csv [--unusable ids.txt]
        [--leave-out SOURCE ...] [--sweeps 3] [--single 0.2] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sides.numbers import NUMBERS, Values, tune
from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.step import Priced, step_bound_s, step_seconds
from triptych.cost.storage import Storage
from triptych.validate.case import Case, case_of
from triptych.validate.figures import errors, quantile, source_mean
from triptych.validate.table import Skip, read_table

GOLD = (
    "ptdp1",
    "ptdp2",
    "ptdp3",
    "bsa100",
    "llmf",
    "dlperf",
    "simumax",
    "vtrain-multi",
    "vtrain-single",
    "titan",
    "tr3m",
    "alpa3p",
)
"""Sources whose plans are stated in full; `tr3m` is a part of `bsv100`."""

WORST = 0.5
"""An error counts as this much at most, so that no single row decides."""


def source(case: Case) -> str:
    """The source of a row; the dense models of one that also has others."""
    if "tr3m" in case.row.text("model_name"):
        return "tr3m"
    return case.row.source


def usable(path: Path, unusable: set[str]) -> list[Case]:
    """The rows with a full plan and a step time in 16 bit."""
    cases = []
    for row in read_table(path, ["id"], ["iteration_time_s"]):
        if row.id in unusable:
            continue
        try:
            case = case_of(row)
        except Skip:
            continue
        is_dense = case.model.experts is None
        if case.measured_s and is_dense and source(case) in GOLD:
            cases.append(case)
    return cases


def seconds(case: Case) -> float:
    """The predicted step; 1F1B by its closed form, which is close and quick."""
    whole = math.floor(case.rounds)
    value = _whole_seconds(case, whole)
    if case.rounds > whole:
        value += (case.rounds - whole) * (_whole_seconds(case, whole + 1) - value)
    return value


def _whole_seconds(case: Case, rounds: int) -> float:
    workload = replace(case.workload, global_batch=rounds * case.plan.round_rows)
    frame = Frame.of(Pricer(case.model, case.cluster, workload, case.software), case.plan)
    priced = Priced.of(frame, Storage.of(case.plan))
    closed = case.plan.schedule == "1f1b"
    return (step_bound_s if closed else step_seconds)(frame, priced, case.plan.schedule)


def error_of(case: Case) -> float | None:
    """The logarithm of predicted over measured; None if it cannot be priced."""
    try:
        return math.log(seconds(case) / (case.measured_s or math.nan))
    except ValueError:
        return None


def loss_over(cases: Sequence[Case]) -> Any:
    """A loss of the errors of `cases`: mean and median of each source, averaged over sources."""
    names = [source(case) for case in cases]

    def loss(found: Sequence[float | None]) -> float:
        by_source: dict[str, list[float]] = defaultdict(list)
        for name, error in zip(names, found, strict=True):
            if error is not None:
                by_source[name].append(min(abs(error), WORST))
        parts = [(sum(e) / len(e) + quantile(e, 0.5)) / 2 for e in by_source.values()]
        return sum(parts) / len(parts)

    return loss


def table(cases: Sequence[Case], values: Values) -> dict[str, Any]:
    """Relative errors by source, and their mean over sources."""
    values.set_constants()
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        error = error_of(values.put_into(case))
        if error is not None:
            found[source(case)].append(math.exp(error) - 1)
    by_source = {name: errors(listed) for name, listed in found.items()}
    return {**by_source, "mean of sources": source_mean(by_source.values())}


def half_of(case: Case) -> int:
    """0 or 1, by a hash of the row's id."""
    return hashlib.sha1(case.row.id.encode()).digest()[0] % 2


def part_of(cases: Sequence[Case], share: float) -> list[Case]:
    """All cases, but of single-node vTrain only a share: enough to tune on."""
    kept = []
    for case in cases:
        draw = hashlib.md5(case.row.id.encode()).digest()[0] / 256
        if source(case) != "vtrain-single" or draw < share:
            kept.append(case)
    return kept


def show(title: str, found: dict[str, Any]) -> None:
    """One table."""
    print(f"\n{title}")
    for name, figures in found.items():
        parts = [figures[f"{key}_abs_rel_error"] for key in ("median", "mean", "p90")]
        line = "  ".join(f"{100 * part:6.1f}" for part in (*parts, figures["bias"]))
        print(f"  {name:16s} {figures['n']:5d}  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--unusable", type=Path)
    parser.add_argument("--leave-out", nargs="*", default=None)
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--single", type=float, default=0.2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unusable = set(options.unusable.read_text().split()) if options.unusable else set()
    cases = usable(options.table, unusable)
    runs: list[tuple[str, list[Case], list[Case]]] = []
    if options.leave_out is None:
        for half in (0, 1):
            tuned = [case for case in cases if half_of(case) != half]
            scored = [case for case in cases if half_of(case) == half]
            runs.append((f"half {half}, tuned on the other", tuned, scored))
    for name in options.leave_out or ():
        tuned = [case for case in cases if source(case) != name]
        runs.append((f"{name}, left out", tuned, [c for c in cases if source(c) == name]))
    document: dict[str, Any] = {"numbers": len(NUMBERS)}
    for title, tuned, scored in runs:
        part = part_of(tuned, options.single)
        values = tune(part, error_of, loss_over(part), sweeps=options.sweeps)
        document[title] = table(scored, values)
        if not options.json:
            show(title, document[title])
    if options.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
