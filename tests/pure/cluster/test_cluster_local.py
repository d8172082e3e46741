"""The machine at hand: measured once, kept, shared by ranks, or replaced by its GPUs."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.cluster import local_cpu
from triptych.cluster.catalogue import devices, entries
from triptych.cluster.cluster import Cluster
from triptych.cluster.local import cache_file, fingerprint, local_cluster, this_machine
from triptych.cluster.local_cpu import Machine, ProbeError, for_ranks
from triptych.cluster.local_gpu import gpu_cluster, identify
from triptych.cluster.machine import Gpu
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import parse_toml, read_cluster, write_cluster
from triptych.errors import ClusterError
from triptych.units import GIB

MACHINE = Machine(cpu="a cpu", flags=frozenset({"avx2"}), cores=4, memory_bytes=16.0 * GIB)


FIGURES = {
    "fp32_flops": 100e9,
    "small_fp32_flops": 80e9,
    "fp64_flops": 50e9,
    "copy_bytes_per_s": 10e9,
    "read_bytes_per_s": 8e9,
    "latency_s": 5e-6,
    "duplex_bytes_per_s": 2e9,
    "numpy": "2.0",
}


def nominal() -> Cluster:
    """A measured machine of four cores."""
    entry = entries()["cpu"]
    group = local_cpu.NodeGroup(nodes=1, devices_per_node=4, device=entry.device, link=entry.link)
    return Cluster(name="local", groups=(group,), network=group.link)


@pytest.fixture(autouse=True)
def quick_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that answer at once; the real one is measured in tests/procs/cluster."""
    script = tmp_path / "quick_probe.py"
    script.write_text(f"print({json.dumps(FIGURES)!r})\n")
    monkeypatch.setattr(local_cpu, "PROBE", script)


