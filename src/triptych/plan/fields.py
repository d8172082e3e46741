"""The settings of a plan as text knows them: their names, their types, the values that exist.

One table for the short form, the TOML form and the rules, so that a name is spelt once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.errors import Problem, nearest
from triptych.schedule.traits import SCHEDULES

DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Field:
    """What a setting may be: an `int` from `minimum` to `maximum`, a `bool`, or one of `values`."""

    kind: type
    minimum: int = 0
    maximum: int | None = None
    values: tuple[str, ...] = ()

    def describe(self) -> str:
        """The allowed values in words: `a whole number from 1`, `one of none, full`."""
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "one of " + ", ".join(self.values) if self.values else "a text"
        if self.maximum is not None:
            return "one of " + ", ".join(map(str, range(self.minimum, self.maximum + 1)))
        return f"a whole number from {self.minimum}"

    def accepts(self, value: object) -> bool:
        """True if a value has the right type and is in range. `True` is not a whole number."""
        if type(value) is not self.kind:
            return False
        if isinstance(value, str):
            return not self.values or value in self.values
        if isinstance(value, int) and self.kind is int:
            return value >= self.minimum and (self.maximum is None or value <= self.maximum)
        return True


_COUNT = Field(int, minimum=1)

DEGREES: dict[str, Field] = dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), _COUNT)

RANK_ORDER = "tp-cp-ep-dp-pp"

SETTINGS: dict[str, Field] = {
    "zero": Field(int, maximum=3),
    "hybrid_shard": Field(int),
    "accumulation": Field(str, values=("auto", "reduce_last", "reduce_each")),
    "bucket_bytes": _COUNT,
    "prefetch": Field(int),
    "schedule": Field(str, values=SCHEDULES),
    "chunks": _COUNT,
    "microbatch": _COUNT,
    "recompute": Field(str, values=("none", "selective", "full")),
    "recompute_every": _COUNT,
    "shard_activations": Field(bool),
    "sequence_parallel": Field(bool),
    "offload": Field(str, values=("none", "optimizer", "activations", "parameters")),
    "rank_order": Field(str, values=(RANK_ORDER,)),
    "attention": Field(str, values=("sdpa", "eager", "flash")),
    "context_method": Field(str, values=("ring", "ulysses")),
    "compile": Field(bool),
}

PRECISION: dict[str, Field] = dict.fromkeys(
    ("parameter", "gradient", "reduction", "master", "moments"), Field(str, values=DTYPES)
)

# What other tools call our keys.
FOREIGN_NAMES = {
    "tensor_parallel": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel": "pp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "zero_stage": "zero",
    "micro_batch_size": "microbatch",
    "activation_checkpointing": "recompute",
    "partition_activations": "shard_activations",
    "virtual_stages": "chunks",
    "dtype": "precision",
}


def value_problem(key: str, value: object, field: Field) -> Problem | None:
    """What is wrong with the value of a setting, if anything; a misspelt word gets close ones."""
    if field.accepts(value):
        return None
    close = nearest(value, field.values) if isinstance(value, str) else []
    works = f"{key} = {close[0]}" if close else ""
    return Problem(f"{key} = {value!r}", f"{key} is {field.describe()}", works)


def unknown_key(key: str, known: Iterable[str], where: str) -> Problem:
    """The problem of a key that does not exist, with the nearest ones that do.

    Names of other tools are understood.
    """
    names = list(known)
    ours = {name: name for name in names}
    ours |= {name: own for name, own in FOREIGN_NAMES.items() if own in ours}
    close = list(dict.fromkeys(ours[name] for name in nearest(key, ours)))
    works = ", ".join(close) if close else "one of " + ", ".join(names)
    return Problem(f"unknown key '{key}' in {where}", "every key is known", works)
