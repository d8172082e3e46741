"""One table of a TOML file, read strictly: every fault noted, none raised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triptych.errors import Problem, nearest


class Table:
    """A TOML table that knows its place and which of its keys were asked for.

    A method that finds a fault notes it in `problems` (shared by all tables of a file) and
    returns a stand-in.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, problems: list[Problem] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.problems: list[Problem] = [] if problems is None else problems
        self.known: set[str] = set()

    def peek(self, key: str) -> Any:
        """The value of a key, or None; counts as asking for the key."""
        self.known.add(key)
        return self.values.get(key)

    def take(self, key: str, rule: str) -> str | Mapping[str, Any] | None:
        """The value of a required key, a string or a table; None once a fault is noted."""
        value = self.peek(key)
        if value is None:
            self._missing(key)
        elif not isinstance(value, str | Mapping):
            self.wrong(key, value, rule)
        else:
            return value
        return None

    def child(self, key: str, value: Mapping[str, Any] | None) -> Table:
        """A table within this one; of None, whose fault is noted already, one that stays silent."""
        where = f"[{key}] of {self.where}"
        return Table({}, where, []) if value is None else Table(value, where, self.problems)

    def table(self, key: str) -> Table:
        """A required table within this one."""
        value = self.peek(key)
        if value is None:
            self._missing(key)
        elif not _is_table(value):
            self.wrong(key, value, "a table")
        return self.child(key, value if _is_table(value) else None)

    def tables(self, key: str) -> list[Table]:
        """A required array of at least one table."""
        value = self.peek(key)
        if not isinstance(value, list) or not value or not all(map(_is_table, value)):
            self.wrong(key, value, f"at least one table [[{key}]]")
            return []
        return [
            Table(item, f"[[{key}]] {index + 1} of {self.where}", self.problems)
            for index, item in enumerate(value)
        ]

    def string(self, key: str, default: str | None = None) -> str:
        """A string; required if there is no default."""
        value = self.peek(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self._bad(key, value, "a string")
            return ""
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; absent means empty."""
        value = self.peek(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.wrong(key, value, "a list of strings")
            return []
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; required if there is no default."""
        value = self.peek(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._bad(key, value, "a positive integer")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number in SI units; required if there is no default."""
        value = self.peek(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._bad(key, value, "a number")
        elif not 0 < value < float("inf"):
            self.wrong(key, value, "a positive number")
        else:
            return float(value)
        return 1.0

    def share(self, key: str, default: float) -> float:
        """A number above 0 and at most 1."""
        value = self.number(key, default)
        if value > 1:
            self.wrong(key, value, "at most 1")
        return value

    def check_unknown(self, valid: Iterable[str] = ()) -> None:
        """Notes every key that nobody asked for, with the nearest that exists."""
        known = self.known | set(valid)
        for key in self.values:
            if key not in known:
                close = nearest(key, sorted(known), count=1) or sorted(known)
                self.problems.append(
                    Problem(
                        f"unknown key {key!r} in {self.where}",
                        "a file has no other keys than those of its format",
                        ", ".join(close),
                    )
                )

    def wrong(self, key: str, value: object, rule: str) -> None:
        """Notes that a value breaks a rule."""
        self.problems.append(Problem(f"{key} = {value!r} in {self.where}", f"{key} must be {rule}"))

    def _bad(self, key: str, value: object, rule: str) -> None:
        if value is None:
            self._missing(key)
        else:
            self.wrong(key, value, rule)

    def _missing(self, key: str) -> None:
        self.problems.append(Problem(f"{key} is missing in {self.where}", f"{key} has no default"))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)
