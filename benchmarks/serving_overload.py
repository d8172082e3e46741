"""A server for half an hour at twice what it gets through: memory, and goodput of the admitted.

Starts `triptych serve --refuse-late` on the model of a folder (a small random one without), learns
how many requests a second it gets through, and sends twice as many as a Poisson process with
`triptych bench-serve`. Admitted requests should meet the objectives that admission promised, and
memory should be that of the first minutes.

    python benchmarks/serving_overload.py [FOLDER] [--minutes 30] [--slo-ttft 2] [--slo-tpot 0.5]
        [--input 64] [--output 32] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1] / "tests" / "procs" / "serve"
sys.path.insert(0, str(_TESTS))

import psutil  # noqa: E402
from serve_samples import config_of, save_model  # noqa: E402

from sides.server import memory_bytes, server  # noqa: E402

AT_ONCE, FLOOD_S = 32, 30.0
SAMPLE_S = 5.0


class Memory:
    """Resident bytes of all processes of a server, looked at again and again."""

    def __init__(self, process: psutil.Process) -> None:
        self.bytes: list[int] = []
        self._process, self._is_over = process, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth(self) -> float:
        """The last fifth over the second one: the first is that of buffers that fill."""
        self._is_over.set()
        self._thread.join()
        fifth = max(1, len(self.bytes) // 5)
        early = self.bytes[fifth : 2 * fifth] or self.bytes
        return statistics.median(self.bytes[-fifth:]) / statistics.median(early)

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.bytes.append(memory_bytes(self._process))


def bench(url: str, options: argparse.Namespace, requests: int, rate: float) -> dict[str, Any]:
    """What clients see of so many requests."""
    command = [sys.executable, "-m", "triptych", "bench-serve", url, "--json"]
    command += ["--requests", str(requests), "--rate", str(rate), "--token-ids", "1", "200"]
    command += ["--input", str(options.input), "--output", str(options.output)]
    command += ["--slo-ttft", str(options.slo_ttft), "--slo-tpot", str(options.slo_tpot)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def capacity(url: str, options: argparse.Namespace) -> float:
    """Requests a second that it gets through: guessed from a crowd, then measured in a flood."""
    crowd = bench(url, options, AT_ONCE, 1000.0)
    guess = (crowd["requests"] - crowd["refused"]) / crowd["duration_s"]
    flood = bench(url, options, max(AT_ONCE, int(4 * guess * FLOOD_S)), 4 * guess)
    return float((flood["requests"] - flood["refused"]) / flood["duration_s"])


def overloaded(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows: goodput of what was admitted, memory, failures."""
    limits = ("--plan", "precision=fp32", "--refuse-late", "--max-requests", "100000")
    objectives = ("--slo-ttft", str(options.slo_ttft), "--slo-tpot", str(options.slo_tpot))
    with server(folder, *limits, *objectives) as (url, process):
        bench(url, options, 20, 20.0)  # a warm-up
        rate = 2 * capacity(url, options)
        count = max(1, int(rate * 60 * options.minutes))
        print(f"{count} requests, {rate:.3g} a second", file=sys.stderr, flush=True)
        memory = Memory(process)
        found = bench(url, options, count, rate)
        growth = memory.growth()
    admitted = found["requests"] - found["refused"]
    kept = found["attainment"] * found["requests"] / admitted
    claim = f"{options.minutes:g} minutes at {rate:.3g} requests a second, twice the capacity"
    figures = {
        "admitted requests within their objectives": (kept, "higher"),
        "memory at the end / in the beginning": (growth, "lower"),
        "failed requests": (found["failed"], "lower"),
        "refused requests": (found["refused"] / found["requests"], "lower"),
    }
    return [
        {"claim": claim, "metric": name, "ours": value, "better": better}
        for name, (value, better) in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.5)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            save_model(folder, config_of(max_position_embeddings=512))
        rows = overloaded(folder, options)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['claim']}: {row['metric']:42} {row['ours']:.4g}")


if __name__ == "__main__":
    main()
