"""How the cost model of serving does on rows that none of its numbers has seen.

Rows are split in two by a checksum of their id. By default both halves are scored with the numbers
as they are. With --sweeps N the numbers of every engine family are searched on one half, from the
same guesses for all families, and scored on the other half, both ways.

    python benchmarks/serving_halves.py inference.csv [--sweeps 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.cost.serving.engine import Engine
from triptych.cost.serving.engines import FAMILIES
from triptych.cost.serving.layout import Layout
from triptych.cost.serving.predict import ServingPricer
from triptych.validate.figures import errors, quantile
from triptych.validate.serve import MEASURED, QUANTITIES, REQUIRED
from triptych.validate.served import Served, engine_of, family_of, plan_of, served
from triptych.validate.table import Skip, read_table

Families = Mapping[str, Engine]

NUMBERS = {
    "host_s": 1e-3,
    "sequence_s": 1e-5,
    "kernels": 8.0,
    "decode_rate": 0.8,
    "grouped_heads": 16,
    "fp8_rate": 0.9,
    "weight_rate": 1.0,
    "workspace_bytes": 2e9,
    "one_shot_s": 8e-6,
    "lag_steps": 1.0,
    "request_s": 5e-3,
}
"""What is searched for each family, and where the search begins."""

MOST = {"decode_rate": 1.1, "weight_rate": 1.1, "fp8_rate": 1.15}
STEPS = (2.0, 1.5, 1.25, 1.12, 1.06)
WORST = 1.0
"""The logarithm of an error counts as this much at most, so that no single row decides."""


class Case:
    """A row, and the layout of its plan once it is known."""

    def __init__(self, one: Served) -> None:
        self.one = one
        self.family = family_of(one.row)
        self.layout: Layout | None = None

    @property
    def half(self) -> int:
        """0 or 1, by a checksum of the row's id; the shipped numbers were searched on half 0."""
        return zlib.crc32(self.one.row.id.encode()) % 2

    def errors(self, families: Families) -> Iterator[tuple[str, float]]:
        """Quantity and predicted over measured."""
        one = self.one
        engine = engine_of(one.row, families)
        plan = plan_of(one.row, one.model, engine, one.workload)
        pricer = ServingPricer(one.model, one.cluster, plan, engine, self.layout)
        self.layout = pricer.layout
        found = pricer.predict(one.workload)
        if not found.fits:
            return
        predicted = (found.tpot_s, found.ttft_s, found.output_tokens_per_s)
        measured = (one.tpot_s, one.ttft_s, one.tokens_per_s)
        for name, value, truth in zip(QUANTITIES, predicted, measured, strict=True):
            if truth:
                yield name, value / truth


def cases(path: Path) -> list[Case]:
    """Every row that can be compared."""
    kept = []
    for row in read_table(path, REQUIRED, MEASURED):
        try:
            kept.append(Case(served(row)))
        except Skip:
            continue
    return kept


def loss(found: Sequence[Case], families: Families) -> float:
    """Median and mean of the errors of each quantity and source, weighted by their roots."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for case in found:
        for name, ratio in case.errors(families):
            size = min(abs(math.log(max(ratio, 1e-3))), WORST)
            groups[name, case.one.row.source].append(size)
    parts = [(quantile(g, 0.5) + 0.3 * sum(g) / len(g), len(g) ** 0.5) for g in groups.values()]
    weight = sum(w for _, w in parts)
    return sum(part * w for part, w in parts) / weight if weight else 0.0


def tune(found: Sequence[Case], sweeps: int) -> dict[str, Engine]:
    """The numbers of every family, searched one by one over its own rows."""
    families = {name: replace(one, **NUMBERS) for name, one in FAMILIES.items()}
    for step in STEPS[:sweeps]:
        for name in families:
            own = [case for case in found if case.family == name]
            for number in NUMBERS if own else ():
                _improve(families, name, number, step, own)
    return families


def _improve(
    families: dict[str, Engine], name: str, number: str, step: float, own: Sequence[Case]
) -> None:
    """Moves one number up or down if that helps."""
    kept, best = families[name], loss(own, families)
    for factor in (step, 1.0 / step):
        value = min(getattr(kept, number) * factor, MOST.get(number, math.inf))
        families[name] = replace(kept, **{number: value})
        if loss(own, families) < best:
            return
    families[name] = kept


def table(found: Sequence[Case], families: Families) -> dict[str, Any]:
    """Errors by quantity, over all rows and by source."""
    ratios: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in QUANTITIES}
    for case in found:
        for name, ratio in case.errors(families):
            ratios[name][case.one.row.source].append(ratio - 1.0)
    return {
        name: {
            **errors([value for values in by_source.values() for value in values]),
            "by_source": {source: errors(values) for source, values in by_source.items()},
        }
        for name, by_source in ratios.items()
    }


def show(title: str, found: Mapping[str, Any]) -> None:
    """One table."""
    print(f"\n{title}")
    for name, figures in found.items():
        _line(name, figures)
        for source, own in figures["by_source"].items():
            _line(f"  {source}", own)


def _line(name: str, figures: Mapping[str, Any]) -> None:
    parts = [figures[f"{key}_abs_rel_error"] for key in ("median", "mean", "p90")]
    if figures["n"]:
        line = "  ".join(f"{100 * part:6.1f}" for part in (*parts, figures["bias"]))
        print(f"  {name:24s} {figures['n']:5d}  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--sweeps", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = cases(options.table)
    document: dict[str, Any] = {}
    for half in (0, 1):
        scored = [case for case in found if case.half == half]
        other = [case for case in found if case.half != half]
        families = tune(other, options.sweeps) if options.sweeps else dict(FAMILIES)
        title = f"half {half}" + (", tuned on the other" if options.sweeps else "")
        document[title] = table(scored, families)
        if not options.json:
            show(title, document[title])
    if options.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
