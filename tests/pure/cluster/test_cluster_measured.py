"""Measured curves and grids: what lies between points, and the tables of a cluster file."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from triptych.cluster.cluster import Cluster
from triptych.cluster.measured import Curve, Grid, Kernels, Measured, messages_of
from triptych.cluster.measured_toml import OPERATORS
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import parse_toml, write_cluster
from triptych.errors import ClusterError


def power_law(*axes: tuple[float, ...]) -> Grid:
    """Rates that are a power law, which a grid must give back everywhere inside."""
    rates = tuple(_law(place) for place in itertools.product(*axes))
    return Grid(axes=axes, rates=rates)


def _law(place: tuple[float, ...]) -> float:
    value = 1e9
    for power, size in enumerate(place, 1):
        value *= size ** (0.1 * power)
    return value


def measured_cluster() -> Cluster:
    curve = Curve(sizes=(1e3, 1e6), seconds=(1.5e-6, 1e-3))
    kernels = Kernels(
        products=power_law((64.0, 512.0), (32.0, 128.0, 2048.0), (32.0, 8192.0)),
        attention=(power_law((64.0, 1024.0), (32.0, 64.0)),) * 2,
        operators={name: (curve, curve.times(1.5)) for name in OPERATORS},
    )
    base = parse_cluster("2x2xcpu")
    group = base.groups[0]
    measured = Measured(
        threads=1, host_s=(1e-5, 2e-5), optimizer=curve, kernels={"fp32": kernels, "bf16": kernels}
    )
    link = replace(group.link, measured={"send": {2: curve}, "all_reduce": {2: curve, 4: curve}})
    device = replace(group.device, measured=measured)
    return replace(base, groups=(replace(group, device=device, link=link),), network=link)


def test_a_curve_passes_its_points_and_goes_on_at_its_last_slope() -> None:
    curve = Curve(sizes=(10.0, 20.0, 40.0), seconds=(1.0, 3.0, 4.0))
    assert [curve.at(size) for size in (10, 20, 40)] == [1.0, 3.0, 4.0]
    assert curve.at(30) == 3.5
    assert curve.at(80) == 6.0
    assert curve.at(0) == 1.0
    assert curve.above_least(20) == 2.0


@pytest.mark.parametrize("place", [(64, 32, 32), (100, 333, 1000), (512, 2048, 8192)])
def test_a_grid_gives_a_power_law_back_between_its_points(place: tuple[int, ...]) -> None:
    grid = power_law((64.0, 512.0), (32.0, 128.0, 2048.0), (32.0, 8192.0))
    assert grid.at(*place) == pytest.approx(_law(place))


def test_beyond_a_grid_its_ends_count() -> None:
    grid = power_law((64.0, 512.0), (32.0, 128.0))
    assert grid.at(10_000, 1) == grid.at(512, 32)


def test_a_group_of_another_size_sends_as_much_for_the_same_seconds() -> None:
    """Three quarters of a tensor travel over 4 ranks, half of it over 2; a ring has 2 hops more."""
    curve = Curve(sizes=(1e6, 1e7), seconds=(1e-3, 1e-2))
    four = messages_of({"all_gather": {2: curve}}, 4, latency_s=1e-4)["all_gather"]
    assert four.at(1e7 / 1.5) == pytest.approx(1e-2 + 2e-4)
    assert messages_of({"all_gather": {4: curve}}, 4, 1e-4)["all_gather"] is curve


def test_a_measured_cluster_is_the_same_after_writing_and_reading() -> None:
    cluster = measured_cluster()
    assert parse_toml(write_cluster(cluster), "file") == cluster


def test_every_fault_of_measured_tables_is_told_at_once() -> None:
    text = write_cluster(measured_cluster())
    text = text.replace("threads = 1", "threads = 0").replace("all_reduce", "all_reduced")
    start = text.index("products = [")
    text = text[:start] + "products = [[1, 2, 3]]\n" + text[text.index("attention = [") :]
    with pytest.raises(ClusterError) as caught:
        parse_toml(text, "file")
    told = str(caught.value)
    for part in ("threads = 0", "'all_reduced'", "rows of 4 positive numbers"):
        assert part in told


def test_a_grid_with_a_hole_is_refused_with_the_place() -> None:
    text = write_cluster(measured_cluster())
    row = next(line for line in text.splitlines() if line.startswith("    [512, 128, 32, "))
    with pytest.raises(ClusterError, match=r"\[512, 128, 32\] is not there"):
        parse_toml(text.replace(row + "\n", ""), "file")
