"""A plan as a TOML file: written by the search or by hand, read back equal.

Uniform plans have the short form (`tp = 2`, `layers = [8, 8]`); plans whose stages have degrees
or devices of their own have one `[[stages]]` table a stage. Reading is strict: an unknown key is
an error that names the nearest known one, and an unknown version is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.fields import (
    DEGREES,
    DTYPES,
    PRECISION,
    SETTINGS,
    Field,
    unknown_key,
    value_problem,
)
from triptych.plan.plan import VERSION, Plan, Precision, Stage, even_split
from triptych.plan.short import parse_plan, precision

STAGE = {
    "start": Field(int),
    "stop": Field(int, minimum=1),
    **dict.fromkeys(("data", "tensor", "context", "expert"), Field(int, minimum=1)),
}
TOP = ("version", "layers", *DEGREES, *SETTINGS, "precision", "layouts", "stages")


def load_plan(text: str, model: Model, cluster: Cluster | None = None) -> Plan:
    """The plan behind a `--plan` argument: a TOML file, or the short form. Raises PlanError."""
    return read_plan(Path(text)) if is_plan_file(text) else parse_plan(text, model, cluster)


def is_plan_file(text: str) -> bool:
    """True if a `--plan` argument names a file, not the plan itself."""
    return text.endswith(".toml") or Path(text).is_file()


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises PlanError with everything that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(
            Problem(f"cannot read the plan '{path}': {reason}", works="a file of `triptych plan`")
        ) from error
    return plan_from_toml(text, where=str(path))


def plan_from_toml(text: str, where: str = "the plan") -> Plan:
    """The plan in a TOML text. Raises PlanError with everything that cannot be read."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(Problem(f"{where} is not TOML: {error}")) from error
    problems = list(_table_problems(table, where))
    if problems:
        raise PlanError(problems)
    settings = {key: table[key] for key in SETTINGS if key in table}
    settings["layouts"] = dict(table.get("layouts", {}))
    settings["precision"] = _precision(table.get("precision", "fp32"))
    if "stages" in table:
        return Plan(stages=tuple(map(_stage, table["stages"])), **settings)
    counts = _layer_counts(table)
    degrees = {axis: table[axis] for axis in DEGREES if axis in table} | {
        "pp": len(counts) // table.get("chunks", 1)
    }
    return Plan.uniform(sum(counts), layers=counts, **degrees, **settings)


def _layer_counts(table: Mapping[str, Any]) -> tuple[int, ...]:
    layers = table["layers"]
    if isinstance(layers, int):
        return even_split(layers, table.get("pp", 1) * table.get("chunks", 1))
    return tuple(layers)


def _precision(value: str | Mapping[str, str]) -> Precision:
    return precision(value) if isinstance(value, str) else Precision(**value)


def _stage(table: Mapping[str, Any]) -> Stage:
    return Stage(**{**table, "devices": tuple(table.get("devices", ()))})


# --- what can be wrong -------------------------------------------------------------------------


def _table_problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    if table.get("version") != VERSION:
        yield Problem(
            f"version = {table.get('version', 'missing')} in {where}",
            "the version of a plan file is known",
            f"version = {VERSION}",
        )
        return  # the other keys may mean something else
    for key in table:
        if key not in TOP:
            yield unknown_key(key, TOP, where)
    yield from _value_problems(table, {**DEGREES, **SETTINGS})
    yield from _precision_problems(table, where)
    yield from _layouts_problems(table)
    if "stages" in table:
        yield from _stages_problems(table, where)
    else:
        yield from _layers_problems(table, where)


