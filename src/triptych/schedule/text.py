r"""Programs as text, to read, to diff and to write by hand.

    schedule 1f1b
    microbatches 2
    placement 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

Empty lines and everything after `#` are ignored. `placement` names the rank of each stage.
"""

from __future__ import annotations

import re

from triptych.errors import Problem, ScheduleError
from triptych.schedule.action import Action
from triptych.schedule.program import Program

_HEADS = ("schedule", "microbatches", "placement")
_EXAMPLE = "'schedule 1f1b', 'microbatches 2', 'placement 0 1', 'rank 0: 0F0 0B0'"


def program_text(program: Program) -> str:
    """The program as text that `parse_program` reads back to an equal value."""
    lines = (
        f"schedule {program.name}",
        f"microbatches {program.num_microbatches}",
        "placement " + " ".join(map(str, program.placement)),
        str(program),
    )
    return "\n".join(lines) + "\n"


def parse_program(text: str) -> Program:
    """The program that a text describes.

    Raises ScheduleError naming every line that cannot be read, or what is missing. Whether the
    program is legal is for `check` to say.
    """
    heads: dict[str, str] = {}
    rows: list[tuple[Action, ...]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            _read_line(line.split("#")[0].strip(), heads, rows)
        except (ValueError, ScheduleError) as error:
            problems.append(Problem(f"line {number}: {str(error).removeprefix('- ')}"))
    missing = [head for head in _HEADS if head not in heads] + ([] if rows else ["rank 0:"])
    if missing and not problems:
        problems.append(
            Problem("missing: " + ", ".join(missing), works=f"lines such as {_EXAMPLE}")
        )
    if problems:
        raise ScheduleError(problems)
    return Program(
        name=heads["schedule"],
        placement=tuple(map(int, heads["placement"].split())),
        num_microbatches=int(heads["microbatches"]),
        actions=tuple(rows),
    )


def _read_line(line: str, heads: dict[str, str], rows: list[tuple[Action, ...]]) -> None:
    """Adds what one line says to `heads` or `rows`."""
    if not line:
        return
    if row := re.fullmatch(r"rank (\d+):(.*)", line):
        if int(row[1]) != len(rows):
            raise ValueError(f"rank {row[1]} stands where rank {len(rows)} should")
        rows.append(tuple(Action.parse(word) for word in row[2].split()))
        return
    head, _, value = line.partition(" ")
    if head not in _HEADS or head in heads or not value.strip():
        raise ValueError(f"'{line}' is not one of {_EXAMPLE}")
    if head != "schedule" and not re.fullmatch(r"[\d ]+", value):
        raise ValueError(f"'{value}' is not a list of counts")
    heads[head] = value.strip()
