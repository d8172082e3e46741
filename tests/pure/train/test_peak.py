"""User case PUB-110: utilisation is measured against a peak that is known, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.train.peak import Peak, peak_of

GPU = parse_cluster("1x4xH100-SXM")
CPU = parse_cluster("1x2xcpu")


def unknown(cluster: Cluster) -> Cluster:
    """As a machine whose GPU is not in the catalogue."""
    return replace(cluster, notes=("X9 is not in the catalogue: its rates are taken to be ...",))


def test_a_known_gpu_has_the_dense_peak_of_the_dtype_times_the_ranks() -> None:
    peak = peak_of(GPU, 4, "bf16", None)
    assert peak.flops_per_s == pytest.approx(4 * 989e12, rel=0.01)
    assert "H100" in peak.source and "bf16" in peak.source and "4 ranks" in peak.source
    fp32 = peak_of(GPU, 4, "fp32", None).flops_per_s
    assert fp32 is not None and peak.flops_per_s is not None and fp32 < peak.flops_per_s


@pytest.mark.parametrize(
    ("cluster", "dtype"), [(unknown(GPU), "bf16"), (CPU, "bf16"), (GPU, "fp7")], ids=str
)
def test_what_is_not_known_is_unknown_and_says_what_would_state_it(
    cluster: Cluster, dtype: str
) -> None:
    peak = peak_of(cluster, 2, dtype, None)
    assert peak.flops_per_s is None
    assert "unknown" in peak.text and "peak_tflops" in peak.text


@pytest.mark.parametrize("cluster", [GPU, unknown(GPU), CPU], ids=str)
def test_a_users_figure_comes_first(cluster: Cluster) -> None:
    peak = peak_of(cluster, 2, "bf16", 250.0)
    assert peak.flops_per_s == 500e12 and "peak_tflops = 250" in peak.source
    assert Peak.from_json(peak.to_json()) == peak
