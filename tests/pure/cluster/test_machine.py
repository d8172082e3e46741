"""Cores, memory and GPUs of a machine, from files and listings as the system writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.cluster.machine import (
    cpu_flags,
    cpu_name,
    list_gpus,
    memory_bytes,
    parse_gpus,
    usable_cores,
    visible,
)

LISTING = """0, GPU-aaa, NVIDIA H200, 143771
1, GPU-bbb, NVIDIA H200, 143771
[Not Supported], GPU-x, broken, [N/A]
2, GPU-ccc, NVIDIA A100 80GB PCIe, 81920
"""
AFFINITY = len(os.sched_getaffinity(0))


def write(root: Path, **files: str) -> Path:
    """Writes files below a root; `__` in a name stands for `/` and `_DOT_` for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == AFFINITY


@pytest.mark.parametrize("quota", ["max 100000", "100000000 100000"])
def test_a_wide_quota_changes_nothing(tmp_path: Path, quota: str) -> None:
    assert usable_cores(write(tmp_path, sys__fs__cgroup__cpu_DOT_max=quota)) == AFFINITY


@pytest.mark.parametrize("quota", ["150000 100000", "50000 100000"])
def test_a_part_of_a_core_is_not_a_core(tmp_path: Path, quota: str) -> None:
    assert usable_cores(write(tmp_path, sys__fs__cgroup__cpu_DOT_max=quota)) == 1


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__outer__cpu_DOT_max="100000 100000",
        sys__fs__cgroup__outer__inner__cpu_DOT_max="max 100000",
    )
    assert usable_cores(tmp_path) == 1


def test_version_1_quotas_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="4:cpu,cpuacct:/box\n",
        sys__fs__cgroup__cpu__box__cpu_DOT_cfs_quota_us="100000",
        sys__fs__cgroup__cpu__box__cpu_DOT_cfs_period_us="100000",
    )
    assert usable_cores(tmp_path) == 1


def test_memory_is_cut_to_the_limit_of_the_control_group(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal:       1048576 kB\nMemFree: 1 kB\n")
    assert memory_bytes(tmp_path) == 2**30
    write(tmp_path, sys__fs__cgroup__memory_DOT_max="max\n")
    assert memory_bytes(tmp_path) == 2**30
    write(tmp_path, sys__fs__cgroup__memory_DOT_max="536870912\n")
    assert memory_bytes(tmp_path) == 2**29


def test_the_processor_is_named_as_the_kernel_does(tmp_path: Path) -> None:
    write(
        tmp_path, proc__cpuinfo="processor : 0\nmodel name : Fast CPU @ 3 GHz\nflags : avx2 amx\n"
    )
    assert cpu_name(tmp_path) == "Fast CPU @ 3 GHz"
    assert cpu_flags(tmp_path) == {"avx2", "amx"}


def test_a_listing_gives_gpus_and_skips_what_it_cannot_read() -> None:
    gpus = parse_gpus(LISTING)
    assert [(gpu.index, gpu.name) for gpu in gpus] == [
        (0, "NVIDIA H200"),
        (1, "NVIDIA H200"),
        (2, "NVIDIA A100 80GB PCIe"),
    ]
    assert gpus[0].memory_bytes == 143771 * 2**20


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bbb", [1]),
        ("0,7,1", [0]),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_selects_and_orders(selection: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(parse_gpus(LISTING), selection)] == indices


def test_without_the_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert list_gpus({"PATH": str(tmp_path)}) == []


def test_gpus_are_those_that_the_drivers_tool_lists(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{LISTING.splitlines()[0]}'\n")
    tool.chmod(0o755)
    (gpu,) = list_gpus({"PATH": f"{tmp_path}:{os.defpath}"})
    assert gpu.name == "NVIDIA H200"


def test_a_driver_that_fails_means_no_gpus(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'cannot talk to the driver'\nexit 9\n")
    tool.chmod(0o755)
    assert list_gpus({"PATH": str(tmp_path)}) == []
