"""The built-in catalogue of devices and links, read from `gpus.csv` and `fabrics.csv`.

Rates are those of the data sheets: dense, per device, one direction. Of a device, what is attained
in training is `gemm_efficiency` and `memory_efficiency` of them. `source` says where each number
is from and what is assumed.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.cluster.cluster import Device, Link
from triptych.units import GIB

DEVICES = Path(__file__).with_name("gpus.csv")
FABRICS = Path(__file__).with_name("fabrics.csv")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A device and the nodes that it usually comes in.

    `link` joins the devices of a node; `nic` is one network port, of which a node has `nics`.
    A node can span several `hosts` (the NVLink domain of a GB200 rack).
    """

    device: Device
    memory_gib: int  # the vendor's label, by which memory sizes are told apart in names
    devices_per_node: int
    hosts: int
    link: Link
    nic: Link
    nics: int
    network_source: str

    def network(self, devices_per_node: int) -> Link:
        """A device's share of the node's ports; at most one port, as ports come with devices."""
        share = min(1.0, self.nics / devices_per_node)
        source = f"default of {self.device.name}: {self.network_source}; {self.nic.source}"
        return replace(self.nic, bytes_per_s=self.nic.bytes_per_s * share, source=source)


def devices() -> dict[str, Device]:
    """Every device of the catalogue by name."""
    return {name: entry.device for name, entry in entries().items()}


def fabrics() -> dict[str, Link]:
    """Every kind of link by name; network links are one port, or one device's share of a node."""
    return {row["name"]: _link(row) for row in _rows(FABRICS)}


def entries() -> dict[str, Entry]:
    """Every device with its usual node, by name."""
    links = fabrics()
    return {row["name"]: _entry(row, links) for row in _rows(DEVICES)}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _link(row: Mapping[str, str]) -> Link:
    return Link(
        name=row["name"],
        latency_s=float(row["latency_us"]) * 1e-6,
        bytes_per_s=float(row["gb_per_s"]) * 1e9,
        efficiency=float(row["efficiency"]),
        start_s=float(row["start_us"]) * 1e-6,
        ramp_s=float(row["ramp_us"]) * 1e-6,
        source=f"{row['source']}. Curve: {row['curve_source']}",
    )


def _entry(row: Mapping[str, str], links: Mapping[str, Link]) -> Entry:
    return Entry(
        device=_device(row),
        memory_gib=int(row["memory_gib"]),
        devices_per_node=int(row["devices_per_node"]),
        hosts=int(row["hosts_per_node"]),
        link=links[row["link"]],
        nic=links[row["network"]],
        nics=int(row["nics_per_node"]),
        network_source=row["network_source"],
    )


def _device(row: Mapping[str, str]) -> Device:
    first, second, third = map(float, row["flash_efficiency"].split())
    return Device(
        name=row["name"],
        kind=row["kind"],
        memory_bytes=float(row["memory_gib"]) * GIB,
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        peak_flops={dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
        gemm_efficiency=float(row["gemm_efficiency"]),
        gemm_burst=float(row["gemm_burst"]),
        gemm_ramp_k=float(row["gemm_ramp_k"]),
        multiprocessors=int(row["multiprocessors"]),
        flash_efficiency=(first, second, third),
        memory_efficiency=float(row["memory_efficiency"]),
        operator_s=float(row["operator_us"]) * 1e-6,
        source=f"{row['source']}. Efficiency: {row['efficiency_source']}; kernels: "
        f"{row['kernel_source']}",
    )
