"""Job files read, checked and printed. Nothing here writes to disk or imports torch."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from triptych.errors import JobError, Problem, nearest
from triptych.train.job import Job
from triptych.train.job_data import Source
from triptych.train.section import Contradiction, Section

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}

# What other tools call our keys.
FOREIGN_NAMES = {
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "optimizer.min_learning_rate",
    "warmup": "optimizer.warmup_steps",
    "max_steps": "train.steps",
    "batch_size": "train.global_batch",
    "micro_batch_size": "train.microbatch",
    "gradient_accumulation_steps": "train.accumulation",
    "seq_len": "data.sequence_length",
    "max_grad_norm": "optimizer.clip_norm",
    "router_aux_loss_coef": "moe.aux_loss",
    "router_z_loss_coef": "moe.z_loss",
    "save_every": "checkpoint.every",
    "dtype": "parallel.precision",
    "tensor_parallel": "parallel.plan",
    "pipeline_parallel": "parallel.plan",
    "data_parallel": "parallel.plan",
}


def read_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a TOML file with `section.key=value` overrides, all defaults filled in.

    Paths are relative to the working directory and come out absolute. Raises JobError with every
    problem at once.
    """
    path = Path(path)
    values = _parse_file(path)
    for override in overrides:
        _apply(values, override)
    return resolved(validated(values, str(path)), path.stem)


def validated(values: Mapping[str, Any], source: str) -> Job:
    """The job of parsed values. Raises JobError with every unknown key and wrong value."""
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        problems = [_problem(details, values) for details in error.errors()]
    raise JobError([replace(problem, what=f"{source}: {problem.what}") for problem in problems])


def resolved(job: Job, name: str) -> Job:
    """The job with the folders of the run filled in and every path absolute."""
    run = _absolute(job.run.folder or f"runs/{name}")
    data = {
        "train": tuple(map(_absolute, job.data.train)),
        "mixture": tuple(
            each.model_copy(update={"train": tuple(map(_absolute, each.train))})
            for each in job.data.mixture
        ),
        "eval": tuple(map(_absolute, job.data.eval)),
        "cache": _absolute(job.data.cache or f"{run}/tokens"),
    }
    checkpoints = _absolute(job.checkpoint.folder or f"{run}/checkpoints")
    return job.model_copy(
        update={
            "run": job.run.model_copy(update={"folder": run}),
            "model": job.model.model_copy(update={"path": _existing(job.model.path)}),
            "tokenizer": job.tokenizer.model_copy(update={"path": _existing(job.tokenizer.path)}),
            "data": job.data.model_copy(update=data),
            "checkpoint": job.checkpoint.model_copy(update={"folder": checkpoints}),
            "parallel": job.parallel.model_copy(update={"plan": _plan(job.parallel.plan)}),
        }
    )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _existing(path: str | None) -> str | None:
    """The path made absolute if something is there: a model may also be a hub id."""
    exists = path is not None and os.path.exists(os.path.expanduser(path))
    return _absolute(path) if path is not None and exists else path


def _plan(text: str) -> str:
    return _absolute(text) if text.endswith(".toml") else text


def job_toml(job: Job) -> str:
    """The job as TOML with every default written out; `read_job` reads it back as the same."""
    return tomlkit.dumps(job.model_dump(mode="json", exclude_none=True))


