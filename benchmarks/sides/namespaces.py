"""Nodes that are network namespaces of this machine, joined by a link that is throttled.

Needs root, and the commands `ip` and `tc` (iproute2). What it makes is gone afterwards, also after
a failure; what an earlier process left behind goes first.

    namespace 0: 10.77.0.1 on eth-0  <--- veth pair, tbf on both ends --->  10.77.0.2 on eth-1
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from sides.ranks import TIMEOUT, fork

NODES = 2
PREFIX = "triptych-node-"
CLONE_NEWNET = 0x40000000
PORT = 29_731
QUEUE_MS = 50
LEAST_BURST_BYTES = 128 << 10


def require_root() -> None:
    """Ends the program if namespaces cannot be made."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() or missing:
        reason = f"no command {', '.join(missing)} (iproute2)" if missing else "needs root"
        print(f"network namespaces: {reason}", file=sys.stderr)
        raise SystemExit(2)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Inside, the namespaces and their link exist."""
    _remove()
    try:
        for node in range(NODES):
            _run("ip", "netns", "add", f"{PREFIX}{node}")
        _run(
            *("ip", "link", "add", "eth-0", "netns", f"{PREFIX}0", "type", "veth"),
            *("peer", "name", "eth-1", "netns", f"{PREFIX}1"),
        )
        for node in range(NODES):
            _inside(node, "ip", "addr", "add", f"{address(node)}/24", "dev", f"eth-{node}")
            _inside(node, "ip", "link", "set", f"eth-{node}", "up")
            _inside(node, "ip", "link", "set", "lo", "up")
        yield
    finally:
        _remove()


def throttle(bits_per_s: float) -> None:
    """Each direction of the link carries so much from now on."""
    burst = max(LEAST_BURST_BYTES, int(bits_per_s / 8 * 0.002))
    for node in range(NODES):
        _inside(
            node,
            *("tc", "qdisc", "replace", "dev", f"eth-{node}", "root", "tbf"),
            *("rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"),
        )


def _stay(rank: int) -> None:
    """Enters nothing more."""


def on_nodes(
    function: Callable[[], Any], per_node: int = 1, enter: Callable[[int], None] = _stay
) -> list[Any]:
    """The result of `function` on so many ranks in each namespace, each of which `enter`s first."""

    def join(rank: int, _: object) -> None:
        enter(rank)
        _join(rank, per_node)

    return fork(range(NODES * per_node), join, function)


def address(node: int) -> str:
    """Where a node is reached."""
    return f"10.77.0.{node + 1}"


def _join(rank: int, per_node: int) -> None:
    """Enters the namespace of a rank (its later threads are there too) and meets the others."""
    node = rank // per_node
    namespace = os.open(f"/run/netns/{PREFIX}{node}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
    os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = f"eth-{node}"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{PORT}",
        rank=rank,
        world_size=NODES * per_node,
        timeout=TIMEOUT,
    )


def _remove() -> None:
    for node in range(NODES):
        if os.path.exists(f"/run/netns/{PREFIX}{node}"):
            _run("ip", "netns", "del", f"{PREFIX}{node}")


def _inside(node: int, *command: str) -> None:
    _run("ip", "netns", "exec", f"{PREFIX}{node}", *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
