"""The plan in one line: `tp=8,pp=12,dp=1,zero=1,microbatch=1,recompute=full`.

A degree may be given for each pipeline rank: `tp=2+1,dp=1+2` is tensor parallelism over 2 ranks,
then data parallelism over 2. Devices of their own are for the TOML form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.fields import (
    DEGREES,
    DTYPES,
    SETTINGS,
    Field,
    unknown_key,
    value_problem,
)
from triptych.plan.plan import Plan, Precision
from triptych.plan.ranks import placement
from triptych.schedule.traits import TRAITS

STAGE_NAMES = {"tp": "tensor", "dp": "data", "cp": "context", "ep": "expert"}
"""Degrees that a stage has, by their short names."""

ALIASES = {"sp": "sequence_parallel", "mbs": "microbatch"}

FIELDS: dict[str, Field] = {**DEGREES, **SETTINGS, "precision": Field(str, values=DTYPES)}
KEYS = ("tp", "pp", "dp", "cp", "ep", "layers", "sp", "precision", *SETTINGS)

_TRUTH = {"1": True, "true": True, "0": False, "false": False}

Value = int | bool | str | tuple[int, ...]


def parse_plan(text: str, model: Model, cluster: Cluster | None = None) -> Plan:
    """The plan that a short form describes, all else at its default.

    A missing `dp` is what the cluster leaves (1 without a cluster, and with degrees for each
    pipeline rank), a missing `pp` is the number of `layers` or of such degrees, a missing
    `precision` is fp32 on CPUs and bf16 elsewhere. Legality for the model is for `rules.verify` to
    say. Raises PlanError with every word that cannot be read.
    """
    values = read_words(text)
    layers = values.pop("layers", None)
    own = _own_degrees(values)
    if isinstance(layers, tuple):
        _fit_layers(layers, values, _count(values, "chunks"))
    if "dp" not in values and cluster is not None and not own:
        values["dp"] = _derived_dp(values, cluster)
    word = str(values.pop("precision", default_precision(cluster)))
    counts = layers if isinstance(layers, tuple) else None
    settings: dict[str, Any] = {key: value for key, value in values.items() if key not in own}
    plan = Plan.uniform(model.num_layers, layers=counts, precision=precision(word), **settings)
    return _with_degrees(plan, own) if own else plan


def _own_degrees(values: dict[str, Value]) -> dict[str, tuple[int, ...]]:
    """The degrees that are given for each pipeline rank, whose number is then `pp`.

    Raises PlanError if they disagree about it.
    """
    own = {key: value for key, value in values.items() if isinstance(value, tuple)}
    counts = {len(value) for value in own.values()}
    if own and counts != {values.setdefault("pp", max(counts))}:
        given = ",".join(f"{key}={'+'.join(map(str, value))}" for key, value in own.items())
        raise PlanError(
            Problem(
                f"{given} with pp={values['pp']}",
                "a degree is one number, or one for each of the pp pipeline ranks",
                f"pp={max(counts)}" if len(counts) == 1 else "",
            )
        )
    return own


def _with_degrees(plan: Plan, own: Mapping[str, tuple[int, ...]]) -> Plan:
    """The plan with degrees by pipeline rank."""
    if plan.schedule not in TRAITS or len(plan.stages) % plan.chunks:
        return plan  # the rules say what is wrong with it

    def degrees(owner: int) -> dict[str, Any]:
        return {STAGE_NAMES[key]: value[owner] for key, value in own.items()}

    owners = zip(plan.stages, placement(plan), strict=True)
    return plan.with_(stages=tuple(replace(stage, **degrees(owner)) for stage, owner in owners))


def default_precision(cluster: Cluster | None) -> str:
    """fp32 on CPUs, bf16 elsewhere and where the device is not known."""
    return "fp32" if cluster is not None and cluster.device.kind == "cpu" else "bf16"


def precision(word: str) -> Precision:
    """The dtypes behind one word: fp64 is fp64 throughout, all others keep fp32 masters."""
    if word == "fp64":
        return Precision(parameter=word, gradient=word, reduction=word, master=word, moments=word)
    return Precision(parameter=word)


def read_words(text: str) -> dict[str, Value]:
    """The settings of a short form by their full names. Raises PlanError with every bad word."""
    problems: list[Problem] = []
    values: dict[str, Value] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in word.partition("="))
        name = ALIASES.get(key, key)
        if not equals or not value:
            problems.append(
                Problem(f"'{word}' in the plan", "a plan is key=value,...", "tp=2,pp=2")
            )
        elif name in values:
            problems.append(Problem(f"'{word}' in the plan", f"{name} is given once"))
        elif name != "layers" and name not in FIELDS:
            problems.append(unknown_key(key, KEYS, "the plan"))
        else:
            values[name] = _read_value(name, value)
            problems += _value_problems(name, values[name], value)
    if problems:
        raise PlanError(problems)
    return values


def _read_value(name: str, text: str) -> Value:
    """The value as its field wants it, or the text itself if it does not read as such."""
    if name == "layers":
        return _read_counts(text)
    kind = FIELDS[name].kind
    if name in STAGE_NAMES and re.fullmatch(r"\d+(\+\d+)+", text):
        return tuple(map(int, text.split("+")))
    if kind is bool:
        return _TRUTH.get(text.lower(), text)
    if kind is int and re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


def _read_counts(text: str) -> Value:
    """`8+8` as (8, 8) and `1+2x3` as (1, 2, 2, 2); the text itself if it is neither."""
    counts: list[int] = []
    for word in text.split("+"):
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", word)
        if not found:
            return text
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _value_problems(name: str, value: Value, text: str) -> Iterator[Problem]:
    if name == "layers":
        if not isinstance(value, tuple) or 0 in value:
            yield Problem(
                f"layers={text}",
                "layers are counts from 1 joined by '+', one a stage",
                "layers=8+8",
            )
        return
    if isinstance(value, tuple):
        problems = (value_problem(name, degree, FIELDS[name]) for degree in value)
        yield from (problem for problem in problems if problem)
        return
    shown = text if FIELDS[name].kind is not str and isinstance(value, str) else value
    problem = value_problem(name, shown, FIELDS[name])
    if problem:
        yield problem


def _fit_layers(layers: tuple[int, ...], values: dict[str, Value], chunks: int) -> None:
    """Takes a missing `pp` from `layers`. Raises PlanError if they disagree."""
    pp = values.setdefault("pp", max(1, len(layers) // chunks))
    if pp * chunks != len(layers):
        raise PlanError(
            Problem(
                f"layers={'+'.join(map(str, layers))} has {len(layers)} parts with pp={pp}"
                + (f" and chunks={chunks}" if chunks > 1 else ""),
                "layers has one part for each of the pp x chunks stages",
                f"pp={len(layers) // chunks}" if len(layers) % chunks == 0 else "",
            )
        )


def _derived_dp(values: Mapping[str, Value], cluster: Cluster) -> int:
    """The data degree that uses all devices, at least 1; the rules say if a remainder is left."""
    ranks = _count(values, "tp") * _count(values, "pp") * _count(values, "cp")
    return max(1, cluster.num_devices // ranks)


def _count(values: Mapping[str, Value], key: str) -> int:
    value = values.get(key, 1)
    return value if isinstance(value, int) else 1
