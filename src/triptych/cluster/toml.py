"""Cluster files: a `Cluster` as TOML and back.

    version = 1
    name = "my cluster"
    network = "InfiniBand-NDR"            # a fabric of the catalogue, or a table as below

    [[groups]]
    nodes = 4
    devices_per_node = 8
    device = "H100-SXM5-80GB"             # a device of the catalogue, or a table
    link = { name = "NVLink", latency_s = 2e-6, bytes_per_s = 450e9 }

A device or link table may have `base`, a name of the catalogue: what the table leaves out is then
taken from there. Either may have a table `measured` (`measured_toml.py`), as `triptych measure`
writes it. Reading is strict: every unknown key (with the nearest valid one), missing key
and wrong value is reported at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from triptych.cluster.catalogue import DTYPES, entries, fabrics
from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.cluster.measured_toml import device_lines, link_lines, read_device, read_link
from triptych.cluster.names import find_device
from triptych.cluster.table import Table
from triptych.errors import ClusterError, Problem, nearest

VERSION = 1
_LINK_RULE = "the name of a fabric or a table"


def read_cluster(path: Path | str) -> Cluster:
    """The cluster of a file.

    Raises ClusterError with every fault of the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            Problem(
                f"cannot read the cluster file {path}: {error}",
                "a path that ends in .toml is a cluster file",
                "an existing file, or a cluster such as 1x8xH100-SXM",
            )
        ) from error
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> Cluster:
    """The cluster that a TOML text describes; `where` names the text in messages."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(Problem(f"{where} is not TOML: {error}")) from error
    table = Table(values, where)
    cluster = _cluster(table)
    if table.problems:
        raise ClusterError(table.problems)
    return cluster


def write_cluster(cluster: Cluster) -> str:
    """The cluster as TOML that `read_cluster` gives back unchanged."""
    lines = [
        f"version = {VERSION}",
        f"name = {_string(cluster.name)}",
        f"notes = [{', '.join(_string(note) for note in cluster.notes)}]",
        "",
        "[network]",
        *_link_lines(cluster.network),
        *link_lines(cluster.network.measured, "network.measured"),
    ]
    for group in cluster.groups:
        lines += ["", "[[groups]]", f"nodes = {group.nodes}"]
        lines += [f"devices_per_node = {group.devices_per_node}", "", "[groups.link]"]
        lines += [
            *_link_lines(group.link),
            *link_lines(group.link.measured, "groups.link.measured"),
        ]
        lines += ["", "[groups.device]", *_device_lines(group.device)]
        lines += device_lines(group.device.measured, "groups.device.measured")
    return "\n".join(lines) + "\n"


def _cluster(table: Table) -> Cluster:
    version = table.integer("version", default=VERSION)
    if version != VERSION:
        table.wrong("version", version, f"{VERSION}, the only version there is")
    groups = tuple(_group(group) for group in table.tables("groups"))
    cluster = Cluster(
        name=table.string("name", default=Path(table.where).stem),
        groups=groups,
        network=_link(table, "network"),
        notes=tuple(table.strings("notes")),
    )
    table.check_unknown()
    return cluster


def _group(table: Table) -> NodeGroup:
    group = NodeGroup(
        nodes=table.integer("nodes"),
        devices_per_node=table.integer("devices_per_node"),
        device=_device(table),
        link=_group_link(table),
    )
    table.check_unknown()
    return group


def _group_link(table: Table) -> Link:
    """The link of a group; without one, the usual link of a device of the catalogue."""
    device = table.peek("device")
    name = device.get("base") if isinstance(device, Mapping) else device
    if table.peek("link") is None and isinstance(name, str):
        known = entries()
        try:
            return find_device(name, known).link
        except ClusterError:
            return _NO_LINK  # the device is reported where it is read
    return _link(table, "link")


def _device(parent: Table) -> Device:
    """A device by name of the catalogue, or a table (with or without `base`)."""
    value = parent.take("device", "the name of a device or a table")
    if isinstance(value, str):
        return _named_device(parent, value) or _NO_DEVICE
    table = parent.child("device", value)
    base_name = table.string("base", default="")
    base = _named_device(table, base_name) if base_name else None
    device = Device(
        name=table.string("name", default=base.name if base else None),
        kind=table.string("kind", default=base.kind if base else None),
        memory_bytes=table.number("memory_bytes", base.memory_bytes if base else None),
        memory_bytes_per_s=table.number(
            "memory_bytes_per_s", base.memory_bytes_per_s if base else None
        ),
        peak_flops=_peak_flops(table, base),
        gemm_efficiency=table.share("gemm_efficiency", (base or _NO_DEVICE).gemm_efficiency),
        gemm_burst=table.share("gemm_burst", (base or _NO_DEVICE).gemm_burst),
        gemm_ramp_k=table.number("gemm_ramp_k", (base or _NO_DEVICE).gemm_ramp_k),
        multiprocessors=table.integer("multiprocessors", (base or _NO_DEVICE).multiprocessors),
        flash_efficiency=_flash_efficiency(table, base or _NO_DEVICE),
        memory_efficiency=table.share("memory_efficiency", (base or _NO_DEVICE).memory_efficiency),
        read_bytes_per_s=table.number("read_bytes_per_s", (base or _NO_DEVICE).read_bytes_per_s),
        operator_s=table.number("operator_s", (base or _NO_DEVICE).operator_s),
        source=table.string("source", default=base.source if base else ""),
        measured=read_device(table) or (base.measured if base else None),
    )
    table.check_unknown()
    return device


def _flash_efficiency(table: Table, base: Device) -> tuple[float, float, float]:
    """Three keys, one a generation of kernels."""
    first, second, third = base.flash_efficiency
    return (
        table.share("flash_1_efficiency", first),
        table.share("flash_2_efficiency", second),
        table.share("flash_3_efficiency", third),
    )


def _named_device(table: Table, name: str) -> Device | None:
    try:
        return find_device(name, entries()).device
    except ClusterError as error:
        table.problems.extend(
            Problem(f"{problem.what} in {table.where}", problem.rule, problem.works)
            for problem in error.problems
        )
        return None


def _peak_flops(parent: Table, base: Device | None) -> dict[str, float]:
    """FLOP/s by dtype; a table adds to those of the base."""
    known = dict(base.peak_flops) if base else {}
    if base and parent.peek("peak_flops") is None:
        return known
    value = parent.take("peak_flops", "a table of FLOP/s by dtype")
    if isinstance(value, str):
        parent.wrong("peak_flops", value, "a table of FLOP/s by dtype")
        return known
    table = parent.child("peak_flops", value)
    stated = {dtype: table.number(dtype) for dtype in DTYPES if table.peek(dtype) is not None}
    table.check_unknown(DTYPES)
    if value is not None and not stated and not known:
        parent.wrong("peak_flops", value, "FLOP/s for at least one dtype: " + ", ".join(DTYPES))
    return known | stated


def _link(parent: Table, key: str) -> Link:
    """A link by name of a fabric, or a table (with or without `base`)."""
    value = parent.take(key, _LINK_RULE)
    if isinstance(value, str):
        return _named_link(parent, value)
    table = parent.child(key, value)
    base_name = table.string("base", default="")
    base = _named_link(table, base_name) if base_name else None
    link = Link(
        name=table.string("name", default=base.name if base else None),
        latency_s=table.number("latency_s", base.latency_s if base else None),
        bytes_per_s=table.number("bytes_per_s", base.bytes_per_s if base else None),
        efficiency=table.share("efficiency", base.efficiency if base else _link_share(table)),
        start_s=table.number("start_s", base.start_s if base else 0.0),
        ramp_s=table.number("ramp_s", base.ramp_s if base else 0.0),
        source=table.string("source", default=base.source if base else ""),
        measured=read_link(table),
    )
    table.check_unknown()
    return link


def _link_share(table: Table) -> float:
    """Links that were measured are taken as attained."""
    is_measured = str(table.peek("source") or "").startswith("measured")
    return 1.0 if is_measured else _NO_LINK.efficiency


def _named_link(table: Table, name: str) -> Link:
    known = {fabric.lower(): link for fabric, link in fabrics().items()}
    if name.lower() in known:
        return known[name.lower()]
    names = [link.name for link in known.values()]
    close = nearest(name, names) or names
    table.problems.append(
        Problem(
            f"unknown link {name!r} in {table.where}", f"a link is {_LINK_RULE}", ", ".join(close)
        )
    )
    return _NO_LINK


def _link_lines(link: Link) -> list[str]:
    return [
        f"name = {_string(link.name)}",
        f"latency_s = {link.latency_s!r}",
        f"bytes_per_s = {link.bytes_per_s!r}",
        f"efficiency = {link.efficiency!r}",
        *_given(link, "start_s", "ramp_s"),
        f"source = {_string(link.source)}",
    ]


def _given(values: Device | Link, *names: str) -> list[str]:
    """The lines of those numbers that are not 0, which stands for absence."""
    return [f"{name} = {getattr(values, name)!r}" for name in names if getattr(values, name)]


def _device_lines(device: Device) -> list[str]:
    numbers = (
        "memory_bytes",
        "memory_bytes_per_s",
        "gemm_efficiency",
        "memory_efficiency",
        "operator_s",
    )
    return [
        f"name = {_string(device.name)}",
        f"kind = {_string(device.kind)}",
        *(f"{name} = {getattr(device, name)!r}" for name in numbers),
        *_given(device, "read_bytes_per_s", "gemm_burst", "gemm_ramp_k", "multiprocessors"),
        *(
            f"flash_{i + 1}_efficiency = {share!r}"
            for i, share in enumerate(device.flash_efficiency)
        ),
        f"source = {_string(device.source)}",
        "",
        "[groups.device.peak_flops]",
        *(f"{dtype} = {flops!r}" for dtype, flops in device.peak_flops.items()),
    ]


def _string(text: str) -> str:
    """A TOML basic string: JSON's escapes, and DEL, which JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Stand-ins that let reading go on after a fault; no cluster with one is ever returned.
_NO_DEVICE = Device(
    name="", kind="", memory_bytes=0.0, memory_bytes_per_s=0.0, peak_flops={"fp32": 0.0}
)
_NO_LINK = Link(name="", latency_s=0.0, bytes_per_s=0.0)
