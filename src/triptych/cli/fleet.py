"""What the verbs about fleets share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.fleet.judge import Verdict
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Placement
from triptych.units import GIB

FleetArgument = Annotated[
    Path, typer.Argument(metavar="FLEET", help="A fleet file in TOML.", show_default=False)
]


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
