"""A function fits a screen and a file fits a sitting."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "triptych"
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {lines}")
    assert long == []


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    lengths = {
        str(path.relative_to(SOURCE)): len(path.read_text().splitlines())
        for path in sorted(SOURCE.rglob("*.py"))
    }
    assert {name: count for name, count in lengths.items() if count > LONGEST_FILE} == {}
