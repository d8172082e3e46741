"""Serving runs: each row priced with its plan and engine, and the figures of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.cost.serving.predict import ServingPrediction, predict_serving
from triptych.cost.uncertainty import serving_bar
from triptych.validate.figures import over_sources
from triptych.validate.report import Report
from triptych.validate.served import Served, served
from triptych.validate.table import Row, Skip, read_table

REQUIRED = ("id", "engine", "model_name", "gpu", "n_gpus", "tp", "input_len", "output_len")
MEASURED = (
    "ttft_ms",
    "tpot_ms",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "requests_per_s",
)
QUANTITIES = ("tpot", "ttft", "throughput")


class Pair(NamedTuple):
    """A quantity of a row, predicted and measured."""

    id: str
    source: str
    quantity: str
    predicted: float
    measured: float
    has_experts: bool = False

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1.0


def validate_serving(path: Path) -> Report:
    """Predicted beside measured for a table of serving runs (DESIGN section 8).

    Raises InputError if the file is not such a table.
    """
    rows = read_table(path, REQUIRED, MEASURED)
    pairs: list[Pair] = []
    listed: list[dict[str, Any]] = []
    skipped = Counter[str]()
    for row in rows:
        try:
            case = served(row)
            found = pairs_of(case)
        except Skip as reason:
            skipped[str(reason)] += 1
            listed.append({"id": row.id, "skipped": str(reason)})
            continue
        pairs += found
        listed.append(_line(row, case, found))
    return Report(document(pairs, len(rows), skipped), listed)


def document(pairs: Sequence[Pair], rows: int, skipped: Counter[str]) -> dict[str, Any]:
    """The JSON document of `triptych validate --task serve`."""
    return {
        "task": "serve",
        "rows": rows,
        "used": len({pair.id for pair in pairs}),
        "skipped": dict(skipped.most_common()),
        **_quantities([pair for pair in pairs if not pair.has_experts]),
        "experts": _quantities([pair for pair in pairs if pair.has_experts]),
    }


def _quantities(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {name: _quantity([p for p in pairs if p.quantity == name]) for name in QUANTITIES}


def _quantity(pairs: Sequence[Pair]) -> dict[str, Any]:
    by_source: dict[str, list[float]] = {}
    for pair in pairs:
        by_source.setdefault(pair.source, []).append(pair.error)
    return {**over_sources(by_source), "coverage_80": _coverage(pairs)}


def _coverage(pairs: Sequence[Pair]) -> float | None:
    """The share of measured values inside the 80 % bars."""
    bars = [serving_bar(pair.quantity, pair.predicted) for pair in pairs]
    inside = [low <= p.measured <= high for p, (low, high) in zip(pairs, bars, strict=True)]
    return sum(inside) / len(inside) if inside else None


def pairs_of(case: Served) -> list[Pair]:
    """What a case predicts beside what was measured. Raises Skip if it is said not to fit."""
    prediction = predict_serving(case.model, case.cluster, case.workload, case.plan, case.engine)
    if not prediction.fits:
        raise Skip("predicted not to fit")
    both = (
        ("tpot", prediction.tpot_s, case.tpot_s),
        ("ttft", prediction.ttft_s, case.ttft_s),
        ("throughput", _tokens_per_s(prediction), case.tokens_per_s),
    )
    return [
        Pair(case.row.id, case.row.source, name, predicted, measured, bool(case.model.experts))
        for name, predicted, measured in both
        if measured
    ]


def _tokens_per_s(prediction: ServingPrediction) -> float:
    return prediction.output_tokens_per_s


def _line(row: Row, case: Served, pairs: Sequence[Pair]) -> dict[str, Any]:
    line: dict[str, Any] = {"id": row.id, "plan": case.plan.short(), "engine": case.engine.name}
    for name in QUANTITIES:
        pair = next((one for one in pairs if one.quantity == name), None)
        line |= {
            f"predicted_{name}": pair and pair.predicted,
            f"measured_{name}": pair and pair.measured,
            f"{name}_error": pair and pair.error,
        }
    return line
