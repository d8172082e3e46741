"""Reading keys of a `config.json`: typed, with defaults, every fault collected before one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.errors import ModelError, Problem


class ConfigKeys:
    """The keys of one configuration; `finish` raises once for everything that was wrong.

    A method that finds a fault notes it and returns a stand-in, so that reading goes on and the
    user sees all faults together. `null` counts as absent unless a method says otherwise.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.missing: list[str] = []
        self.problems: list[Problem] = []
        self.stand_ins: set[str] = set()  # keys whose value is not the user's

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer under the first of `names` that is present; required if there is no default.

        A missing key is reported under the first name, the spelling of today.
        """
        for name in names:
            value = self.config.get(name)
            if value is not None:
                number = self._integer(name, value, minimum)
                return self._stand_in(names[0]) if number is None else number
        if default is None:
            self.missing.append(names[0])
            return self._stand_in(names[0])
        return default

    def optional_count(self, name: str, default: int | None = None) -> int | None:
        """Like `count`, but an explicit `null` means none; `default` is for an absent key."""
        value = self.config.get(name, default)
        return None if value is None else self._integer(name, value, 1)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, value, "true or false")
            return default
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """A number, for dropout rates."""
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(name, value, "a number")
            return default
        return float(value)

    def words(self, name: str) -> list[str]:
        """A list of strings; absent means empty."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.wrong(name, value, "a list of strings")
            return []
        return value

    def layer_indices(self, name: str) -> list[int]:
        """A list of layer indices; absent means empty."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self.wrong(name, value, "a list of layer indices")
            return []
        return value

    def has(self, *names: str) -> bool:
        """True if one of the keys is present and not null."""
        return any(self.config.get(name) is not None for name in names)

    def require_multiple(self, names: tuple[str, str], values: tuple[int, int]) -> None:
        """Notes a problem unless the first value is a multiple of the second, both as stated."""
        if self.stand_ins.isdisjoint(names) and values[0] % values[1]:
            self.problems.append(
                Problem(
                    f"{names[0]} = {values[0]} in {self.name}",
                    f"{names[0]} must be a multiple of {names[1]} = {values[1]}",
                    f"{names[1]} = {_largest_divisor(*values)}",
                )
            )

    def wrong(self, name: str, value: object, rule: str) -> None:
        """Notes that a value has the wrong type or range."""
        self.problems.append(
            Problem(f"{name} = {value!r} in {self.name}", f"{name} must be {rule}")
        )

    def finish(self) -> None:
        """Raises ModelError with every fault, or does nothing."""
        problems = list(self.problems)
        if self.missing:
            problems.insert(0, _missing_problem(self.name, self.missing))
        if problems:
            raise ModelError(problems)

    def _stand_in(self, name: str) -> int:
        self.stand_ins.add(name)
        return 1

    def _integer(self, name: str, value: object, minimum: int) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.wrong(name, value, f"an integer of at least {minimum}")
            return None
        return value


def _missing_problem(name: str, missing: list[str]) -> Problem:
    unique = list(dict.fromkeys(missing))
    return Problem(
        f"the configuration of {name} lacks {', '.join(unique)}",
        "these keys are needed to count a model",
        "a complete config.json as transformers' save_pretrained writes it",
    )


def _largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    return next(divisor for divisor in range(min(value, limit), 0, -1) if value % divisor == 0)
