"""Ten thousand random requests and a thousand leaving clients, on a pool of 32 blocks.

Starts `triptych serve` on a small random model and sends it what its own OpenAPI document allows
(drawn by schemathesis), each request twice more with something broken, and clients that leave
before, in and behind their answers. Beside them clients that stay say what they say alone. At the
end health is OK, no block is held, and memory has not grown.

    python benchmarks/serving_robustness.py [--requests 10000] [--leavers 1000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1] / "tests" / "procs" / "serve"
sys.path.insert(0, str(_TESTS))

import httpx2  # noqa: E402
import psutil  # noqa: E402
from crowds import Odd, crowd, malformed, schema_requests, send_all, stay  # noqa: E402
from serve_samples import END, config_of, save_model  # noqa: E402

from sides.server import memory_bytes, server  # noqa: E402

NUM_BLOCKS, NUM_TOKENS, AT_ONCE = 32, 96, 1000
STAYS = [[number, 3, 7] for number in range(10, 15)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--leavers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), config_of(max_position_embeddings=512))
        config = {"eos_token": END, "chat_template": TEMPLATE}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        sizes = ("--num-blocks", str(NUM_BLOCKS), "--max-running", "16", "--name", "tiny")
        with server(Path(folder), *sizes) as (url, process):
            report = put_to_the_test(url.removesuffix("/v1"), process, options)
    if options.json:
        print(json.dumps({"rows": [_row(name, *pair) for name, pair in report.items()]}))
    else:
        for name, (found, wanted) in report.items():
            print(f"{name:44} {found} of {wanted}")
    sys.exit(any(found != wanted for found, wanted in report.values()))


def put_to_the_test(
    url: str, process: psutil.Process, options: argparse.Namespace
) -> dict[str, tuple[int, int]]:
    """What was found and what should be, by claim."""
    alone = asyncio.run(texts(url))
    _say(options, "random and malformed requests")
    documented, odd, first_bytes = 0, [], 0
    for start in range(0, options.requests, AT_ONCE):
        count = min(AT_ONCE, options.requests - start)
        statuses, found = send_all(url, mixed(url, count, options.seed + start))
        documented, odd = documented + count - len(found), odd + found
        first_bytes = first_bytes or memory_bytes(process)
        _say(options, f"{start + count}: {dict(sorted(statuses.items()))}, {len(found)} odd")
    for each in odd[:10]:
        _tell(each)
    _say(options, "clients that leave")
    beside = 0
    for start in range(0, options.leavers, 100):
        found_texts = asyncio.run(
            crowd(url, STAYS, NUM_TOKENS, min(100, options.leavers - start), options.seed + start)
        )
        beside += sum(a == b for a, b in zip(found_texts, alone, strict=True))
    figures = at_rest(url)
    growth = memory_bytes(process) / max(1, first_bytes)
    _say(options, f"memory at the end / after the first thousand requests: {growth:.3f}")
    health = httpx2.get(url + "/health").json()
    return {
        "documented answers": (documented, options.requests),
        "texts beside leavers as alone": (beside, len(STAYS) * -(-options.leavers // 100)),
        "texts at the end as alone": (
            sum(a == b for a, b in zip(asyncio.run(texts(url)), alone, strict=True)),
            len(STAYS),
        ),
        "free blocks at the end": (int(figures["triptych_kv_blocks_free"]), NUM_BLOCKS),
        "health OK": (int(health == {"status": "ok"}), 1),
        "memory at the end within 1.1 of the beginning": (int(growth < 1.1), 1),
    }


def mixed(url: str, count: int, seed: int) -> Iterator[Any]:
    """Requests, a third as the schema allows, the others broken."""
    draws, left = random.Random(seed), count
    for sent in schema_requests(url, -(-count // 3), seed):
        for made in (sent, malformed(sent, draws), malformed(sent, draws))[:left]:
            left -= 1
            yield made


async def texts(url: str) -> list[str]:
    """What the staying clients say alone, one after the other."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        return [await stay(client, ids, NUM_TOKENS) for ids in STAYS]


def at_rest(url: str) -> dict[str, float]:
    """The server's figures once nothing runs."""
    while True:
        found = {}
        for line in httpx2.get(url + "/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.split("{")[0]] = float(value)  # one model on one group
        if found["triptych_requests_running"] == found["triptych_requests_waiting"] == 0:
            return found
        time.sleep(0.05)


def _row(name: str, found: int, wanted: int) -> dict[str, Any]:
    row = {"claim": name, "peer": "all", "metric": "count", "ours": found, "theirs": wanted}
    return {**row, "ratio": found / wanted, "better": "higher"}


def _tell(odd: Odd) -> None:
    print(f"ODD {odd.status} {odd.text[:300]}\n    {odd.sent}"[:1000], file=sys.stderr)


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print(text, flush=True)


if __name__ == "__main__":
    main()
