"""A wrong command line as a list of problems: the option that was meant, not a stack trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from triptych.errors import InputError, Problem, nearest


def unknown_verb(word: str, verbs: Iterable[str]) -> InputError:
    """The error of a verb that does not exist."""
    names = list(verbs)
    close = nearest(word, names)
    works = " or ".join(f"triptych {name}" for name in close or names)
    return InputError(Problem(f"unknown command '{word}'", works=works))


def usage_error(error: Any, options: Sequence[str]) -> InputError:
    """The error of an option or argument that Typer refused. `options` are the verb's own."""
    unknown = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    usage = context.get_usage().removeprefix("Usage: ") if context else ""
    if unknown is not None and unknown not in options:
        close = nearest(unknown, options)
        works = " or ".join(close) if close else ", ".join(options)
        return InputError(Problem(f"unknown option '{unknown}'", usage, works))
    command = context.command_path if context else "triptych"
    return InputError(Problem(error.format_message(), usage, f"{command} --help"))


def expand_lists(
    args: Sequence[str], listing: Iterable[str] = ("--set", "--fix", "--sweep")
) -> list[str]:
    """The same arguments with `--set a=1 b=2` written as `--set a=1 --set b=2`."""
    expanded: list[str] = []
    current: str | None = None
    for arg in args:
        if arg in listing:
            current = arg
        elif current and expanded[-1] != current and "=" in arg and not arg.startswith("-"):
            expanded.append(current)
        elif current and expanded[-1] != current:
            current = None
        expanded.append(arg)
    return expanded
