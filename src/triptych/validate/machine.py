"""The cluster of a row: a device of the catalogue, its nodes, and the network as stated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache

from triptych.cluster.catalogue import Entry, entries
from triptych.cluster.cluster import Cluster, Link, NodeGroup
from triptych.cluster.names import matches
from triptych.cluster.toml import read_cluster
from triptych.validate.table import Row, Skip

OMNI_PATH_BYTES_PER_S = 12.5e9
"""One port of Omni-Path 100."""

_MEANT = {"GH200 120GB": "GH200-96GB"}
"""Names that state another memory than the device's: 120 GB are the host's half of that board."""

_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*Gb/s", re.IGNORECASE)
_PORTS = re.compile(r"(\d+)\s*x\s*omni-path", re.IGNORECASE)


def cluster_of(row: Row) -> Cluster:
    """The cluster of a row, whose GPU may be a cluster file.

    Raises Skip for a device that is not in the catalogue.
    """
    count = row.count("n_gpus")
    if not count:
        raise Skip("number of GPUs not stated")
    if row.text("gpu").endswith(".toml"):
        return _of_file(row.text("gpu"), count)
    entry = _entry(row.text("gpu"))
    per_node = row.count("gpus_per_node") or entry.devices_per_node
    per_node = max(size for size in range(1, min(per_node, count) + 1) if count % size == 0)
    group = NodeGroup(
        nodes=count // per_node, devices_per_node=per_node, device=entry.device, link=entry.link
    )
    network = _network(row.text("inter_node_link"), entry, per_node)
    return Cluster(name=f"{count}x{entry.device.name}", groups=(group,), network=network)


def _of_file(path: str, count: int) -> Cluster:
    """The cluster of a file, which must have so many devices."""
    cluster = _read(path)
    if cluster.num_devices != count:
        raise Skip("cluster file and number of GPUs disagree")
    return cluster


@cache
def _read(path: str) -> Cluster:
    return read_cluster(path)


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Entry]:
    return entries()


@cache
def _entry(name: str) -> Entry:
    """The device that a row names; of several memory sizes the largest."""
    known = _catalogue()
    fitting = matches(_MEANT.get(name, re.sub(r"\(.*?\)", "", name).strip()), known)
    if not fitting:
        raise Skip("GPU not in the catalogue")
    return max((known[one] for one in fitting), key=lambda entry: entry.memory_gib)


def _network(text: str, entry: Entry, per_node: int) -> Link:
    """A device's share of what joins the nodes; the usual ports if the row does not say."""
    usual = entry.network(per_node)
    rate = _RATE.search(text)
    if ports := _PORTS.search(text):
        per_device = int(ports.group(1)) * OMNI_PATH_BYTES_PER_S / per_node
    elif "omni-path" in text.lower():
        per_device = OMNI_PATH_BYTES_PER_S
    elif rate:
        node = int(rate.group(1) or 1) * float(rate.group(2)) * 1e9 / 8.0
        per_device = node if "per gpu" in text.lower() else node / per_node
    else:
        return usual
    return replace(usual, name=text, bytes_per_s=per_device, source="as the row states")
