"""The job file documented key by key, from the descriptions that also check it.

python -m triptych.train.job_reference > docs/job.md
"""

from __future__ import annotations

import sys
from typing import Any, get_args

import tomlkit
from pydantic.fields import FieldInfo

from triptych.train.job_file import SECTIONS
from triptych.train.section import Section

_HEAD = """\
# The job file

`triptych train job.toml` reads this file; `--set section.key=value` changes single keys. Every key
is checked before anything is written: unknown keys, wrong types and settings that contradict each
other are errors that name the nearest key or a value that works. Paths are relative to the working
directory. The resolved job, with every default written out, is `job.toml` in the run folder.

The shortest job:

```toml
[model]
path = "my-model"           # a Hugging Face directory with config.json and tokenizer.json

[data]
train = ["text/**/*.txt"]
sequence_length = 512

[train]
steps = 1000
global_batch = 32
```
"""

_TYPES = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}


def job_reference() -> str:
    """Markdown with one table a section."""
    parts = [_HEAD, *(_section(name, kind) for name, kind in SECTIONS.items())]
    return "\n".join(parts)


def _section(name: str, kind: type[Section]) -> str:
    rows = [_row(key, field) for key, field in kind.model_fields.items()]
    head = [f"## [{name}]", "", (kind.__doc__ or "").strip(), ""]
    table = ["| key | type | default | |", "|---|---|---|---|", *rows]
    return "\n".join([*head, *table, ""])


def _row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {field.description} |"


def _type(annotation: Any) -> str:
    """A type in words: `int | None` -> whole number, a literal -> its values."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    name = getattr(annotation, "__name__", "")
    if name == "Literal" or (parts and all(isinstance(part, str) for part in parts)):
        return " or ".join(f"`{part}`" for part in parts)
    if name == "tuple":
        return f"list of {_kind(_flat(parts))}"
    if name == "dict":
        return "table"
    return _type(parts[0]) if parts else _TYPES.get(name, name)


def _kind(inner: list[Any]) -> str:
    """What is in a list."""
    if float in inner:
        return "numbers"
    return "texts" if str in inner else "tables"


def _flat(parts: list[Any]) -> list[Any]:
    return [inner for part in parts for inner in (get_args(part) or (part,))]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if field.default is None:
        return ""
    value = tomlkit.dumps({"v": field.default}).removeprefix("v = ").strip()
    return f"`{value}`" if value and not value.startswith("[v]") else "`{}`"


if __name__ == "__main__":
    sys.stdout.write(job_reference())
