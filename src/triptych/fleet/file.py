"""Fleet files: models, devices, requests and the placement, as TOML.

    [devices]
    count = 8
    memory_gib = 13.0                     # for weights, on each
    overhead_s = 0.011                    # of a request outside the devices, default 0

    [[models]]
    name = "bert"
    copies = 32                           # bert-0 to bert-31; default 1: just "bert"
    weights_gib = 2.6                     # split evenly over the devices of a group
    slo_s = 0.495                         # from arrival to answer
    stage_s = { 1x1 = [0.099], 2x1 = [0.051, 0.052] }   # by PIPELINExTENSOR

    [requests]                            # or: trace = "requests.csv" (model,arrival_s,slo_s)
    rate_per_s = 64.0
    cv = 4.0                              # burstiness; 1 (default) is Poisson
    duration_s = 200.0
    share_exponent = 0.5                  # the i-th model gets i^-exponent; default 0: all alike
    seed = 0                              # default 0

    [[groups]]                            # written by `triptych place`
    shape = "4x1"
    models = ["bert-0", "bert-7"]

Reading is strict: every unknown key, missing key and wrong value is reported at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomlkit
from numpy.typing import NDArray

from triptych.cluster.table import Table
from triptych.errors import InputError, Problem, nearest
from triptych.fleet.models import Fleet, Profile, Served, Shape, evenly, read_shape
from triptych.fleet.placement import Group, Placement
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
from triptych.simulate.trace import Trace, fixed_lengths, make, read_trace
from triptych.units import GIB

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How requests arrive: drawn from Gamma processes, or read from a trace."""

    windows: tuple[Window, ...] = ()
    share_exponent: float = 0.0
    seed: int = 0
    trace: Path | None = None

    def another_seed(self) -> Requests:
        """The same process drawn anew, to plan on what is not judged."""
        return replace(self, seed=self.seed + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """All that a fleet file says; `placement` is None before `triptych place`."""

    fleet: Fleet
    slo_s: tuple[float, ...]  # of each model
    requests: Requests
    placement: Placement | None = None

    def draw(self, requests: Requests | None = None) -> Trace:
        """The requests, with the objectives of their models where the trace has none."""
        source = requests or self.requests
        names = tuple(model.name for model in self.fleet.models)
        slo_s = np.array(self.slo_s)
        if source.trace is not None:
            return renumbered(read_trace(source.trace), names, slo_s, source.trace)
        rng = np.random.default_rng(source.seed)
        shares = power_law_shares(len(names), source.share_exponent)
        arrival_s, model = draw_models(source.windows, shares, rng)
        trace = make(arrival_s, fixed_lengths(1, 1), rng, model, names)
        return replace(trace, slo_s=slo_s[model])


def read_fleet(path: Path) -> FleetFile:
    """The fleet of a file.

    Raises:
        InputError: with every fault of the file.

    """
    table = open_table(path)
    fleet, slo_s = _fleet(table)
    requests = read_requests(table, path.parent)
    placement = _placement(table, fleet) if table.peek("groups") is not None else None
    table.check_unknown()
    if table.problems:
        raise InputError(table.problems)
    if placement is not None:
        placement.check(fleet)
    return FleetFile(fleet=fleet, slo_s=slo_s, requests=requests, placement=placement)


def open_table(path: Path) -> Table:
    """What a fleet file says, unread. Raises InputError if it is no TOML."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        works = "an existing file with [devices], [[models]] and [requests], as in docs/fleet.md"
        what = f"cannot read the fleet file {path}: {error}"
        raise InputError(Problem(what, "a fleet file is TOML", works)) from error
    return Table(values, str(path))


def with_groups(path: Path, written: Iterable[tuple[Shape, Sequence[str]]]) -> str:
    """The text of a fleet file with its groups exchanged: shapes, and models by name."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    document.pop("groups", None)
    groups = tomlkit.aot()
    for shape, models in written:
        group = tomlkit.table()
        group["shape"] = str(shape)
        group["models"] = list(models)
        groups.append(group)
    document["groups"] = groups
    return tomlkit.dumps(document)


def _fleet(table: Table) -> tuple[Fleet, tuple[float, ...]]:
    devices = table.table("devices")
    models: list[Served] = []
    slo_s: list[float] = []
    for each in table.tables("models"):
        name, copies = each.string("name"), each.integer("copies", 1)
        profiles = _profiles(each, each.number("weights_gib") * GIB)
        names = [name] if copies == 1 else [f"{name}-{i}" for i in range(copies)]
        models += [Served(each_name, profiles) for each_name in names]
        slo_s += [each.number("slo_s")] * copies
        each.check_unknown()
    fleet = Fleet(
        tuple(models),
        devices.integer("count"),
        devices.number("memory_gib") * GIB,
        devices.number("overhead_s", 0.0),
    )
    devices.check_unknown()
    twice = {model.name for model in models if [m.name for m in models].count(model.name) > 1}
    for name in sorted(twice):
        table.problems.append(Problem(f"two models {name!r} in {table.where}", "names differ"))
    return fleet, tuple(slo_s)


def _profiles(table: Table, weight_bytes: float) -> dict[Shape, Profile]:
    found: dict[Shape, Profile] = {}
    for text, seconds in table.table("stage_s").values.items():
        try:
            shape = read_shape(text)
        except InputError as error:
            table.problems += error.problems
            continue
        if not _are_seconds(seconds) or len(seconds) != shape.pipeline:
            table.wrong(f"stage_s.{text}", seconds, f"{shape.pipeline} positive numbers")
            continue
        found[shape] = evenly(seconds, weight_bytes, shape)
    return found


def _are_seconds(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, int | float) and v > 0 for v in value)