@pytest.fixture
def measured(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache holds a measurement of this machine."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "measured"), "PATH": os.defpath}
    local_cluster(environ=environ)
    return environ


def cached(environ: dict[str, str]) -> Path:
    path = cache_file(environ)
    assert path is not None
    return path


def test_this_machine_is_one_node_with_a_rank_a_core(measured: dict[str, str]) -> None:
    cluster = local_cluster(environ=measured)
    machine = this_machine()
    assert (cluster.name, cluster.num_devices) == ("local", machine.cores)
    assert cluster.device.kind == "cpu"
    assert cluster.device.memory_bytes == machine.memory_bytes / machine.cores


def test_figures_of_the_probes_become_rates(measured: dict[str, str]) -> None:
    cluster = local_cluster(environ=measured)
    assert cluster.device.peak_flops["fp32"] == 100e9
    assert cluster.device.gemm_efficiency == 0.8
    assert cluster.device.memory_bytes_per_s == 10e9
    assert cluster.network.bytes_per_s == 2e9 * local_cpu.GLOO_SHARE
    assert cluster.network.latency_s == 5e-6 * local_cpu.GLOO_HOPS
    assert cluster.network.source.startswith("measured")


def test_the_cache_is_a_cluster_file_that_says_where_it_is_from(measured: dict[str, str]) -> None:
    notes = read_cluster(cached(measured)).notes
    assert [note.split(":")[0] for note in notes] == [
        "date",
        "cpu",
        "cores",
        "numpy",
        "fingerprint",
    ]


def with_cache(tmp_path: Path, measured: dict[str, str], old: str, new: str) -> dict[str, str]:
    """A copy of the measured cache with one text replaced."""
    environ = {**measured, "XDG_CACHE_HOME": str(tmp_path)}
    path = cached(environ)
    path.parent.mkdir(parents=True)
    text = cached(measured).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return environ


def test_a_second_call_reads_the_cache(tmp_path: Path, measured: dict[str, str]) -> None:
    environ = with_cache(tmp_path, measured, 'name = "local-cpu"', 'name = "from the cache"')
    assert local_cluster(environ=environ).device.name == "from the cache"


def test_another_machine_is_measured_again(tmp_path: Path, measured: dict[str, str]) -> None:
    environ = with_cache(tmp_path, measured, "fingerprint: ", "fingerprint: x")
    local_cluster(environ=environ)
    assert "fingerprint: x" not in cached(environ).read_text()


def test_a_damaged_cache_is_measured_again_and_said(
    tmp_path: Path, measured: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environ = with_cache(tmp_path, measured, "latency_s", "latency")
    with caplog.at_level(logging.WARNING):
        cluster = local_cluster(environ=environ)
    assert "is damaged, measuring again" in caplog.text
    assert read_cluster(cached(environ)).network == cluster.network


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("")  # a file where the folder should be: fails for root too
    cluster = local_cluster(environ={"XDG_CACHE_HOME": str(obstacle), "PATH": os.defpath})
    assert cluster.device.name == "local-cpu"


def test_a_read_only_home_is_left_alone(tmp_path: Path, measured: dict[str, str]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        environ = {"HOME": str(home), "PATH": measured["PATH"]}
        assert local_cluster(environ=environ).num_devices == this_machine().cores
    finally:
        home.chmod(stat.S_IRWXU)


def test_the_cache_follows_the_xdg_rules() -> None:
    assert cache_file({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/triptych/local.toml")
    assert cache_file({"HOME": "/h"}) == Path("/h/.cache/triptych/local.toml")
    assert cache_file({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == Path(
        "/h/.cache/triptych/local.toml"
    )
    assert cache_file({}) is None


def test_the_fingerprint_changes_with_the_machine() -> None:
    others = [
        replace(MACHINE, cpu="another"),
        replace(MACHINE, cores=2),
        replace(MACHINE, flags=frozenset()),
        replace(MACHINE, memory_bytes=8.0 * GIB),
    ]
    assert len({fingerprint(machine) for machine in [MACHINE, *others]}) == 5
    assert fingerprint(replace(MACHINE, memory_bytes=16.0 * GIB + 1)) == fingerprint(MACHINE)


def test_ranks_up_to_the_cores_have_one_each() -> None:
    base = nominal()
    two = for_ranks(base, MACHINE, 2)
    assert two.device.peak_flops == base.device.peak_flops
    assert two.device.memory_bytes == 8 * GIB
    assert (two.name, two.num_devices) == ("2xlocal", 2)


def test_more_ranks_than_cores_share_the_cores() -> None:
    base, eight = nominal(), for_ranks(nominal(), MACHINE, 8)
    assert eight.device.peak_flops["fp32"] * 8 == base.device.peak_flops["fp32"] * 4
    assert eight.device.memory_bytes * 8 == MACHINE.memory_bytes
    assert eight.network.bytes_per_s == base.network.bytes_per_s / 2
    assert eight.network.latency_s == base.network.latency_s * 2
    assert "8 ranks share 4 cores" in eight.notes


@pytest.mark.parametrize("text", ["3xlocal", "1x3xlocal", " 3 x LOCAL"])
def test_local_with_ranks_parses_to_that_many(
    text: str, measured: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", measured["XDG_CACHE_HOME"])
    monkeypatch.setenv("PATH", measured["PATH"])
    assert parse_cluster(text) == local_cluster(3, measured)


def test_a_cluster_without_ranks_is_refused() -> None:
    with pytest.raises(ClusterError, match="at least one rank"):
        local_cluster(0)


def test_a_probe_that_fails_gives_nominal_rates_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_cpu, "PROBE", tmp_path / "missing.py")
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": os.defpath}
    with caplog.at_level(logging.WARNING):
        cluster = local_cluster(environ=environ)
    assert "could not be measured" in caplog.text
    assert cluster.device.peak_flops == devices()["cpu"].peak_flops
    assert not cached(environ).exists()


def test_the_reason_of_a_failed_probe_is_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import does_not_exist_anywhere\n")
    monkeypatch.setattr(local_cpu, "PROBE", script)
    with pytest.raises(ProbeError, match="does_not_exist_anywhere"):
        local_cpu.measure(MACHINE, "mark")


def test_bf16_follows_the_instruction_set() -> None:
    rates = [
        local_cpu._bf16_share(frozenset(flags))[0]
        for flags in ({"amx_bf16", "avx512_bf16"}, {"avx512_bf16"}, {"avx2"})
    ]
    assert rates == sorted(rates, reverse=True)


def gpus(count: int, name: str, memory_mib: int) -> list[Gpu]:
    return [
        Gpu(index=i, uuid=f"GPU-{i}", name=name, memory_bytes=memory_mib * 2.0**20)
        for i in range(count)
    ]


def test_gpus_take_rates_from_the_catalogue_and_memory_from_the_driver() -> None:
    cluster = gpu_cluster(gpus(8, "NVIDIA H200", 143771), None)
    (group,) = cluster.groups
    assert (group.nodes, group.devices_per_node, group.link.name) == (1, 8, "NVLink4")
    assert group.device.peak_flops == devices()["H200-SXM-141GB"].peak_flops
    assert group.device.memory_bytes == 143771 * 2**20
    assert (cluster.name, cluster.notes) == ("local", ())


@pytest.mark.parametrize(
    ("name", "memory_mib", "meant"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM", 81920, "A100-SXM4-80GB"),
        ("NVIDIA GH200", 97871, "GH200-96GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM5-80GB"),
    ],
)
def test_memory_decides_where_the_name_leaves_a_choice(
    name: str, memory_mib: int, meant: str
) -> None:
    entry = identify(gpus(1, name, memory_mib)[0], entries())
    assert entry is not None
    assert entry.device.name == meant


def test_an_unknown_gpu_is_used_with_guessed_rates_and_a_note() -> None:
    cluster = gpu_cluster(gpus(2, "NVIDIA T4", 15360), None)
    assert (cluster.device.name, cluster.device.kind) == ("NVIDIA T4", "cuda")
    assert "not in the catalogue" in cluster.notes[0]
    assert len(cluster.notes) == 1


def test_different_gpus_of_one_machine_are_groups() -> None:
    mixed = gpus(2, "NVIDIA H200", 143771) + gpus(1, "NVIDIA L4", 23034)
    cluster = gpu_cluster(mixed, None)
    assert [group.devices_per_node for group in cluster.groups] == [2, 1]
    assert cluster.network.name == "PCIe4"


def test_ranks_choose_the_first_gpus_and_cannot_be_more() -> None:
    four = gpus(4, "NVIDIA H200", 143771)
    assert gpu_cluster(four, 2).num_devices == 2
    with pytest.raises(ClusterError) as caught:
        gpu_cluster(four, 5)
    assert "up to 4 ranks" in caught.value.problems[0].works


def test_a_gpu_cluster_survives_the_file() -> None:
    cluster = gpu_cluster(gpus(8, "NVIDIA H200", 143771), None)
    assert parse_toml(write_cluster(cluster), "c.toml") == cluster
