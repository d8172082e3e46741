"""`triptych simulate`: the requests of a fleet file through its placement."""

from __future__ import annotations

from triptych.cli.answer import Answer
from triptych.cli.fleet import FleetArgument, ReportOption, simulated, timeline
from triptych.cli.llm_fleet import simulate_llms
from triptych.cli.options import JsonOption
from triptych.errors import InputError, Problem
from triptych.fleet.curves import over_load
from triptych.fleet.file import read_fleet
from triptych.fleet.llm_file import is_of_llms
from triptych.report.fleet import simulation_text
from triptych.report.fleet_page import write_fleet


def command(
    file: FleetArgument, report: ReportOption = None, as_json: JsonOption = False
) -> Answer:
    """What each model's users would see: share in time, latencies, and how busy the groups are."""
    if is_of_llms(file):
        return simulate_llms(file, report)
    given = read_fleet(file)
    placement = given.placement
    if placement is None:
        works = f"triptych place {file} --out placed.toml"
        raise InputError(Problem(f"{file} has no [[groups]]", "a fleet that is placed", works))
    trace = given.draw()
    document = simulated(given.fleet, placement, trace)
    text = simulation_text(document)
    if report is not None:
        document |= timeline(given.fleet, placement, trace)
        document["curves"] = over_load(given, trace, {"this placement": placement})
        page = {"title": file.name, "attainment_of_all": document["attainment"]}
        write_fleet(document | page | {"attainment": {}}, report)
        text += f"\n\nwrote {report}"
    return Answer(text=text, document=document)
