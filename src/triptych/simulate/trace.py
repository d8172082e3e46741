"""A list of requests: arrivals, models, lengths; drawn, or read from a public trace."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.errors import InputError, Problem

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
_PER_REQUEST = ("arrival_s", "prompt_tokens", "output_tokens", "model", "slo_s")
# Prompt and answer tokens of so many requests.
Lengths = Callable[[np.random.Generator, int], tuple[Counts, Counts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; arrays of one length.

    `slo_s` is the objective from arrival to the last token; infinite where there is none.
    """

    arrival_s: Floats
    prompt_tokens: Counts
    output_tokens: Counts
    model: Counts  # index into `models`
    models: tuple[str, ...] = ("",)
    slo_s: Floats

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in _PER_REQUEST}
        if len(lengths) != 1:
            raise InputError(
                Problem(f"columns of {sorted(lengths)} values", "one for each request")
            )
        if (np.diff(self.arrival_s) < 0).any():
            raise InputError(Problem("arrivals go back in time", "in order", "sort the trace"))

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Requests a second between the first and the last; NaN if there is no time between."""
        span_s = float(np.ptp(self.arrival_s)) if len(self) else 0.0
        return (len(self) - 1) / span_s if span_s else math.nan

    def head(self, count: int) -> Trace:
        """The first requests."""
        return replace(self, **{name: getattr(self, name)[:count] for name in _PER_REQUEST})

    def only(self, chosen: NDArray[np.bool_]) -> Trace:
        """The requests that are chosen, at their own times."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _PER_REQUEST})

    def capped(self, prompt_tokens: int, output_tokens: int) -> Trace:
        """The same requests, none longer than a model's limits."""
        prompts = np.minimum(self.prompt_tokens, prompt_tokens)
        outputs = np.minimum(self.output_tokens, output_tokens)
        return replace(self, prompt_tokens=prompts, output_tokens=outputs)

    def at_rate(self, rate_per_s: float) -> Trace:
        """The same requests, all gaps stretched alike."""
        return replace(self, arrival_s=self.arrival_s * (self.rate_per_s / rate_per_s))


def make(
    arrival_s: Floats,
    lengths: Lengths,
    rng: np.random.Generator,
    model: Counts | None = None,
    models: tuple[str, ...] = ("",),
) -> Trace:
    """Arrivals with lengths drawn for each."""
    prompts, outputs = lengths(rng, len(arrival_s))
    return _trace(arrival_s, prompts, outputs, model, models)


def fixed_lengths(prompt: int, output: int) -> Lengths:
    """All alike."""
    return lambda rng, count: (np.full(count, prompt), np.full(count, output))


def uniform_lengths(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    """Evenly between bounds, both included."""
    return lambda rng, count: (
        rng.integers(*prompt, count, endpoint=True),
        rng.integers(*output, count, endpoint=True),
    )


def log_normal_lengths(prompt: tuple[float, float], output: tuple[float, float]) -> Lengths:
    """Log-normal with (mean, coefficient of variation) each, rounded, at least 1."""

    def of(mean: float, cv: float, rng: np.random.Generator, count: int) -> Counts:
        sigma = np.sqrt(np.log1p(cv**2))
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)

    return lambda rng, count: (of(*prompt, rng, count), of(*output, rng, count))


def lengths_of(trace: Trace) -> Lengths:
    """Pairs of a trace, drawn with replacement."""

    def pairs(rng: np.random.Generator, count: int) -> tuple[Counts, Counts]:
        chosen = rng.integers(len(trace), size=count)
        return trace.prompt_tokens[chosen], trace.output_tokens[chosen]

    return pairs


def read_trace(path: Path) -> Trace:
    """A CSV file in one of the forms that are known by their columns.

    `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure), `timestamp_ms,input_length,output_length`
    (Mooncake), `model,arrival_s,slo_s` (single-shot requests, without lengths),
    `model,arrival_s,prompt_tokens,output_tokens` (of several LLMs).

    Raises:
        InputError: if the file cannot be read as one of them.

    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(Problem(f"{path}: {error}", "a CSV file that can be read")) from error
    columns = set(rows[0]) if rows else set()
    for needed, read in _FORMS.items():
        if needed <= columns:
            return _read(path, read, {name: [row[name] for row in rows] for name in needed})
    known = " | ".join(",".join(sorted(form)) for form in _FORMS)
    raise InputError(Problem(f"{path}: columns {sorted(columns)}", "a form that is known", known))


def _read(
    path: Path, read: Callable[[dict[str, list[str]]], Trace], columns: dict[str, list[str]]
) -> Trace:
    try:
        return read(columns)
    except (TypeError, ValueError) as error:
        raise InputError(Problem(f"{path}: {error}", "a number or a time in each row")) from error


def _counts(texts: list[str]) -> Counts:
    return np.array(texts, dtype=np.int64)


def _azure(columns: dict[str, list[str]]) -> Trace:
    times = np.array(columns["TIMESTAMP"], dtype="datetime64[ns]")
    arrival_s = (times - times[0]) / np.timedelta64(1, "s")
    return _trace(arrival_s, _counts(columns["ContextTokens"]), _counts(columns["GeneratedTokens"]))


def _mooncake(columns: dict[str, list[str]]) -> Trace:
    arrival_s = np.array(columns["timestamp_ms"], dtype=float) / 1e3
    prompts, outputs = _counts(columns["input_length"]), _counts(columns["output_length"])
    return _trace(arrival_s - arrival_s[0], prompts, outputs)


def _single_shot(columns: dict[str, list[str]]) -> Trace:
    arrival_s = np.array(columns["arrival_s"], dtype=float)
    names = tuple(sorted(set(columns["model"]), key=lambda name: (len(name), name)))
    by_name = {name: index for index, name in enumerate(names)}
    model = np.array([by_name[name] for name in columns["model"]])
    ones = np.ones(len(arrival_s), dtype=np.int64)
    trace = _trace(arrival_s, ones, ones, model, names)
    return replace(trace, slo_s=np.array(columns["slo_s"], dtype=float))


def _of_llms(columns: dict[str, list[str]]) -> Trace:
    arrival_s = np.array(columns["arrival_s"], dtype=float)
    names = tuple(sorted(set(columns["model"])))
    model = np.array([names.index(name) for name in columns["model"]])
    prompts, outputs = _counts(columns["prompt_tokens"]), _counts(columns["output_tokens"])
    return _trace(arrival_s, prompts, outputs, model, names)


_FORMS: dict[frozenset[str], Callable[[dict[str, list[str]]], Trace]] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure,
    frozenset({"timestamp_ms", "input_length", "output_length"}): _mooncake,
    frozenset({"model", "arrival_s", "slo_s"}): _single_shot,
    frozenset({"model", "arrival_s", "prompt_tokens", "output_tokens"}): _of_llms,
}


def _trace(
    arrival_s: Floats,
    prompt_tokens: Counts,
    output_tokens: Counts,
    model: Counts | None = None,
    models: tuple[str, ...] = ("",),
) -> Trace:
    return Trace(
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        model=np.zeros(len(arrival_s), np.int64) if model is None else model,
        models=models,
        slo_s=np.full(len(arrival_s), np.inf),
    )
