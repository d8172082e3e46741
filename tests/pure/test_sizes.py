"""A function fits a screen and a file fits a sitting."""

from __future__ import annotations

import ast
import subprocess
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


def test_no_source_file_is_ignored_by_git() -> None:
    found = subprocess.run(
        ["git", "status", "--ignored", "--porcelain", "--", str(SOURCE)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
    )
    ignored = [line for line in found.stdout.splitlines() if line.startswith("!!")]
    assert [line for line in ignored if "__pycache__" not in line and "egg-info" not in line] == []