def read_requests(table: Table, folder: Path) -> Requests:
    """How requests arrive, as [requests] says; faults are noted in the table."""
    own = table.table("requests")
    if own.peek("trace") is not None:
        found = Requests(trace=folder / own.string("trace"))
    else:
        window = Window(own.number("duration_s"), own.number("rate_per_s"), own.number("cv", 1.0))
        exponent = own.number("share_exponent") if own.peek("share_exponent") else 0.0
        seed = own.integer("seed") if own.peek("seed") else 0
        found = Requests(windows=(window,), share_exponent=exponent, seed=seed)
    own.check_unknown(("share_exponent", "seed", "prompt_tokens", "output_tokens"))
    return found


def _placement(table: Table, fleet: Fleet) -> Placement:
    numbers = {model.name: index for index, model in enumerate(fleet.models)}
    groups = []
    for own in table.tables("groups"):
        shape = shape_of(own)
        names = own.strings("models")
        check_names(own, names, sorted(numbers))
        groups.append(Group(shape, frozenset(numbers[n] for n in names if n in numbers)))
        own.check_unknown()
    return Placement(tuple(groups))


def shape_of(table: Table, default: str | None = None) -> Shape:
    """The shape of a group; a fault is noted in the table."""
    try:
        return read_shape(table.string("shape", default))
    except InputError as error:
        table.problems += error.problems
        return Shape(1)


def check_names(table: Table, names: Sequence[str], known: Sequence[str]) -> None:
    """Notes every model that does not exist, with the nearest that do."""
    for name in names:
        if name not in known:
            close = nearest(name, known) or known[:5]
            what = f"unknown model {name!r} in {table.where}"
            table.problems.append(Problem(what, "a name of [[models]]", ", ".join(close)))


def renumbered(trace: Trace, names: tuple[str, ...], slo_s: Floats, path: Path) -> Trace:
    """A trace with the models of the fleet, by name. Raises InputError for others."""
    unknown = sorted(set(trace.models) - set(names))
    if unknown:
        what = f"{path}: requests for {', '.join(unknown[:5])}"
        works = ", ".join(names[:5])
        raise InputError(Problem(what, "a trace asks for models of the fleet", works))
    numbers = np.array([names.index(name) for name in trace.models])
    model = numbers[trace.model]
    objectives = np.where(np.isfinite(trace.slo_s), trace.slo_s, slo_s[model])
    return replace(trace, model=model, models=names, slo_s=objectives)
