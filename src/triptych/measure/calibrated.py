"""The figures of a calibration as a cluster."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.cluster.measured import OPERATIONS, Curve, Grid, Kernels, Measured, Messages
from triptych.cluster.measured_toml import OPERATORS
from triptych.measure.record import Entry
from triptych.measure.watch import Place, Row

Entries = Mapping[str, Entry]


def calibrated(
    entries: Entries,
    place: Place,
    device: Device,
    link: Link,
    *,
    dtypes: Sequence[str],
    threads: int,
    notes: Sequence[str],
) -> Cluster:
    """The cluster that was measured; `device` and `link` have what measuring does not tell."""
    when = max(entry.date for entry in entries.values())
    source = f"measured {when} by triptych measure, {place.world} ranks at once"
    rated = _device(entries, device, dtypes, threads, source)
    inside = measured_link(entries, "link", link, source)
    network = measured_link(entries, "network", link, source) if place.nodes > 1 else inside
    group = NodeGroup(nodes=place.nodes, devices_per_node=place.per_node, device=rated, link=inside)
    noise = [f"{name} {entry.noise:.1%}" for name, entry in entries.items()]
    return Cluster(
        name=f"{place.nodes}x{place.per_node}x{rated.name} (measured)",
        groups=(group,),
        network=network,
        notes=(f"date: {when}", *notes, f"spread of repeats: {', '.join(noise)}"),
    )


def _device(
    entries: Entries, device: Device, dtypes: Sequence[str], threads: int, source: str
) -> Device:
    kernels = {dtype: _kernels(entries, dtype) for dtype in dtypes}
    (_, forward_s, backward_s), *_ = entries["host"].rows
    peaks = dict(device.peak_flops)
    if device.kind == "cpu":
        peaks = {dtype: max(k.products.rates) for dtype, k in kernels.items()}
    return replace(
        device,
        peak_flops=peaks,
        memory_bytes_per_s=entries["copy"].rows[0][1],
        memory_efficiency=1.0,
        read_bytes_per_s=entries["read"].rows[0][1],
        operator_s=forward_s,
        source=f"{source}; {device.source}" if device.source else source,
        measured=Measured(
            threads=threads,
            host_s=(forward_s, backward_s),
            optimizer=_curve(entries["optimizer"].rows, 1),
            kernels=kernels,
        ),
    )


def _kernels(entries: Entries, dtype: str) -> Kernels:
    attention = entries[f"{dtype} attention"].rows
    operators = {}
    for name in OPERATORS:
        rows = entries[f"{dtype} {name}"].rows
        operators[name] = _curve(rows, 1), _curve(rows, 2)
    return Kernels(
        products=_grid(entries[f"{dtype} products"].rows, 3, 3),
        attention=(_grid(attention, 2, 2), _grid(attention, 2, 3)),
        operators=operators,
    )


def measured_link(entries: Entries, words: str, link: Link, source: str) -> Link:
    """A link by its measured messages; one that nothing crossed stays as it is."""
    if f"{words} send" not in entries:
        return link
    measured: Messages = {name: _by_ranks(entries[f"{words} {name}"].rows) for name in OPERATIONS}
    sends = measured["send"][2]
    gathers = next(iter(measured["all_gather"].items()))
    ranks, curve = gathers
    sent = (ranks - 1) / ranks * curve.sizes[-1]
    return replace(
        link,
        latency_s=sends.seconds[0],
        bytes_per_s=sent / curve.seconds[-1],
        efficiency=1.0,
        start_s=0.0,
        ramp_s=0.0,
        source=source,
        measured=measured,
    )


def _by_ranks(rows: Sequence[Row]) -> dict[int, Curve]:
    ranks = dict.fromkeys(int(row[0]) for row in rows)
    return {n: _curve([row[1:] for row in rows if row[0] == n], 1) for n in ranks}


def _curve(rows: Sequence[Row], column: int) -> Curve:
    return Curve(sizes=tuple(row[0] for row in rows), seconds=tuple(row[column] for row in rows))


def _grid(rows: Sequence[Row], dimensions: int, column: int) -> Grid:
    axes = tuple(tuple(sorted({row[i] for row in rows})) for i in range(dimensions))
    return Grid(axes=axes, rates=tuple(row[column] for row in rows))


def spread(entries: Entries) -> float:
    """The typical relative spread over all figures."""
    return statistics.median(entry.noise for entry in entries.values())
