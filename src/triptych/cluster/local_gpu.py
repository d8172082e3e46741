"""The NVIDIA GPUs of the machine at hand as a cluster, by the figures of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.cluster.catalogue import Entry, entries
from triptych.cluster.cluster import Cluster, NodeGroup
from triptych.cluster.machine import Gpu
from triptych.cluster.names import matches
from triptych.errors import ClusterError, Problem

STAND_IN = "L4"  # lends its rates to a GPU that the catalogue lacks: the slowest it has
MEMORY_SLACK = 0.08  # a device reports a little less than its label


def gpu_cluster(gpus: list[Gpu], ranks: int | None) -> Cluster:
    """One node of the first `ranks` GPUs (None: all), memory as the driver reports it.

    Raises ClusterError if more ranks are asked for than there are GPUs.
    """
    count = len(gpus) if ranks is None else ranks
    if count > len(gpus):
        raise ClusterError(
            Problem(
                f"{count} ranks on this machine",
                f"each rank needs a GPU of its own, and {len(gpus)} are visible",
                f"up to {len(gpus)} ranks; CUDA_VISIBLE_DEVICES= (empty) runs ranks on the CPU",
            )
        )
    known = entries()
    notes: list[str] = []
    groups: dict[str, NodeGroup] = {}
    for gpu in gpus[:count]:
        if gpu.name in groups:
            group = groups[gpu.name]
            groups[gpu.name] = replace(group, devices_per_node=group.devices_per_node + 1)
        else:
            groups[gpu.name] = _single(gpu, known, notes)
    slowest = min((group.link for group in groups.values()), key=lambda link: link.bytes_per_s)
    name = "local" if count == len(gpus) else f"{count}xlocal"
    return Cluster(name=name, groups=tuple(groups.values()), network=slowest, notes=tuple(notes))


def _single(gpu: Gpu, known: Mapping[str, Entry], notes: list[str]) -> NodeGroup:
    """A group of one GPU; notes if its rates are a guess."""
    entry = identify(gpu, known)
    if entry is None:
        entry = known[STAND_IN]
        notes.append(
            f"{gpu.name} is not in the catalogue: its rates are taken to be those of {STAND_IN}; "
            "a cluster file can state them"
        )
    source = f"nvidia-smi reports {gpu.name}; {entry.device.source}"
    device = replace(entry.device, memory_bytes=gpu.memory_bytes, source=source)
    if known[STAND_IN] is entry and notes:
        device = replace(device, name=gpu.name)
    return NodeGroup(nodes=1, devices_per_node=1, device=device, link=entry.link)


def identify(gpu: Gpu, known: Mapping[str, Entry]) -> Entry | None:
    """The catalogue's entry for a GPU, by name and, where the name leaves a choice, by memory."""
    fitting = [known[name] for name in matches(gpu.name, known)]
    if len(fitting) == 1:
        return fitting[0]
    close = [entry for entry in fitting if _off(entry, gpu) <= MEMORY_SLACK]
    return min(close, key=lambda entry: _off(entry, gpu)) if close else None


def _off(entry: Entry, gpu: Gpu) -> float:
    """How far the reported memory is from the entry's, as a share."""
    return abs(gpu.memory_bytes / entry.device.memory_bytes - 1)
