"""The measured tables of a cluster file: rows of numbers, and back.

[groups.device.measured]
threads = 1                                # of a rank
host_s = [forward, backward]               # of the host for one kernel
optimizer = [[elements, seconds], ...]

[groups.device.measured.fp32]              # one table a dtype
products = [[rows, inner, columns, flops_per_s], ...]            # a whole grid
attention = [[tokens, head_size, forward, backward], ...]        # FLOP/s, a whole grid
norm = [[elements, forward_s, backward_s], ...]                  # so each kind of operator

[groups.link.measured]                     # or [network.measured]
all_reduce = [[ranks, bytes, seconds], ...]                      # so each operation
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from triptych.cluster.measured import (
    OPERATIONS,
    Curve,
    Grid,
    Kernels,
    Measured,
    Messages,
    Pair,
)
from triptych.cluster.table import Table
from triptych.units import DTYPE_BYTES

OPERATORS = ("norm", "activation", "rotary", "residual", "rows", "embedding", "loss")
"""Kinds of memory-bound operators that are measured."""

Rows = list[list[float]]


def read_device(parent: Table) -> Measured | None:
    """What a device's table says was measured; None if it says nothing."""
    table = _table(parent)
    if table is None:
        return None
    host = _rows(table, "host_s", 2, of_one=True)
    measured = Measured(
        threads=table.integer("threads"),
        host_s=(host[0][0], host[0][1]),
        optimizer=_curve(_rows(table, "optimizer", 2)),
        kernels={
            dtype: _kernels(table.child(dtype, table.peek(dtype)))
            for dtype in DTYPE_BYTES
            if isinstance(table.peek(dtype), Mapping)
        },
    )
    table.check_unknown(DTYPE_BYTES)
    return measured


def read_link(parent: Table) -> Messages:
    """What a link's table says was measured."""
    table = _table(parent)
    if table is None:
        return {}
    found: dict[str, dict[int, Curve]] = {}
    for name in OPERATIONS:
        if table.peek(name) is None:
            continue
        rows = sorted(_rows(table, name, 3))
        by_ranks = itertools.groupby(rows, key=lambda row: int(row[0]))
        found[name] = {max(2, n): _curve([row[1:] for row in group]) for n, group in by_ranks}
    table.check_unknown(OPERATIONS)
    return found


def device_lines(measured: Measured | None, place: str) -> list[str]:
    """The lines of a device's measured tables."""
    if measured is None:
        return []
    lines = [
        "",
        f"[{place}]",
        f"threads = {measured.threads}",
        f"host_s = {list(measured.host_s)!r}",
        *_array(
            "optimizer", zip(measured.optimizer.sizes, measured.optimizer.seconds, strict=True)
        ),
    ]
    for dtype, kernels in measured.kernels.items():
        lines += ["", f"[{place}.{dtype}]", *_kernel_lines(kernels)]
    return lines


def link_lines(messages: Messages, place: str) -> list[str]:
    """The lines of a link's measured table."""
    if not messages:
        return []
    lines = ["", f"[{place}]"]
    for name, curves in messages.items():
        rows = (
            (ranks, size, seconds)
            for ranks, curve in curves.items()
            for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
        )
        lines += _array(name, rows)
    return lines


# --- reading -----------------------------------------------------------------------------------


def _table(parent: Table) -> Table | None:
    value = parent.peek("measured")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        parent.wrong("measured", value, "a table of what was measured")
        return None
    return parent.child("measured", value)


def _kernels(table: Table) -> Kernels:
    attention = _rows(table, "attention", 4)
    forward = _grid(table, "attention", [row[:3] for row in attention])
    backward = _grid(table, "attention", [[*row[:2], row[3]] for row in attention])
    kernels = Kernels(
        products=_grid(table, "products", _rows(table, "products", 4)),
        attention=(forward, backward),
        operators={name: _pair(_rows(table, name, 3)) for name in OPERATORS},
    )
    table.check_unknown()
    return kernels


def _rows(table: Table, key: str, columns: int, *, of_one: bool = False) -> Rows:
    """Rows of so many positive numbers; rows of ones once a fault is noted."""
    value = table.peek(key)
    rows = [value] if of_one else value
    if isinstance(rows, list) and rows and all(_is_row(row, columns) for row in rows):
        return [[float(number) for number in row] for row in rows]
    rule = f"{columns} positive numbers" if of_one else f"rows of {columns} positive numbers"
    table.wrong(key, value, rule)
    return [[1.0] * columns]


def _is_row(row: object, columns: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == columns
        and all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
            for x in row
        )
    )


def _curve(rows: Rows) -> Curve:
    points = dict((row[0], row[1]) for row in sorted(rows))
    return Curve(sizes=tuple(points), seconds=tuple(points.values()))


def _pair(rows: Rows) -> Pair:
    return _curve([row[:2] for row in rows]), _curve([[row[0], row[2]] for row in rows])


def _grid(table: Table, key: str, rows: Rows) -> Grid:
    """A grid from its points, which must be all there."""
    points = {tuple(row[:-1]): row[-1] for row in rows}
    axes = tuple(tuple(sorted(set(values))) for values in zip(*points, strict=True))
    places = list(itertools.product(*axes))
    missing = [place for place in places if place not in points]
    if missing:
        rule = f"a whole grid; {[int(x) for x in missing[0]]} is not there"
        table.wrong(key, f"{len(points)} points", rule)
        return Grid(axes=tuple((1.0,) for _ in axes), rates=(1.0,))
    return Grid(axes=axes, rates=tuple(points[place] for place in places))


# --- writing -----------------------------------------------------------------------------------


def _kernel_lines(kernels: Kernels) -> Iterator[str]:
    products, (forward, backward) = kernels.products, kernels.attention
    yield from _array("products", _points(products, products.rates))
    yield from _array("attention", _points(forward, forward.rates, backward.rates))
    for name, (one, other) in kernels.operators.items():
        yield from _array(name, zip(one.sizes, one.seconds, other.seconds, strict=True))


def _points(grid: Grid, *columns: Sequence[float]) -> Iterator[tuple[float, ...]]:
    for place, *values in zip(itertools.product(*grid.axes), *columns, strict=True):
        yield (*place, *values)


def _array(key: str, rows: Iterator[tuple[float, ...]] | zip[tuple[float, ...]]) -> Iterator[str]:
    yield f"{key} = ["
    for row in rows:
        yield f"    [{', '.join(_number(value) for value in row)}],"
    yield "]"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
