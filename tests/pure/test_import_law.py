"""Who may import whom: the table of the design, enforced over the syntax trees of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "triptych"

# package -> what it may import, and with it what those may. `api` and `cli` may import anything.
MAY_IMPORT = {
    "units": "",
    "errors": "",
    "model": "units errors",
    "capture": "model",
    "cluster": "units errors",
    "schedule": "units errors",
    "plan": "model cluster schedule",
    "cost": "plan",
    "serve.core": "units errors",
    "simulate": "serve.core cost",
    "search": "simulate",
    "validate": "simulate",
    "fleet": "search",
    "export": "plan",
    "runtime": "plan",
    "checkpoint": "runtime",
    "measure": "runtime",
    "tokenizer": "units errors",
    "train": "checkpoint tokenizer",
    "serve.engine": "checkpoint tokenizer serve.core fleet",
    "serve.http": "serve.engine",
    "serve.load": "simulate",
    "report": "fleet export",  # every kind of value, never what makes them run
}
EVERYTHING = ("api", "cli", "__main__")
BELOW_THE_LINE = {
    "capture",
    "runtime",
    "checkpoint",
    "measure",
    "tokenizer",
    "train",
    "serve.engine",
    "serve.http",
    *EVERYTHING,
}
IMPORTED_BY_NOBODY = {"cli"}  # and `api` by the package itself and `cli` only

TORCH = {"torch", "transformers", "safetensors", "tokenizers", "datasets"}
NOT_IN_RUNTIME = {"pydantic", "typer", "rich", "jinja2"}

# Where an import may hide in a function: so that the first line of a command comes at once.
LOADS_LAZILY = ("__init__.py", "cli/")
# An optional package has one module of ours, loaded by name from here.
LOADS_BY_NAME = {
    "api.py",
    "capture/late.py",
    "serve/engine/grammars.py",
    "train/entry.py",
    "train/corpus.py",
    "train/text.py",
    "train/trackers.py",
}


def allowed(package: str) -> set[str]:
    """The closure of the table for one package."""
    found: set[str] = set()
    queue = [package]
    while queue:
        for name in MAY_IMPORT[queue.pop()].split():
            if name not in found:
                found.add(name)
                queue.append(name)
    return found


def package_of(module: str) -> str:
    """`triptych.plan.rules` -> `plan`; `triptych.serve.core.block` -> `serve.core`."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["serve"] else ".".join(parts[:1])


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all modules that a tree imports, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: str) -> str:
    """`plan/rules.py` -> `triptych.plan.rules`; `plan/__init__.py` -> `triptych.plan`."""
    parts = ["triptych", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def broken_rules(path: str, source: str) -> list[str]:
    """What a file (path below src/triptych) breaks of the law."""
    tree = ast.parse(source)
    package = package_of(module_of(path))
    return [
        *_arrows(path, package, tree),
        *_outside(path, package, tree),
        *_hidden(path, tree),
    ]


def _arrows(path: str, package: str, tree: ast.AST) -> Iterator[str]:
    if package in EVERYTHING:
        return
    for name in imports(tree):
        target = package_of(name)
        if name.split(".")[0] != "triptych" or target == package:
            continue
        if path == "__init__.py":
            if target not in ("api", ""):
                yield f"{path}: the package itself loads only api, not {name}"
        elif target not in allowed(package):
            yield f"{path}: {package} may not import {name}"


def _outside(path: str, package: str, tree: ast.AST) -> Iterator[str]:
    roots = {name.split(".")[0] for name in imports(tree)}
    if package not in BELOW_THE_LINE:
        yield from (f"{path}: {root} above the line" for root in roots & TORCH)
    if package == "runtime":
        yield from (f"{path}: {root} in runtime" for root in roots & NOT_IN_RUNTIME)
    if package == "cli":
        at_top = ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], [])  # type: ignore[attr-defined]
        tops = {name.split(".")[0] for name in imports(at_top)}
        yield from (f"{path}: {root} before the first line is out" for root in tops & TORCH)


def _hidden(path: str, tree: ast.AST) -> Iterator[str]:
    if path.startswith(LOADS_LAZILY) and "/__init__" not in path:
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield f"{path}:{node.lineno}: import hidden in a function"
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name in {"import_module", "__import__"} and path not in LOADS_BY_NAME:
            yield f"{path}:{getattr(node, 'lineno', 0)}: loads a module by name"


def files() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", files())
def test_every_file_keeps_the_import_law(path: str) -> None:
    assert broken_rules(path, (SOURCE / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("runtime/x.py", "from triptych.cost.predict import predict", "may not import"),
        ("runtime/x.py", "import pydantic", "in runtime"),
        ("search/x.py", "from triptych.runtime import engine", "may not import"),
        ("model/x.py", "import triptych.plan.plan", "may not import"),
        ("train/x.py", "from triptych.api import find_plan", "may not import"),
        ("plan/x.py", "from triptych.cli.main import main", "may not import"),
        ("serve/core/x.py", "from triptych.cost.predict import predict", "may not import"),
        ("serve/core/x.py", "from triptych.serve.engine import offline", "may not import"),
        ("serve/core/x.py", "import torch", "above the line"),
        ("simulate/x.py", "from triptych.search.search import search", "may not import"),
        ("plan/x.py", "import torch.nn as nn", "above the line"),
        ("report/x.py", "from safetensors import safe_open", "above the line"),
        ("plan/x.py", "def f():\n    import json", "hidden"),
        ("plan/__init__.py", "def f():\n    import json", "hidden"),
        ("plan/x.py", "class A:\n    async def f(self):\n        from os import path", "hidden"),
        ("plan/x.py", "import importlib\nimportlib.import_module('numpy')", "by name"),
        ("cli/x.py", "import torch", "before the first line"),
        ("__init__.py", "def f():\n    from triptych.plan import plan", "loads only api"),
    ],
)
def test_the_law_catches_what_it_forbids(path: str, source: str, word: str) -> None:
    assert any(word in text for text in broken_rules(path, source))


def test_the_law_allows_what_the_table_says() -> None:
    assert broken_rules("train/x.py", "from triptych.plan.plan import Plan\nimport torch") == []
    assert broken_rules("cli/x.py", "def f():\n    import torch") == []
    assert broken_rules("search/x.py", "from triptych.cost.predict import predict") == []
    assert broken_rules("simulate/x.py", "from triptych.serve.core.step import Step") == []


def test_every_package_is_in_the_table() -> None:
    packages = {package_of(module_of(path)) for path in files()}
    assert packages - {"", "serve"} <= {*MAY_IMPORT, *EVERYTHING}


def test_the_packages_that_plan_import_no_torch_when_they_run() -> None:
    above = [
        module_of(path) for path in files() if package_of(module_of(path)) not in BELOW_THE_LINE
    ]
    code = (
        f"import importlib, sys\nfor name in {above!r}: importlib.import_module(name)\n"
        f"print(*({TORCH!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_serve_package_itself_is_empty() -> None:
    assert (SOURCE / "serve" / "__init__.py").read_text().strip() == ""
