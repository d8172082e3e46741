"""`triptych place` and `simulate` of fleet files with LLMs, priced on the cluster they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.cli.answer import Answer
from triptych.cli.fleet import NUM_BINS
from triptych.cli.inputs import read_cluster_option
from triptych.errors import InputError, Problem
from triptych.fleet.curves import Curves
from triptych.fleet.file import with_groups
from triptych.fleet.llm import LlmFleet, LlmGroup
from triptych.fleet.llm_curves import busy_shares, over_devices, over_load
from triptych.fleet.llm_file import HostGroup, LlmFile, read_llm_fleet
from triptych.fleet.place_llm import planned
from triptych.fleet.room import read_config, room
from triptych.fleet.shared import SharedFleet
from triptych.report.fleet import placement_text, simulation_text
from triptych.report.fleet_page import write_fleet
from triptych.serve.core.request import State
from triptych.simulate.metrics import share
from triptych.simulate.replica import Record
from triptych.simulate.trace import Trace
from triptych.units import GIB

_PLANNED_ON = 1_000_003  # added to the seed of the requests that are judged


def place_llms(
    path: Path, out: Path | None, report: Path | None = None
) -> tuple[Answer, str | None]:
    """The best shape and models of groups, planned on other requests than those judged; and the
    text of the file with them, if it is wanted.
    """
    file = read_llm_fleet(path)
    fleet, judged = priced(file), file.draw()
    planned_on = judged
    if file.requests is not None and file.requests.trace is None:
        planned_on = file.draw(file.requests.seed + _PLANNED_ON)
    else:
        half_s = float(judged.arrival_s[-1]) / 2
        planned_on = judged.only(judged.arrival_s < half_s)
        judged = judged.only(judged.arrival_s >= half_s)
    kinds = planned(fleet, planned_on)
    if not kinds:
        what = f"no shape of groups on {file.num_devices} devices holds all models of {path}"
        raise InputError(Problem(what, works="more or larger devices"))
    best = max(kinds, key=lambda shape: kinds[shape][1])
    groups = [group for group in kinds[best][0] if group.models]
    seen = _simulated(file, fleet, groups, judged)
    attainment = {"this placement": seen["attainment"]}
    for shape, (others, _) in kinds.items():
        if shape != best:
            attainment[f"groups of {shape}"] = float(fleet.served(others, judged).mean())
    document = {"devices": file.num_devices, "groups": seen["groups"], "attainment": attainment}
    text, written = placement_text(document), None
    if report is not None:
        curves = over_load(file, fleet, judged, {"this placement": groups})
        curves["devices"] = over_devices(fleet, planned_on, judged)
        text += _page(path, seen, curves, report, attainment)
    if out is not None:
        names = [[file.names[model] for model in group.models] for group in groups]
        shapes = [group.shape for group in groups]
        written = with_groups(path, zip(shapes, names, strict=True))
        text += f"\n\nnext: triptych serve {out}"
    return Answer(text=text, document=document), written


def simulate_llms(path: Path, report: Path | None = None) -> Answer:
    """What each model's users would see under the groups of the file."""
    file = read_llm_fleet(path)
    if not file.groups:
        works = f"triptych place {path} --out placed.toml"
        raise InputError(Problem(f"{path} has no [[groups]]", "a fleet that is placed", works))
    fleet, trace = priced(file), file.draw()
    groups = [_numbered(file, group) for group in file.groups]
    seen = _simulated(file, fleet, groups, trace)
    document = {key: value for key, value in seen.items() if key not in _OF_PAGES}
    text = simulation_text(document)
    if report is not None:
        curves = over_load(file, fleet, trace, {"this placement": groups})
        text += _page(path, seen, curves, report)
    return Answer(text=text, document=document)


_OF_PAGES = ("duration_s", "busy")