def _value_problems(table: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[Problem]:
    for key, field in fields.items():
        problem = value_problem(key, table[key], field) if key in table else None
        if problem:
            yield problem


def _precision_problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    value = table.get("precision", {})
    if isinstance(value, dict):
        for key in value:
            if key not in PRECISION:
                yield unknown_key(key, PRECISION, f"[precision] of {where}")
        yield from _value_problems(value, PRECISION)
        return
    problem = value_problem("precision", value, Field(str, values=DTYPES))
    if problem:
        yield problem


def _layouts_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    layouts = table.get("layouts", {})
    if not isinstance(layouts, dict) or not all(isinstance(v, str) for v in layouts.values()):
        yield Problem(
            f"layouts = {layouts!r}", "layouts is a table of texts, one a tensor", "[layouts]"
        )


def _layers_problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    layers, pp, chunks = table.get("layers"), table.get("pp"), table.get("chunks", 1)
    counts = [layers] if isinstance(layers, int) else layers
    count = Field(int, minimum=1)
    if not isinstance(counts, list) or not counts or not all(map(count.accepts, counts)):
        yield Problem(
            f"layers = {layers if 'layers' in table else 'missing'} in {where}",
            "layers is the number of layers of the model, or a list with one count a stage",
            "layers = 32 or layers = [8, 8, 8, 8]",
        )
    elif isinstance(layers, list) and type(chunks) is int:
        stages = len(layers)
        if chunks < 1 or stages % chunks or (type(pp) is int and pp * chunks != stages):
            yield Problem(
                f"layers = {layers} with pp = {pp} and chunks = {chunks} in {where}",
                "layers has one count for each of the pp x chunks stages",
                f"pp = {stages // max(1, chunks)}" if stages % max(1, chunks) == 0 else "",
            )


def _stages_problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for key in ("layers", *DEGREES):
        if key in table:
            yield Problem(
                f"both [[stages]] and {key} in {where}",
                "a plan has one [[stages]] table a stage, or `layers` and degrees for all",
                f"without {key}",
            )
    stages = table["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(s, dict) for s in stages):
        yield Problem(f"stages = {stages!r} in {where}", "stages are [[stages]] tables")
        return
    for index, stage in enumerate(stages):
        yield from _stage_problems(stage, f"[[stages]] number {index} of {where}")


def _stage_problems(stage: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for key in stage:
        if key not in STAGE and key != "devices":
            yield unknown_key(key, [*STAGE, "devices"], where)
    for key in ("start", "stop"):
        if key not in stage:
            yield Problem(f"{key} is missing in {where}", "a stage has a first and a last layer")
    yield from _value_problems(stage, STAGE)
    devices = stage.get("devices", [])
    if not isinstance(devices, list) or not all(type(d) is int and d >= 0 for d in devices):
        yield Problem(f"devices = {devices!r} in {where}", "devices are ranks", "devices = [0, 1]")


# --- writing -----------------------------------------------------------------------------------


def plan_toml(plan: Plan) -> str:
    """The text of a plan file, every default written out; `plan_from_toml` reads it back equal."""
    lines = [f"version = {plan.version}", ""]
    if _is_short(plan):
        counts = [stage.num_layers for stage in plan.stages]
        lines.append(f"layers = {counts}  # one count a stage, in model order")
        lines += [f"{axis} = {getattr(plan, axis)}" for axis in DEGREES]
    lines += [f"{key} = {_text(getattr(plan, key))}" for key in SETTINGS]
    lines += ["", "[precision]"]
    lines += [f"{key} = {_text(getattr(plan.precision, key))}" for key in PRECISION]
    if plan.layouts:
        lines += ["", "[layouts]"]
        lines += [f"{_text(name)} = {_text(value)}" for name, value in plan.layouts.items()]
    if not _is_short(plan):
        for stage in plan.stages:
            lines += ["", "[[stages]]", *(f"{key} = {getattr(stage, key)}" for key in STAGE)]
            lines += [f"devices = {list(stage.devices)}"] if stage.devices else []
    return "\n".join(lines) + "\n"


def _is_short(plan: Plan) -> bool:
    """True if counts and one set of degrees say everything that the stages say."""
    edges = [0, *(stage.stop for stage in plan.stages)]
    follows = all(s.start == edge for s, edge in zip(plan.stages, edges, strict=False))
    return plan.is_uniform and follows and len(plan.stages) % plan.chunks == 0


def _text(value: object) -> str:
    """A bool, a number or a text as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
