"""The options of a script, and the pairs that they choose."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sides.deep_speed import enter_environment
from sides.pairs import Pair, chosen


def read_options(
    description: str | None, switches: Sequence[str] = (), **numbers: int
) -> argparse.Namespace:
    """`--only`, `--json`, some switches, and an option for each number with its default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="a part of the name of a mode or a peer")
    for switch in ("json", *switches):
        parser.add_argument(f"--{switch}", action="store_true")
    return parser.parse_args()


def chosen_pairs(only: str) -> Sequence[Pair]:
    """The pairs that a text names; in the environment that DeepSpeed needs, if one does."""
    pairs = chosen(only)
    if any(pair.needs_deep_speed for pair in pairs):
        enter_environment()
    return pairs
