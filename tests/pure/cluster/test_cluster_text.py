"""What a user may type for a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import write_cluster
from triptych.errors import ClusterError


def shape(text: str) -> list[tuple[int, int, str]]:
    groups = parse_cluster(text).groups
    return [(group.nodes, group.devices_per_node, group.device.name) for group in groups]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("8x8xH100-SXM", [(8, 8, "H100-SXM5-80GB")]),
        ("64xH100", [(8, 8, "H100-SXM5-80GB")]),
        ("4xH100", [(1, 4, "H100-SXM5-80GB")]),
        ("1xH100", [(1, 1, "H100-SXM5-80GB")]),
        ("16xA100-40", [(2, 8, "A100-SXM4-40GB")]),
        ("1x2xcpu", [(1, 2, "cpu")]),
        ("4xcpu", [(1, 4, "cpu")]),
        ("4xRTX 4090", [(1, 4, "RTX-4090")]),
        ("4x4090", [(1, 4, "RTX-4090")]),
        ("2X4Xh100", [(2, 4, "H100-SXM5-80GB")]),
        (" 2 x 4 x H100 ", [(2, 4, "H100-SXM5-80GB")]),
        ("8xGH200-96", [(8, 1, "GH200-96GB")]),
        ("64xGB200", [(1, 64, "GB200-186GB")]),
        ("144xGB200", [(2, 72, "GB200-186GB")]),
        (
            "1x8xA100-80+1x8xV100-32",
            [(1, 8, "A100-SXM4-80GB"), (1, 8, "V100-SXM2-32GB")],
        ),
    ],
)
def test_a_text_means_groups_of_nodes(text: str, groups: list[tuple[int, int, str]]) -> None:
    assert shape(text) == groups


@pytest.mark.parametrize("text", ["64xH100", "1x2xcpu", "1x8xA100-80+2x4xV100-32", "144xGB200"])
def test_the_name_is_the_full_form_and_parses_to_the_same_cluster(text: str) -> None:
    cluster = parse_cluster(text)
    assert parse_cluster(cluster.name) == cluster


@pytest.mark.parametrize(
    ("text", "name", "gigabytes_per_s"),
    [
        ("2x8xA100-80", "InfiniBand-HDR", 25),
        ("2x8xH100", "InfiniBand-NDR", 50),
        ("2x8xV100-16", "InfiniBand-EDR", 6.25),
        ("1x8xA100-80+1x8xV100-32", "InfiniBand-EDR", 6.25),
        ("16x4xGB200", "NVLink5", 900),
        ("36x4xGB200", "InfiniBand-NDR", 50),
    ],
)
def test_the_network_is_the_usual_one_of_the_generation(
    text: str, name: str, gigabytes_per_s: float
) -> None:
    network = parse_cluster(text).network
    assert (network.name, network.bytes_per_s) == (name, gigabytes_per_s * 1e9)
    assert network.source


def test_a_count_between_whole_nodes_names_what_works() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster("12xH100")
    (problem,) = caught.value.problems
    for choice in ("8xH100-SXM5-80GB", "16xH100-SXM5-80GB", "2x6xH100-SXM5-80GB"):
        assert choice in problem.works
        parse_cluster(choice)


def test_what_is_unusual_is_noted() -> None:
    assert "larger than the usual 8" in parse_cluster("1x16xH100").notes[0]
    assert "slowest network" in parse_cluster("1x8xA100-80+1x8xV100-32").notes[0]
    assert "NVLink joins 72" in parse_cluster("36x4xGB200").notes[0]
    assert parse_cluster("8x8xH100").notes == ()


def test_a_device_without_a_count_is_told_how_to_say_it() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster("h100")
    assert "1xH100-SXM5-80GB" in caught.value.problems[0].works


@pytest.mark.parametrize("text", ["", "x8", "8x", "foo", "0xH100", "8x0xH100", "9999999xH100", "+"])
def test_nonsense_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert "8x8xH100-SXM" in caught.value.problems[0].works


def test_every_wrong_group_is_reported() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster("1x8xA100+1x8xB999+12xH100")
    assert [problem.what for problem in caught.value.problems] == [
        "device 'A100' is ambiguous",
        "unknown device 'B999'",
        "12xH100-SXM5-80GB: 12 devices do not fill nodes of 8",
    ]


@pytest.mark.parametrize("text", ["local+1x8xH100", "2x4xlocal"])
def test_local_is_one_node_by_itself(text: str) -> None:
    with pytest.raises(ClusterError, match="local is one node"):
        parse_cluster(text)


def test_a_path_is_read_as_a_cluster_file(tmp_path: Path) -> None:
    cluster = parse_cluster("2x8xH100")
    path = tmp_path / "mine.toml"
    path.write_text(write_cluster(cluster))
    assert parse_cluster(str(path)) == cluster


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        parse_cluster(str(tmp_path / "none.toml"))
