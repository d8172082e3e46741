"""A cluster from what a user types: `8x8xH100-SXM`, `64xH100`, `1x2xcpu`, `local`, a TOML path.

    NODESxDEVICESxDEVICE    stated in full
    DEVICESxDEVICE          whole nodes of the usual size, or one smaller node
    A+B                     a mixed cluster: groups of nodes, each in one of the forms above
    local, RANKSxlocal      this machine
    PATH.toml               a cluster file

Links are the usual ones of the device's generation; `Link.source` says which and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.cluster.catalogue import Entry, entries
from triptych.cluster.cluster import Cluster, Link, NodeGroup
from triptych.cluster.local import local_cluster
from triptych.cluster.names import find_device, matches
from triptych.cluster.toml import read_cluster
from triptych.errors import ClusterError, Problem

MAX_DEVICES = 1_000_000
FORMS = (
    "8x8xH100-SXM (nodes x devices x device), 64xH100 (devices x device), "
    "1x8xA100-80+1x8xV100-32 (mixed), local, 4xlocal, cluster.toml"
)
_RULE = "a cluster is counts and a device, this machine, or a cluster file"
_TIMES = r"\s*[x×*]\s*"
_FULL = re.compile(rf"(\d+){_TIMES}(\d+){_TIMES}(.+)", re.IGNORECASE)
_SHORT = re.compile(rf"(\d+){_TIMES}(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One group as written; `devices_per_node` is None in the short form, where `nodes` counts
    devices.
    """

    nodes: int
    devices_per_node: int | None
    device: str


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes, its name in full form.

    Raises ClusterError that lists what is wrong in every group, with what would work.
    """
    words = text.strip()
    if words.lower().endswith(".toml"):
        return read_cluster(Path(words).expanduser())
    parts = [_read_part(part.strip(), words) for part in words.split("+")]
    if any(part.device.lower() == "local" for part in parts):
        return _local(parts, words)
    known = entries()
    groups: list[NodeGroup] = []
    networks: list[Link] = []
    problems: list[Problem] = []
    for part in parts:
        try:
            entry = find_device(part.device, known)
            group = _group(part, entry)
        except ClusterError as error:
            problems.extend(error.problems)
            continue
        groups.append(group)
        networks.append(_network(group, entry))
    if problems:
        raise ClusterError(problems)
    return _cluster(groups, networks, known)


def _read_part(part: str, whole: str) -> _Part:
    """Takes one group apart by its two forms; `local` alone is one too."""
    if part.lower() == "local":
        return _Part(nodes=0, devices_per_node=None, device="local")
    if full := _FULL.fullmatch(part):
        nodes, per_node, device = full.groups()
        return _counted(_Part(nodes=int(nodes), devices_per_node=int(per_node), device=device))
    if short := _SHORT.fullmatch(part):
        count, device = short.groups()
        return _counted(_Part(nodes=int(count), devices_per_node=None, device=device))
    devices = matches(part, entries())
    if devices:
        works = ", ".join(f"1x{device}, 8x{device}" for device in devices)
        raise ClusterError(Problem(f"{whole!r} does not say how many devices", _RULE, works))
    raise ClusterError(Problem(f"{whole!r} does not describe a cluster", _RULE, FORMS))


def _counted(part: _Part) -> _Part:
    """The part, if its counts are positive and not absurd."""
    per_node = 1 if part.devices_per_node is None else part.devices_per_node
    if 0 < part.nodes * per_node <= MAX_DEVICES:
        return part
    raise ClusterError(
        Problem(
            f"{part.nodes * per_node} devices of {part.device}",
            f"a group has 1 to {MAX_DEVICES} devices",
            FORMS,
        )
    )


def _group(part: _Part, entry: Entry) -> NodeGroup:
    """The nodes of one group."""
    nodes, per_node = part.nodes, part.devices_per_node
    if per_node is None:
        nodes, per_node = _whole_nodes(part.nodes, entry)
    return NodeGroup(nodes=nodes, devices_per_node=per_node, device=entry.device, link=entry.link)


def _whole_nodes(count: int, entry: Entry) -> tuple[int, int]:
    """Nodes and devices per node for a bare count: one node up to the usual size, then whole ones.

    Raises ClusterError for a count in between, with the counts on both sides and a full form.
    """
    usual = entry.devices_per_node
    if count <= usual:
        return 1, count
    if count % usual == 0:
        return count // usual, usual
    below = count - count % usual
    even = max(size for size in range(1, usual + 1) if count % size == 0)
    name = entry.device.name
    raise ClusterError(
        Problem(
            f"{count}x{name}: {count} devices do not fill nodes of {usual}",
            f"a bare count is at most {usual} or a multiple of it",
            f"{below}x{name}, {below + usual}x{name}, or nodes in full: "
            f"{count // even}x{even}x{name}",
        )
    )


def _network(group: NodeGroup, entry: Entry) -> Link:
    """What joins the nodes of a group: the usual ports, or the link itself within one domain."""
    if entry.hosts > 1 and group.num_devices <= entry.devices_per_node:
        source = f"{group.num_devices} devices within one domain of {entry.devices_per_node}"
        return replace(entry.link, source=f"{source}; {entry.link.source}")
    return entry.network(group.devices_per_node)


def _cluster(groups: list[NodeGroup], networks: list[Link], known: Mapping[str, Entry]) -> Cluster:
    """Joins the groups by the slowest of their networks."""
    slowest = min(networks, key=lambda link: link.bytes_per_s)
    notes = [note for group in groups for note in _notes(group, known[group.device.name])]
    if len(groups) > 1:
        notes.append(
            f"mixed cluster: the groups are joined by {slowest.name}, their slowest network"
        )
    name = "+".join(f"{g.nodes}x{g.devices_per_node}x{g.device.name}" for g in groups)
    return Cluster(name=name, groups=tuple(groups), network=slowest, notes=tuple(notes))


def _notes(group: NodeGroup, entry: Entry) -> list[str]:
    """What is unusual about a group."""
    usual, name = entry.devices_per_node, entry.device.name
    if group.devices_per_node > usual:
        return [f"nodes of {group.devices_per_node} {name} are larger than the usual {usual}"]
    if entry.hosts > 1 and group.devices_per_node < usual < group.num_devices:
        return [f"{name} nodes are joined by {entry.nic.name}; a rack's NVLink joins {usual}"]
    return []


def _local(parts: list[_Part], words: str) -> Cluster:
    """The machine at hand, alone and as one node."""
    part = parts[0]
    if len(parts) > 1 or (part.devices_per_node is not None and part.nodes != 1):
        raise ClusterError(
            Problem(
                f"{words!r} asks for more than this machine",
                "local is one node and cannot be mixed with others",
                "local, 4xlocal, 1x4xlocal",
            )
        )
    return local_cluster(part.devices_per_node or part.nodes or None)
