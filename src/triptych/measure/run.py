"""A calibration from its first figure to the file, on every rank of a launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triptych.cluster import machine
from triptych.cluster.catalogue import entries as catalogue
from triptych.cluster.cluster import Cluster, Device, Link
from triptych.cluster.local_gpu import gpu_cluster
from triptych.cluster.toml import write_cluster
from triptych.measure.calibrated import calibrated
from triptych.measure.figures import Figure, figures
from triptych.measure.record import Entry, Record
from triptych.measure.watch import Place, Watch

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure, and where it goes."""

    out: Path
    dtypes: tuple[str, ...]
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What came out of it, on rank 0; `resumed` figures were there from an earlier attempt."""

    cluster: Cluster
    record: Record
    resumed: int


def measure(order: Order, per_node: int, say: Say) -> Calibration | None:
    """Measures what is missing and writes the file; collective. None on ranks other than 0.

    Raises RunError if a file cannot be written; a lost rank is a RuntimeError of torch.
    """
    place = _place(per_node)
    record = _record(order, place) if place.rank == 0 else None
    resumed = len(record.entries) if record else 0
    todo = figures(place, order.dtypes)
    done = _from_first(place, list(record.entries) if record else [])
    todo = [figure for figure in todo if figure.name not in done]
    if record and resumed:
        say(f"{resumed} figures are there from an earlier attempt")
    watch = Watch(place)
    for number, figure in enumerate(todo, 1):
        if record:
            say(f"[{number}/{len(todo)}] {figure.name}")
        _measure(watch, figure, record)
    if record is None:
        return None
    cluster = _cluster_of(record, place, order.dtypes)
    record.finish(order.out, write_cluster(cluster))
    return Calibration(cluster=cluster, record=record, resumed=resumed)


def _measure(watch: Watch, figure: Figure, record: Record | None) -> None:
    rows, noise = figure.run(watch)
    rows = watch.of_all(rows, figure.merge)
    if record:
        record.add(figure.name, Entry(rows, noise, time.strftime("%Y-%m-%d")))


def _place(per_node: int) -> Place:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    is_alone = not dist.is_initialized()
    rank, world = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    return Place(rank=rank, world=world, per_node=min(per_node, world), device=device)


def _from_first(place: Place, value: list[str]) -> list[str]:
    """What rank 0 says; it also hears of rank 0's failure to begin."""
    told: list[Any] = [value]
    if place.world > 1:
        dist.broadcast_object_list(told, 0)
    found: list[str] = told[0]
    return found


def _record(order: Order, place: Place) -> Record:
    return Record.of(order.out, _facts(order.dtypes, place), order.again)


def _facts(dtypes: Sequence[str], place: Place) -> dict[str, Any]:
    """All that figures depend on."""
    return {
        "device": _name(place),
        "ranks": place.world,
        "devices_per_node": place.per_node,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "dtypes": list(dtypes),
    }


def _name(place: Place) -> str:
    if place.device.type == "cuda":
        return torch.cuda.get_device_name(place.device)
    return machine.cpu_name()


def _cluster_of(record: Record, place: Place, dtypes: Sequence[str]) -> Cluster:
    device, link = _described(place)
    facts = _facts(dtypes, place)
    return calibrated(
        record.entries,
        place,
        device,
        link,
        dtypes=dtypes,
        threads=torch.get_num_threads(),
        notes=[f"{name.replace('_', ' ')}: {facts[name]}" for name in facts if name != "dtypes"],
    )


def _described(place: Place) -> tuple[Device, Link]:
    """What measuring does not tell: memory, names, sheet peaks of GPUs, the kind of link."""
    if place.device.type == "cuda":
        group = gpu_cluster(machine.list_gpus(), 1).groups[0]
        return group.device, group.link
    entry = catalogue()["cpu"]
    memory_bytes = machine.memory_bytes() / place.per_node
    device = replace(
        entry.device, name="local-cpu", memory_bytes=memory_bytes, source=machine.cpu_name()
    )
    return device, entry.link
