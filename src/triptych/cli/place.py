"""`triptych place`: several models on groups of devices, chosen by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer
from triptych.cli.fleet import (
    FleetArgument,
    ReportOption,
    groups_of,
    simulated,
    timeline,
)
from triptych.cli.llm_fleet import place_llms
from triptych.cli.options import JsonOption
from triptych.errors import InputError, Problem
from triptych.fleet.advice import LOOSER, advise
from triptych.fleet.baselines import replaced, replication, round_robin
from triptych.fleet.curves import over_devices, over_load
from triptych.fleet.file import FleetFile, read_fleet, with_groups
from triptych.fleet.find import Effort, find
from triptych.fleet.judge import Judge
from triptych.fleet.llm_file import is_of_llms
from triptych.fleet.placement import Placement
from triptych.report.fleet import placement_text
from triptych.report.fleet_page import write_fleet
from triptych.simulate.trace import Trace

PLANNING_SEEDS = 3
WINDOW_S = 60.0


def command(
    file: FleetArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the fleet with its groups.")
    ] = None,
    trials: Annotated[
        int, typer.Option(min=0, metavar="N", help="Small changes tried on each finalist.")
    ] = 400,
    beam: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Try every replica, keep the N best; 0: greedy."),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the small changes.")] = 0,
    advice: Annotated[
        bool, typer.Option(help="Say what a device more or a looser objective would buy.")
    ] = True,
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Choose groups, shapes and replicas so that most requests meet their objectives.

    Planned on requests of other seeds than those that the figures are of; a trace is planned on
    its first half and judged on its second.
    """
    if is_of_llms(file):
        answer, written = place_llms(file, out, report)
        if out is not None and written is not None:
            _write(out, written)
        return answer
    given = read_fleet(file)
    planned_on, judged = _requests(given)
    effort = Effort(trials=trials, beam=beam, seed=seed)
    found = find(given.fleet, planned_on, effort)
    document = _document(given, found.placement, planned_on, judged)
    if advice:
        advised = advise(given.fleet, found.placement, judged, planned_on, effort)
        document["advice"] = {
            "with_one_more_device": advised.with_one_more_device,
            "with_looser_objectives": advised.with_looser_objectives,
            "looser": LOOSER,
            "limits": {name: limit.value for name, limit in advised.limits.items()},
        }
    text = placement_text(document)
    if report is not None:
        picture = _picture(given, found.placement, planned_on, judged)
        page = {"title": file.name, "attainment_of_all": picture["attainment"]}
        write_fleet(picture | document | page, report)
        text += f"\n\nwrote {report}"
    if out is not None:
        _write(out, with_groups(file, found.placement.named(given.fleet)))
        text += f"\n\nnext: triptych simulate {out}"
    return Answer(text=text, document=document)


def _requests(given: FleetFile) -> tuple[list[Trace], Trace]:
    """Requests to plan on, and others to judge by."""
    judged = given.draw()
    if given.requests.trace is not None:
        half = float(judged.arrival_s[-1]) / 2
        return [judged.only(judged.arrival_s < half)], judged.only(judged.arrival_s >= half)
    sources = [given.requests]
    for _ in range(PLANNING_SEEDS):
        sources.append(sources[-1].another_seed())
    return [given.draw(source) for source in sources[1:]], judged


def _document(
    given: FleetFile, placement: Placement, planned_on: list[Trace], judged: Trace
) -> dict[str, Any]:
    fleet = given.fleet
    judge = Judge(fleet, [judged])
    verdict = judge.of(placement)
    attainment = {
        "this placement": verdict.attainment,
        "replication": judge.of(replication(fleet, planned_on)).attainment,
        f"replication, anew every {WINDOW_S:g} s": replaced(fleet, judged, WINDOW_S).attainment,
    }
    attainment |= {
        f"round robin over {shape}": judge.of(round_robin(fleet, shape)).attainment
        for shape in fleet.shapes
        if shape.devices > 1
    }
    return {
        "devices": fleet.num_devices,
        "groups": groups_of(fleet, placement, verdict),
        "attainment": attainment,
    }


def _picture(
    given: FleetFile, placement: Placement, planned_on: list[Trace], judged: Trace
) -> dict[str, Any]:
    """What the page shows beside the answer: models, groups over time, other loads."""
    fleet = given.fleet
    placements = {"this placement": placement, "replication": replication(fleet, planned_on)}
    curves = over_load(given, judged, placements)
    curves["devices"] = over_devices(fleet, planned_on, judged)
    whole = simulated(fleet, placement, judged)
    return whole | timeline(fleet, placement, judged) | {"curves": curves}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(Problem(f"cannot write {path}: {error}")) from error
