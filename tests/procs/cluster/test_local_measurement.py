"""The real probes, in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triptych.cluster import local
from triptych.cluster.local import local_cluster
from triptych.cluster.text import parse_cluster


def test_measured_figures_are_of_the_right_order_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": os.defpath}
    cluster = local_cluster(environ=environ)
    assert 1e9 < cluster.device.peak_flops["fp64"] < cluster.device.peak_flops["fp32"] < 1e13
    assert 1e8 < cluster.device.memory_bytes_per_s < 1e12
    assert 1e7 < cluster.network.bytes_per_s < 1e11
    assert 1e-7 < cluster.network.latency_s < 1e-2
    monkeypatch.delattr(local, "measure")  # what is kept is not measured again
    assert local_cluster(environ=environ) == cluster
    assert parse_cluster(str(tmp_path / "triptych" / "local.toml")) == cluster
