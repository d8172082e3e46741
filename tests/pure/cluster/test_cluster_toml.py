"""Cluster files: written and read back, and every fault of a file at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.cluster.catalogue import devices, entries, fabrics
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import parse_toml, write_cluster
from triptych.errors import ClusterError

SHORT = """
version = 1
name = "mine"
network = "InfiniBand-NDR"

[[groups]]
nodes = 4
devices_per_node = 8
device = "H100-SXM"
"""

FULL = """
name = "mine"
[network]
name = "slow"
latency_s = 1e-5
bytes_per_s = 1_000_000_000

[[groups]]
nodes = 1
devices_per_node = 2
[groups.link]
base = "NVLink4"
bytes_per_s = 4e11
[groups.device]
base = "H100"
name = "H100 at 500 W"
gemm_efficiency = 0.6
[groups.device.peak_flops]
bf16 = 8e14
"""


def faults(text: str) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        parse_toml(text, "c.toml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("text", ["8x8xH100", "1x2xcpu", "1x8xA100-80+1x8xV100-32", "36x4xGB200"])
def test_a_written_cluster_is_read_back_unchanged(text: str) -> None:
    cluster = parse_cluster(text)
    assert parse_toml(write_cluster(cluster), "c.toml") == cluster


def test_every_device_survives_the_file() -> None:
    for entry in entries().values():
        cluster = parse_cluster(f"1x1x{entry.device.name}")
        assert parse_toml(write_cluster(cluster), "c.toml") == cluster


def test_awkward_characters_survive_the_file() -> None:
    cluster = parse_cluster("1x2xcpu")
    awkward = replace(cluster, name='a "b" \\ \n\t\x7f \u00e9 \U0001f600', notes=("", "x = 1 # y"))
    assert parse_toml(write_cluster(awkward), "c.toml") == awkward


def test_names_of_the_catalogue_stand_for_tables() -> None:
    cluster = parse_toml(SHORT, "c.toml")
    (group,) = cluster.groups
    assert cluster.network == fabrics()["InfiniBand-NDR"]
    assert group.device == devices()["H100-SXM5-80GB"]
    assert group.link == fabrics()["NVLink4"]
    assert (cluster.name, cluster.num_devices) == ("mine", 32)


def test_a_table_with_a_base_changes_what_it_states() -> None:
    (group,) = parse_toml(FULL, "c.toml").groups
    base = devices()["H100-SXM5-80GB"]
    expected = replace(
        base,
        name="H100 at 500 W",
        gemm_efficiency=0.6,
        peak_flops={**base.peak_flops, "bf16": 8e14},
    )
    assert group.device == expected
    assert group.link == replace(fabrics()["NVLink4"], bytes_per_s=4e11)


def test_the_name_is_that_of_the_file_by_default() -> None:
    assert parse_toml(SHORT.replace('name = "mine"\n', ""), "a/lab.toml").name == "lab"


def test_unknown_keys_name_the_nearest_valid_one() -> None:
    text = FULL.replace("gemm_efficiency", "gem_eficiency").replace("nodes = 1", "node = 1", 1)
    found = faults(text.replace("latency_s", "latency"))
    assert any("'gem_eficiency' in [device] of [[groups]] 1" in one for one in found)
    assert any("works: gemm_efficiency" in one for one in found)
    assert any("'node' in [[groups]] 1 of c.toml" in one and "works: nodes" in one for one in found)
    assert any("'latency' in [network]" in one and "works: latency_s" in one for one in found)


def test_missing_keys_and_wrong_values_come_together() -> None:
    text = """
    version = 2
    notes = "none"
    network = {}
    [[groups]]
    nodes = 0
    devices_per_node = 2.0
    link = 3
    [groups.device]
    name = "x"
    memory_bytes = -1
    memory_bytes_per_s = true
    gemm_efficiency = 1.5
    peak_flops = {}
    """
    found = "\n".join(faults(text))
    for word in (
        "version = 2",
        "notes = 'none'",
        "name is missing in [network]",
        "latency_s is missing in [network]",
        "bytes_per_s is missing in [network]",
        "nodes = 0",
        "devices_per_node = 2.0",
        "link = 3",
        "kind is missing in [device]",
        "memory_bytes = -1",
        "memory_bytes_per_s = True",
        "gemm_efficiency = 1.5",
        "peak_flops = {}",
    ):
        assert word in found


def test_a_file_without_groups_and_network_lacks_both() -> None:
    found = "\n".join(faults('name = "mine"'))
    assert "network is missing" in found
    assert "at least one table [[groups]]" in found


def test_a_missing_device_is_reported_once() -> None:
    found = faults(SHORT.replace('device = "H100-SXM"', "") + 'link = "NVLink4"')
    assert [one for one in found if "device is missing" in one] == found


@pytest.mark.parametrize(
    ("old", "new", "near"),
    [("InfiniBand-NDR", "infiniband-ndrr", "InfiniBand-NDR"), ("H100-SXM", "H1000", "H100")],
)
def test_an_unknown_name_lists_near_ones(old: str, new: str, near: str) -> None:
    (found,) = faults(SHORT.replace(old, new))
    assert new in found
    assert near in found


def test_text_that_is_no_toml_says_where() -> None:
    (found,) = faults("name = \n")
    assert "line 1" in found


def test_a_duplicate_key_is_refused() -> None:
    (found,) = faults('name = "a"\nname = "b"')
    assert "is not TOML" in found
