"""What the verbs about fleets share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from triptych.fleet.judge import Judge, Verdict, busy_shares
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Placement
from triptych.simulate.metrics import share
from triptych.simulate.single_shot import simulate
from triptych.simulate.trace import Trace
from triptych.units import GIB

FleetArgument = Annotated[
    Path, typer.Argument(metavar="FLEET", help="A fleet file in TOML.", show_default=False)
]
ReportOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page: groups over time, models, other loads."),
]
NUM_BINS = 240


def simulated(fleet: Fleet, placement: Placement, trace: Trace) -> dict[str, Any]:
    """What becomes of requests under a placement: all together, by group and by model."""
    verdict = Judge(fleet, [trace]).of(placement)
    lines = placement.lines(fleet)
    outcome = simulate(trace.arrival_s, trace.model, lines, trace.slo_s, fleet.overhead_s)
    latency_s = outcome.finish_s - trace.arrival_s
    whole = share(int(verdict.served.sum()), len(trace))
    return {
        "requests": len(trace),
        "attainment": whole.value,
        "attainment_low": whole.low,
        "attainment_high": whole.high,
        "groups": groups_of(fleet, placement, verdict),
        "models": {
            model.name: {
                "requests": int(verdict.asked[index]),
                "attainment": float(verdict.served[index] / max(1, verdict.asked[index])),
                **_percentiles(latency_s[(trace.model == index) & (outcome.group >= 0)]),
            }
            for index, model in enumerate(fleet.models)
        },
    }


def timeline(fleet: Fleet, placement: Placement, trace: Trace) -> dict[str, Any]:
    """Busy shares of the groups in equal stretches of time, and the time of all of them."""
    edges_s, shares = busy_shares(fleet, placement, trace, NUM_BINS)
    return {"duration_s": float(edges_s[-1]), "busy": shares.round(4).tolist()}


def _percentiles(latency_s: NDArray[np.float64]) -> dict[str, float | None]:
    """Of what was served; None where nothing was."""
    return {
        f"latency_p{q}_s": float(np.percentile(latency_s, q)) if len(latency_s) else None
        for q in (50, 99)
    }


def groups_of(fleet: Fleet, placement: Placement, verdict: Verdict) -> list[dict[str, Any]]:
    """The groups of a placement and how busy each is."""
    return [
        {
            "shape": str(group.shape),
            "devices": group.shape.devices,
            "models": [fleet.models[m].name for m in sorted(group.models)],
            "weights_gib": group.bytes_in(fleet) / GIB,
            "utilisation": float(busy),
        }
        for group, busy in zip(placement.groups, verdict.utilisation, strict=True)
    ]
