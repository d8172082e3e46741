"""TTFT and TPOT over HTTP: `triptych serve` and vLLM's server under one trace, in turns.

SmolLM2-135M in fp32. Both servers are up, the one that is not measured is stopped. The trace (its
lengths cut to fit) is sent by `triptych bench-serve` at 70 % of what the peer gets through when all
requests come at once.

    python examples/smollm2/unpack.py smollm2
    python benchmarks/serving_latency.py smollm2 AzureLLMInferenceTrace2023_conv.csv [--pairs 3]
        [--requests 60] [--load 0.7 | --rate R] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from peers import vllm

SOURCE = str(Path(__file__).parents[1] / "src")
INPUT, OUTPUT = 512, 64
PERCENTILES = ("p50", "p99")


class Server:
    """A server in a session of its own, which rests unless it is asked."""

    def __init__(self, name: str, command: list[str], variables: dict[str, str], port: int) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}/v1"
        environment = {**os.environ, **variables}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        while not _answers(self.url):
            if self._process.poll() is not None:
                raise SystemExit(f"{name} ended with code {self._process.returncode}")
            time.sleep(0.5)
        self._signal(signal.SIGSTOP)

    def bench(self, trace: Path, requests: int, rate: float, seed: int) -> dict[str, Any]:
        """What `bench-serve` says of it, alone on the machine."""
        self._signal(signal.SIGCONT)
        command = [sys.executable, "-m", "triptych", "bench-serve", self.url, "--json"]
        command += ["--trace", str(trace), "--requests", str(requests), "--rate", str(rate)]
        command += ["--input", str(INPUT), "--output", str(OUTPUT), "--seed", str(seed)]
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        self._signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(done.stdout)
        if found["refused"] or found["failed"]:
            raise SystemExit(f"{self.name}: {found['faults']}")
        return found

    def close(self) -> None:
        """Ends it."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ours(folder: str) -> Server:
    port = _free_port()
    command = [sys.executable, "-m", "triptych", "serve", folder, "--port", str(port)]
    command += ["--plan", "precision=fp32", "--context", "1024"]
    return Server("triptych", command, {"PYTHONPATH": SOURCE}, port)


def theirs(folder: str) -> Server:
    home, port = vllm.home(), _free_port()
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` asks for metadata that are absent
    command = [str(home / "bin" / "python"), "-m", module, "--model", folder, "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "64"]
    return Server("vllm", command, vllm.variables(home), port)


def rows_of(pairs: list[dict[str, dict[str, Any]]], rate: float) -> list[dict[str, Any]]:
    """For each time and percentile, medians of both sides and of the pairs' ratios."""
    rows = []
    for name in ("ttft_s", "tpot_s"):
        for percentile in PERCENTILES:
            both = [
                tuple(pair[side][name][percentile]["value"] for side in ("triptych", "vllm"))
                for pair in pairs
            ]
            rows.append(
                {
                    "claim": f"SmolLM2-135M fp32 over HTTP, {rate:.3g} requests a second",
                    "peer": "vllm",
                    "metric": f"{name} {percentile}",
                    "ours": statistics.median(a for a, _ in both),
                    "theirs": statistics.median(b for _, b in both),
                    "ratio": statistics.median(a / b for a, b in both),
                    "ratios": [round(a / b, 3) for a, b in both],
                    "better": "lower",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float, help="requests a second, instead of measuring it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    servers: list[Server] = []
    try:
        servers += [ours(options.folder)]
        servers += [theirs(options.folder)]
        for server in servers:  # a warm-up; the peer's also tells its capacity
            found = server.bench(options.trace, 24, 1000.0, 0)
        capacity = (24 - found["failed"]) / found["duration_s"]
        rate = options.rate or options.load * capacity
        print(f"{rate:.3g} requests a second", file=sys.stderr, flush=True)
        pairs = []
        for index in range(options.pairs):
            order = servers if index % 2 == 0 else servers[::-1]
            pairs.append(
                {s.name: s.bench(options.trace, options.requests, rate, index) for s in order}
            )
    finally:
        for server in servers:
            server.close()
    rows = rows_of(pairs, rate)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['claim']:56} {row['metric']:11} {row['ours']:7.3f} / {row['theirs']:7.3f} "
              f"ratio {row['ratio']:.3f} of {row['ratios']}")  # fmt: skip


if __name__ == "__main__":
    main()
