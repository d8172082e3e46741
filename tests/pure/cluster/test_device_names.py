"""Spellings of devices."""

from __future__ import annotations

import pytest

from triptych.cluster.catalogue import entries
from triptych.cluster.names import find_device, matches, take_apart
from triptych.errors import ClusterError

KNOWN = entries()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "H100-SXM5-80GB"),
        ("H100-SXM", "H100-SXM5-80GB"),
        ("H100 SXM5", "H100-SXM5-80GB"),
        ("h100sxm5", "H100-SXM5-80GB"),
        ("H100-80GB-SXM", "H100-SXM5-80GB"),
        ("h100_sxm", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("H100-PCIE", "H100-PCIe-80GB"),
        ("H100 NVL", "H100-NVL-94GB"),
        ("A100-80GB", "A100-SXM4-80GB"),
        ("a100 80g", "A100-SXM4-80GB"),
        ("A100-40", "A100-SXM4-40GB"),
        ("A100-80GB-PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("V100-32", "V100-SXM2-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("V100-32GB-SXM3", "V100-SXM2-32GB"),
        ("RTX4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("a6000", "RTX-A6000"),
        ("L4", "L4"),
        ("L40s", "L40S"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM-288GB"),
        ("GB200 NVL72", "GB200-186GB"),
        ("GH200 144GB", "GH200-144GB-HBM3e"),
        ("NVIDIA GH200 Grace Hopper Superchip 96GB", "GH200-96GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("CPU", "cpu"),
    ],
)
def test_a_spelling_means_a_device(said: str, meant: str) -> None:
    assert find_device(said, KNOWN).device.name == meant


@pytest.mark.parametrize("name", KNOWN)
def test_every_catalogue_name_means_itself(name: str) -> None:
    assert matches(name, KNOWN) == [name]
    assert matches(name.lower(), KNOWN) == [name]


def test_no_two_devices_say_the_same() -> None:
    assert len({take_apart(name) for name in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize(
    ("said", "choices"),
    [
        ("A100", "A100-SXM4-40GB, A100-SXM4-80GB"),
        ("v100 pcie", "V100-PCIE-16GB, V100-PCIE-32GB"),
        ("GH200", "GH200-96GB, GH200-144GB-HBM3e"),
    ],
)
def test_an_ambiguous_name_lists_the_choices(said: str, choices: str) -> None:
    with pytest.raises(ClusterError) as caught:
        find_device(said, KNOWN)
    assert "ambiguous" in caught.value.problems[0].what
    assert caught.value.problems[0].works == choices


@pytest.mark.parametrize(
    ("said", "near"),
    [("H1000", "H100-SXM5-80GB"), ("A100-60GB", "A100-SXM4-80GB"), ("H200 NVL", "H200-SXM-141GB")],
)
def test_an_unknown_name_lists_near_ones(said: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        find_device(said, KNOWN)
    assert near in caught.value.problems[0].works


@pytest.mark.parametrize("said", ["A10G", "RTX 4090 Laptop GPU", "RTX 6000 Ada", "H1", ""])
def test_another_product_is_not_taken_for_a_known_one(said: str) -> None:
    assert matches(said, KNOWN) == []
