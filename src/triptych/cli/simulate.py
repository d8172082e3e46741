"""`triptych simulate`: the requests of a fleet file through its placement."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.cli.answer import Answer
from triptych.cli.fleet import FleetArgument, groups_of
from triptych.cli.options import JsonOption
from triptych.errors import InputError, Problem
from triptych.fleet.file import read_fleet
from triptych.fleet.judge import Judge
from triptych.report.fleet import simulation_text
from triptych.simulate.metrics import share
from triptych.simulate.single_shot import simulate


def command(file: FleetArgument, as_json: JsonOption = False) -> Answer:
    """What each model's users would see: share in time, latencies, and how busy the groups are."""
    given = read_fleet(file)
    if given.placement is None:
        works = f"triptych place {file} --out placed.toml"
        raise InputError(Problem(f"{file} has no [[groups]]", "a fleet that is placed", works))
    fleet, trace = given.fleet, given.draw()
    verdict = Judge(fleet, [trace]).of(given.placement)
    lines = given.placement.lines(fleet)
    outcome = simulate(trace.arrival_s, trace.model, lines, trace.slo_s, fleet.overhead_s)
    latency_s = outcome.finish_s - trace.arrival_s
    whole = share(int(verdict.served.sum()), len(trace))
    document: dict[str, Any] = {
        "requests": len(trace),
        "attainment": whole.value,
        "attainment_low": whole.low,
        "attainment_high": whole.high,
        "groups": groups_of(fleet, given.placement, verdict),
        "models": {
            model.name: {
                "requests": int(verdict.asked[index]),
                "attainment": float(verdict.served[index] / max(1, verdict.asked[index])),
                **_percentiles(latency_s[(trace.model == index) & (outcome.group >= 0)]),
            }
            for index, model in enumerate(fleet.models)
        },
    }
    return Answer(text=simulation_text(document), document=document)


def _percentiles(latency_s: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    """Of what was served; None where nothing was."""
    return {
        f"latency_p{q}_s": float(np.percentile(latency_s, q)) if len(latency_s) else None
        for q in (50, 99)
    }