def _page(
    path: Path,
    seen: dict[str, Any],
    curves: dict[str, Curves],
    report: Path,
    attainment: Mapping[str, float] | None = None,
) -> str:
    """Writes the page; what is said of it."""
    page = {"title": path.name, "attainment_of_all": seen["attainment"], "curves": curves}
    write_fleet(seen | page | {"attainment": attainment or {}}, report)
    return f"\n\nwrote {report}"


def _simulated(
    file: LlmFile, fleet: LlmFleet, groups: Sequence[LlmGroup], trace: Trace
) -> dict[str, Any]:
    """What becomes of requests under a placement: all together, by group, over time, by model."""
    simulated = fleet.simulated(groups)
    records = simulated.run(trace)
    met = np.array([simulated.met(record) for record in records], dtype=np.bool_)
    whole = share(int(met.sum()), len(trace))
    ends_s = [record.finish_s for record in records if record.state is State.FINISHED]
    duration_s = max(ends_s, default=float(trace.arrival_s[-1]))
    return {
        "duration_s": duration_s,
        "busy": busy_shares(simulated, len(groups), duration_s, NUM_BINS),
        "requests": len(trace),
        "attainment": whole.value,
        "attainment_low": whole.low,
        "attainment_high": whole.high,
        "groups": _groups(file, groups, simulated, trace),
        "models": {
            name: _seen([r for r, m in zip(records, trace.model, strict=True) if m == number],
                        met[trace.model == number])
            for number, name in enumerate(file.names)
        },
    }  # fmt: skip


def priced(file: LlmFile) -> LlmFleet:
    """The fleet of a file on its cluster. Raises InputError if it names none, or another size."""
    if file.cluster is None:
        raise InputError(
            Problem(
                f"[devices] of {file.path} has no cluster",
                "steps of LLMs are priced on a cluster that is known",
                'cluster = "1x8xH100-SXM", or a file that `triptych measure` wrote',
            )
        )
    cluster = read_cluster_option(file.cluster)
    if cluster.num_devices != file.num_devices:
        what = f"count = {file.num_devices} and cluster = {file.cluster!r} in {file.path}"
        works = f"count = {cluster.num_devices}"
        raise InputError(Problem(what, "as many devices as the cluster has", works))
    models = [read_config(model.folder)[0] for model in file.models]
    contexts = [
        min(model.context or shape.max_position, shape.max_position)
        for model, shape in zip(file.models, models, strict=True)
    ]
    terms = [model.terms for model in file.models]
    return LlmFleet(models, terms, cluster, contexts=contexts)


def _numbered(file: LlmFile, group: HostGroup) -> LlmGroup:
    return LlmGroup(group.shape, tuple(file.names.index(name) for name in group.models))


def _groups(
    file: LlmFile, groups: Sequence[LlmGroup], simulated: SharedFleet, trace: Trace
) -> list[dict[str, Any]]:
    replicas, found = iter(simulated.replicas), []
    duration_s = max(float(trace.arrival_s[-1]), 1e-9)
    for group in groups:
        busy_s = sum(next(replicas).busy_s for _ in group.models)
        names = [file.names[model] for model in group.models]
        sizes = [room(file.model(name).folder, group.shape, 1) for name in names]
        found.append(
            {
                "shape": str(group.shape),
                "devices": group.shape.devices,
                "models": names,
                "weights_gib": sum(size.weights_bytes for size in sizes) / GIB,
                "utilisation": min(1.0, busy_s / duration_s),
            }
        )
    return found


def _seen(records: Sequence[Record], met: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What the users of one model saw."""
    done = [record for record in records if record.state is State.FINISHED]
    found: dict[str, Any] = {
        "requests": len(records),
        "attainment": float(met.mean()) if len(met) else 1.0,
        "refused": sum(record.state is State.REFUSED for record in records),
    }
    values = {
        "latency": [record.finish_s - record.arrival_s for record in done],
        "ttft": [record.ttft_s for record in done],
        "tpot": [record.tpot_s for record in done],
    }
    for name, seconds in values.items():
        for q in (50, 99):
            found[f"{name}_p{q}_s"] = float(np.percentile(seconds, q)) if seconds else None
    return found
