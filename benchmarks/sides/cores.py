"""Ranks that have a part of a core each, by the kernel's bandwidth control.

Needs root and a writable cgroup tree, of version 1 (`cpu.cfs_quota_us`) or 2 (`cpu.max`). Groups
are gone afterwards, also after a failure.

    |#####-----|#####-----|   a share of 0.5: half of every period, then nothing until the next
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "triptych-rank-"
PERIOD_US = 10_000
"""Short beside a layer of a benchmark's models, so that a rank is slower and does not stutter."""


@contextmanager
def shares_of_cores(shares: Sequence[float]) -> Iterator[Callable[[int], None]]:
    """A function with which each rank enters its share of a core; 1.0 is a whole one."""
    tree = ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT
    groups = [tree / f"{PREFIX}{rank}" for rank in range(len(shares))]

    def enter(rank: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        (groups[rank] / "cgroup.procs").write_text(str(os.getpid()))
        os.sched_setaffinity(0, {cores[rank * len(cores) // len(shares)]})

    try:
        for group, share in zip(groups, shares, strict=True):
            group.mkdir(exist_ok=True)
            _limit(group, share)
        yield enter
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


def _limit(group: Path, share: float) -> None:
    quota_us = round(share * PERIOD_US)
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