# --- reading ------------------------------------------------------------------------------------


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        close = nearest(path.name, [p.name for p in path.absolute().parent.glob("*.toml")])
        raise JobError(
            Problem(f"no job file {path}", "a job is a TOML file", ", ".join(close))
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(Problem(f"{path} cannot be read: {error}")) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(_syntax_problem(path, text, str(error))) from None


def _syntax_problem(path: Path, text: str, message: str) -> Problem:
    """Where the TOML breaks, with the line itself; duplicate keys are such a break."""
    lines = text.rstrip().splitlines() or [""]
    end = f"(at line {len(lines)}, column {len(lines[-1]) + 1})"
    message = message.replace("(at end of document)", end)
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    line = lines[min(int(match[1]), len(lines)) - 1].strip() if match else lines[-1]
    duplicate = message.startswith(("Cannot overwrite", "Cannot declare"))
    rule = "a key and a section are given once" if duplicate else "a job file is valid TOML"
    works = "remove one of the two" if duplicate else 'key = value, with texts in "quotes"'
    return Problem(f"{path}: {message}: `{line}`", rule, works)


def _apply(values: dict[str, Any], override: str) -> None:
    """Puts one `section.key=value` into the parsed values. Raises JobError if it is not one."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise JobError(
            Problem(
                f"--set {override}", "an override is section.key=value", "--set train.steps=100"
            )
        )
    table = values
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise JobError(Problem(f"--set {override}", f"{key} is a section, not a value"))
        table = inner
    table[keys[-1]] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    """The TOML value of a text, or the text itself: `tp=2,pp=2` needs no quotes on a shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# --- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the job file in messages."""

    section: str
    key: str

    def __str__(self) -> str:
        return f"[{self.section}] {self.key}"


def _problem(details: ErrorDetails, values: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors as a Problem that names section, key, rule and remedy."""
    reason = details.get("ctx", {}).get("error")
    if isinstance(reason, Contradiction):
        return reason.problem
    place = [str(part) for part in details["loc"]]
    if place[:2] == ["data", "mixture"] and len(place) > 3:
        return _in_mixture(place[2], place[3], details)
    if details["type"] == "extra_forbidden":
        return _unknown(place, details["input"])
    if len(place) == 1:
        return _bad_section(place[0], details)
    key = _Key(place[0], place[1])
    if details["type"] == "missing":
        return Problem(f"{key} is missing", _description(key), _example(key))
    given = _given(values, place)
    return Problem(f"{key} = {given!r}: {_lower(details['msg'])}", _description(key), _example(key))


def _in_mixture(number: str, key: str, details: ErrorDetails) -> Problem:
    """A wrong key or value of one data set of a mixture."""
    where, fields = f"[[data.mixture]] number {int(number) + 1}", Source.model_fields
    if key not in fields:
        rule = f"keys of [[data.mixture]]: {', '.join(fields)}"
        return Problem(f"unknown key '{key}' in {where}", rule, ", ".join(nearest(key, fields)))
    what = f"{where}: {key} is missing"
    if details["type"] != "missing":
        what = f"{where}: {key} = {details['input']!r}: {_lower(details['msg'])}"
    return Problem(what, fields[key].description or "")


def _unknown(place: Sequence[str], value: object) -> Problem:
    if len(place) == 1:
        return _unknown_section(place[0], value)
    section, key = place[0], place[1]
    what = f"unknown key '{key}' in [{section}]"
    elsewhere = [str(k) for k in _all_keys() if k.key == key]
    if elsewhere:
        return Problem(what, f"'{key}' belongs to another section", " or ".join(elsewhere))
    here = [k.key for k in _all_keys() if k.section == section]
    return Problem(what, f"keys of [{section}]: {', '.join(here)}", _nearest_key(section, key))


def _unknown_section(name: str, value: object) -> Problem:
    if name.lower() in ("lora", "peft", "adapter"):
        rule = (
            "adapters are not trained: `peft` wraps whole linears, and ours are shards of them "
            "that run in programs of their own"
        )
        return Problem(f"section [{name}]", rule, "[train] freeze = [...] trains a part of a model")
    if isinstance(value, dict):
        close = [f"[{section}]" for section in nearest(name, SECTIONS)]
        rule = "sections: " + ", ".join(SECTIONS)
        return Problem(f"unknown section [{name}]", rule, " or ".join(close))
    homes = [str(k) for k in _all_keys() if k.key == name]
    works = " or ".join(homes) or _nearest_key("", name)
    return Problem(f"key '{name}' outside any section", "every key stands in a section", works)


def _nearest_key(section: str, key: str) -> str:
    """The nearest keys, those of the same section first; names of other tools are understood."""
    here = [_Key(section, name) for name in nearest(key, _names(section), count=2)]
    there = [_Key(*FOREIGN_NAMES[name].split(".")) for name in nearest(key, FOREIGN_NAMES, count=1)]
    everywhere = {k.key: k for k in _all_keys()}
    away = [everywhere[name] for name in nearest(key, everywhere, count=1)]
    found = dict.fromkeys(here + there or away)
    return " or ".join(f"[{k.section}] {_example(k) or k.key}" for k in found)


def _bad_section(name: str, details: ErrorDetails) -> Problem:
    required = [str(key) for key in _all_keys() if key.section == name and _is_required(key)]
    rule = f"it needs {', '.join(required)}" if required else f"[{name}] is a section of keys"
    what = (
        f"section [{name}] is missing" if details["type"] == "missing" else f"'{name}' is a value"
    )
    return Problem(what, rule, f"[{name}]")


def _names(section: str) -> Iterator[str]:
    return (key.key for key in _all_keys() if key.section == section)


def _all_keys() -> Iterator[_Key]:
    for section, kind in SECTIONS.items():
        for key in kind.model_fields:
            yield _Key(section, key)


def _is_required(key: _Key) -> bool:
    return SECTIONS[key.section].model_fields[key.key].is_required()


def _description(key: _Key) -> str:
    return SECTIONS[key.section].model_fields[key.key].description or ""


def _example(key: _Key) -> str:
    """`key = value` that works: the field's example, else its default."""
    field = SECTIONS[key.section].model_fields[key.key]
    if field.examples:
        return f"{key.key} = {field.examples[0]}"
    if field.default is None or field.is_required():
        return ""
    return tomlkit.dumps({key.key: field.default}).strip()


def _given(values: Mapping[str, Any], place: Sequence[str]) -> object:
    """What the file says at section and key (its innermost parts are not needed)."""
    section = values.get(place[0], {})
    return section.get(place[1]) if isinstance(section, dict) else section


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
