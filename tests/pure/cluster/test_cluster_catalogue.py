"""Devices and links of the catalogue, and what a cluster makes of them."""

from __future__ import annotations

import pytest

from triptych.cluster.catalogue import devices, entries, fabrics
from triptych.cluster.cluster import Cluster, NodeGroup
from triptych.units import GIB


def test_sheet_numbers_become_si_units() -> None:
    device = devices()["H100-SXM5-80GB"]
    assert device.memory_bytes == 80 * GIB
    assert device.memory_bytes_per_s == 3.35e12
    assert device.peak_flops["bf16"] == 989e12
    assert device.peak_flops["fp8"] == 1979e12
    assert (device.kind, device.operator_s) == ("cuda", pytest.approx(15e-6))


def test_a_dtype_without_units_is_absent() -> None:
    assert "bf16" not in devices()["V100-SXM2-32GB"].peak_flops
    assert "fp8" not in devices()["A100-SXM4-80GB"].peak_flops


def test_sustained_efficiency_differs_by_generation() -> None:
    known = devices()
    attained = [
        known[name].gemm_efficiency
        for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB")
    ]
    assert attained == [0.7, 0.64, 0.5]


def test_every_number_says_where_it_is_from() -> None:
    assert all("Efficiency: " in device.source for device in devices().values())
    assert all(link.source for link in fabrics().values())


def test_efficiencies_are_shares() -> None:
    for device in devices().values():
        assert 0 < device.gemm_efficiency <= 1
        assert 0 < device.memory_efficiency <= 1


@pytest.mark.parametrize(
    ("name", "devices_per_node", "gigabytes_per_s"),
    [
        ("A100-SXM4-80GB", 8, 25),
        ("H100-SXM5-80GB", 8, 50),
        ("B200-SXM-180GB", 8, 50),
        ("B300-SXM-288GB", 8, 100),
        ("V100-SXM2-32GB", 8, 6.25),
        ("V100-SXM2-32GB", 4, 12.5),
        ("H100-SXM5-80GB", 4, 50),
    ],
)
def test_a_device_has_its_share_of_the_nodes_ports(
    name: str, devices_per_node: int, gigabytes_per_s: float
) -> None:
    network = entries()[name].network(devices_per_node)
    assert network.bytes_per_s == gigabytes_per_s * 1e9
    assert network.source.startswith(f"default of {name}")


def uneven() -> Cluster:
    """One node of two devices, then two nodes of three."""
    known = entries()
    first, second = known["A100-SXM4-80GB"], known["V100-SXM2-32GB"]
    return Cluster(
        name="mixed",
        groups=(
            NodeGroup(nodes=1, devices_per_node=2, device=first.device, link=first.link),
            NodeGroup(nodes=2, devices_per_node=3, device=second.device, link=second.link),
        ),
        network=second.nic,
    )


@pytest.mark.parametrize(
    ("ranks", "link"),
    [
        ((0, 1), "NVLink3"),
        ((2, 3, 4), "NVLink2"),
        ((5, 7), "NVLink2"),
        ((1, 2), "InfiniBand-EDR"),
        ((4, 5), "InfiniBand-EDR"),
        ((), "NVLink3"),
    ],
)
def test_ranks_of_a_mixed_cluster_meet_over_the_slowest_link(
    ranks: tuple[int, ...], link: str
) -> None:
    assert uneven().link(ranks).name == link


def test_a_rank_outside_the_cluster_is_an_error() -> None:
    with pytest.raises(IndexError, match="8 devices"):
        uneven().link((0, 8))
