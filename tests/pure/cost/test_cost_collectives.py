"""Collectives: ring-optimal bytes, latency and bandwidth by where the ranks are."""

from __future__ import annotations

import pytest
from cost_samples import cluster

from triptych.cost.kernels.collectives import all_reduce_bytes, gather_bytes, group


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send(size: int) -> None:
    assert all_reduce_bytes(size, 1000.0) == pytest.approx(2 * gather_bytes(size, 1000.0))
    assert all_reduce_bytes(size, 1000.0) == pytest.approx(2 * (size - 1) / size * 1000)


def test_a_group_of_one_takes_no_time() -> None:
    alone = group(cluster(8), 1, 1)
    for call in (alone.all_reduce_s, alone.gather_s, alone.all_to_all_s, alone.send_s):
        assert call(1e9) == 0.0


def test_a_large_message_runs_at_the_attained_rate_of_the_link() -> None:
    ranks = group(cluster(8, link_bytes_per_s=300e9), 8, 1)
    size_bytes = 1e12
    expected_s = all_reduce_bytes(8, size_bytes) / (0.8 * 300e9)
    assert ranks.all_reduce_s(size_bytes) == pytest.approx(expected_s, rel=1e-3)


def test_a_small_all_reduce_on_a_cpu_costs_the_ring_s_steps_of_latency() -> None:
    ranks = group(cluster(4, kind="cpu", latency_s=3e-4), 4, 1)
    assert ranks.all_reduce_s(8.0) == pytest.approx(2 * 3 * 3e-4, rel=1e-3)


def test_links_that_were_measured_and_those_of_cpus_are_taken_as_attained() -> None:
    ranks = group(cluster(2, kind="cpu", link_bytes_per_s=1e9), 2, 1)
    assert ranks.bytes_per_s == 1e9


def test_tensor_ranks_stay_in_a_node_and_data_ranks_cross() -> None:
    where = cluster(8, nodes=4)
    assert group(where, 8, 1).nodes == 1
    data = group(where, 4, 8)
    assert (data.nodes, data.per_node) == (4, 1)


def test_members_of_one_node_share_the_work_of_a_collective_between_nodes() -> None:
    where = cluster(8, nodes=2, network_bytes_per_s=25e9)
    alone, together = group(where, 2, 8), group(where, 16, 1)
    assert together.bytes_per_s == pytest.approx(8 * alone.bytes_per_s)
    assert together.alone_bytes_per_s == alone.alone_bytes_per_s


def test_a_group_that_does_not_line_up_with_the_nodes_crosses_them() -> None:
    assert group(cluster(8, nodes=3), 6, 1).nodes > 1


def test_a_single_node_holds_every_group() -> None:
    assert group(cluster(6), 2, 4).nodes == 1


@pytest.mark.parametrize("size_bytes", [1e3, 1e6, 1e9])
def test_more_bandwidth_is_never_slower(size_bytes: float) -> None:
    slow = group(cluster(8, nodes=2, network_bytes_per_s=10e9), 16, 1)
    fast = group(cluster(8, nodes=2, network_bytes_per_s=40e9), 16, 1)
    assert fast.all_reduce_s(size_bytes) <= slow.all_reduce_s(size_bytes)
    assert fast.gather_s(size_bytes) <= slow.gather_s(size_bytes)
    assert fast.all_to_all_s(size_bytes) <= slow.all_to_all_s(size_bytes)
