"""The machine at hand as a cluster: its GPUs, or its cores, measured once and remembered.

The measurement is kept as a cluster file in the user's cache folder. It is made again when the
machine's fingerprint differs or the file is damaged; without a writable cache it is made each
time.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from triptych.cluster import machine as system
from triptych.cluster.catalogue import entries
from triptych.cluster.cluster import Cluster, NodeGroup
from triptych.cluster.local_cpu import Machine, ProbeError, for_ranks, measure
from triptych.cluster.local_gpu import gpu_cluster
from triptych.cluster.toml import read_cluster, write_cluster
from triptych.errors import ClusterError, Problem

PROBE_VERSION = 3  # counts up when a measurement means something else than before
_FINGERPRINT = "fingerprint: "

logger = logging.getLogger(__name__)


def local_cluster(ranks: int | None = None, environ: Mapping[str, str] = os.environ) -> Cluster:
    """The machine at hand: every visible CUDA device or usable core, or `ranks` of either.

    CPU ranks may be more than cores: they then share the cores' rates.

    Raises ClusterError for fewer ranks than one, or more than there are GPUs.
    """
    if ranks is not None and ranks < 1:
        raise ClusterError(Problem(f"{ranks} ranks", "a cluster has at least one rank"))
    gpus = system.list_gpus(environ)
    if gpus:
        return gpu_cluster(gpus, ranks)
    machine = this_machine()
    return for_ranks(_remembered(machine, cache_file(environ)), machine, ranks)


def this_machine() -> Machine:
    """What this process may use of the machine that it runs on."""
    return Machine(
        cpu=system.cpu_name(),
        flags=system.cpu_flags(),
        cores=system.usable_cores(),
        memory_bytes=system.memory_bytes(),
    )


def cache_file(environ: Mapping[str, str]) -> Path | None:
    """Where the measurement is kept; None if the user has no cache folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        home = environ.get("HOME", "")
        if not home:
            return None
        base = os.path.join(home, ".cache")
    return Path(base) / "triptych" / "local.toml"


def fingerprint(machine: Machine) -> str:
    """A short hash of all that a measurement depends on."""
    memory_gib = round(machine.memory_bytes / 1024**3)
    facts = [PROBE_VERSION, machine.cpu, sorted(machine.flags), machine.cores, memory_gib]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _remembered(machine: Machine, path: Path | None) -> Cluster:
    """The measurement from the cache, or a new one, which is then kept."""
    mark = fingerprint(machine)
    if path is not None:
        cached = _read(path, mark)
        if cached is not None:
            return cached
    logger.info("measuring this machine (about a second)")
    try:
        cluster = measure(machine, mark)
    except ProbeError as error:
        logger.warning("this machine could not be measured (%s): nominal rates are used", error)
        return _nominal(machine)
    if path is not None:
        _write(path, cluster)
    return cluster


def _read(path: Path, mark: str) -> Cluster | None:
    """The cached measurement, if it is whole and of this machine."""
    if not path.is_file():
        return None
    try:
        cluster = read_cluster(path)
    except ClusterError as error:
        logger.warning("%s is damaged, measuring again: %s", path, error.problems[0].what)
        return None
    if len(cluster.groups) == 1 and _FINGERPRINT + mark in cluster.notes:
        return cluster
    logger.info("%s was measured on another machine, measuring again", path)
    return None


def _write(path: Path, cluster: Cluster) -> None:
    """Keeps the measurement; readers see the old file or the new one, never a half."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(write_cluster(cluster), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        logger.info("the measurement is not kept: %s", error)


def _nominal(machine: Machine) -> Cluster:
    """The catalogue's CPU rank on every core, for a machine on which nothing can be measured."""
    entry = entries()["cpu"]
    group = NodeGroup(nodes=1, devices_per_node=machine.cores, device=entry.device, link=entry.link)
    note = "not measured: nominal rates of the catalogue's cpu"
    return Cluster(name="local", groups=(group,), network=group.link, notes=(note,))
