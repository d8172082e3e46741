"""Measures one core of this machine in about a second; prints one JSON object.

Runs as a process of its own (`python probe.py`), so that numpy's threads can be limited before
it is imported and `triptych plan` never imports it. Several at once show what cores share.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

SECONDS = 0.08  # per figure, twice; the best call counts, so that other load disturbs little
# A call is timed by the processor time of its thread: when others run, it stands still.
LARGE = (512, 512, 512)
SMALL = (256, 256, 1024)  # rows, depth, columns of a product of a small model
COPY_BYTES = 64 * 1024**2
MESSAGE_BYTES = 8 * 1024**2
PINGS = 200


def main() -> None:
    """Prints the figures of this core, and of a link if `--link` is given."""
    rounds = [core_figures() for _ in range(2)]
    figures: dict[str, float | str] = {key: max(one[key] for one in rounds) for key in rounds[0]}
    figures["numpy"] = np.__version__
    if "--link" in sys.argv[1:]:
        figures["latency_s"], figures["duplex_bytes_per_s"] = loopback()
    print(json.dumps(figures))


def core_figures() -> dict[str, float]:
    """Rates of one core, measured once."""
    return {
        "fp32_flops": product_flops(LARGE, np.float32),
        "small_fp32_flops": product_flops(SMALL, np.float32),
        "fp64_flops": product_flops(LARGE, np.float64),
        "copy_bytes_per_s": copy_bytes_per_s(),
        "read_bytes_per_s": read_bytes_per_s(),
    }


def product_flops(shape: tuple[int, int, int], dtype: type[np.floating]) -> float:
    """FLOP/s of a matrix product."""
    rows, depth, columns = shape
    left = np.ones((rows, depth), dtype)
    right = np.ones((depth, columns), dtype)
    out = np.empty((rows, columns), dtype)
    return 2.0 * rows * depth * columns / _best_s(lambda: np.matmul(left, right, out=out))


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy between two large arrays."""
    source = np.ones(COPY_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    return 2.0 * source.nbytes / _best_s(lambda: np.copyto(target, source))


def read_bytes_per_s() -> float:
    """Bytes read per second from a large array, with hardly any arithmetic."""
    values = np.ones(COPY_BYTES // 4, np.float32)
    return values.nbytes / _best_s(lambda: np.dot(values, values))


def loopback() -> tuple[float, float]:
    """Seconds of a one-byte message and bytes per second each way between two processes by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            with socket.create_connection(server.getsockname(), timeout=10) as connection:
                _echo(connection)
                _exchange(connection)
            os._exit(0)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            latency_s = _ping(connection)
            exchange_s = _exchange(connection)
        os.waitpid(child, 0)
    return latency_s, MESSAGE_BYTES / exchange_s


def _ping(connection: socket.socket) -> float:
    """Half the median round trip."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(PINGS):
        start = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        trips.append(time.perf_counter() - start)
    return sorted(trips)[PINGS // 2] / 2


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        connection.sendall(connection.recv(1))


def _exchange(connection: socket.socket) -> float:
    """Seconds to send and receive a message at once, the best of a few."""
    outgoing, incoming = bytes(MESSAGE_BYTES), memoryview(bytearray(MESSAGE_BYTES))
    best_s = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        sender = threading.Thread(target=connection.sendall, args=(outgoing,))
        sender.start()
        received = 0
        while received < MESSAGE_BYTES:
            count = connection.recv_into(incoming[received:])
            if count == 0:
                raise ConnectionError("the other process ended")
            received += count
        sender.join()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def _best_s(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest call within `SECONDS`, of three at least."""
    best_s, calls = float("inf"), 0
    end = time.perf_counter() + SECONDS
    while calls < 3 or time.perf_counter() < end:
        start = time.thread_time()
        call()
        best_s = min(best_s, time.thread_time() - start)
        calls += 1
    return best_s


if __name__ == "__main__":
    main()
