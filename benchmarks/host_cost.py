"""What the host pays per layer and micro-batch: Python and launches, with tensors of no size.

One rank of a process group whose collectives do nothing (torch's `fake` back end), so a step is
nothing but the cost that a GPU would have to hide. Both sides take turns in one process; what
counts is processor time of the whole step, optimizer included, over layers x micro-batches of the
rank. `alone` is the same loop on the bare module, without any parallelism: what is left beyond it
is the price of each engine. `calls` are Python and C function calls, which no noise can move.

With `--compiled` our layers are compiled (`compile = true` in a plan), and each peer stands there
as its users compile it, layer by layer, and as it is; `alone` is compiled then, too.

    python benchmarks/host_cost.py [--pairs 15] [--only FSDP2] [--compiled] [--json]
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from sides.options import read_options
from sides.pairs import Pair, chosen, compiled_pairs
from sides.ranks import on_fake_rank
from sides.replicas import alone
from sides.rows import ratio_row, show
from sides.setting import Setting, Trainer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
PEERS = ("FSDP2", "DTensor", "pipelining")
STEPS = 4
"""Steps in one measurement."""


def setting_of(pair: Pair) -> tuple[Setting, int]:
    """What a pair runs, on as many ranks as is usual; and which rank it is."""
    ranks = 4 if pair.is_pipeline else 2 if pair.peer.startswith("DTensor") else 8
    return pair.setting(ranks, length=16, config=CONFIG), 1 if pair.is_pipeline else 0


def work_of(pair: Pair, setting: Setting) -> int:
    """Layers x micro-batches of a rank in one step."""
    if pair.is_pipeline:
        return setting.layers // setting.ranks * (setting.sequences // setting.microbatch)
    replicas = 1 if pair.peer.startswith("DTensor") else setting.ranks
    return setting.layers * (setting.sequences // replicas // setting.microbatch)


def cpu_us(step: Trainer) -> float:
    """Processor microseconds of a step."""
    began_ns = time.process_time_ns()
    for index in range(STEPS):
        step(index)
    return (time.process_time_ns() - began_ns) / STEPS / 1e3


def calls(step: Trainer) -> int:
    """Function calls of a step, of Python and of C."""
    profile = cProfile.Profile()
    profile.runcall(step, 0)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def compare(pair: Pair, setting: Setting, count: int) -> dict[str, Any]:
    """Ratio of interleaved measurements of a pair, on its one rank."""
    steps = pair.ours(setting), pair.theirs(setting)
    for step in steps:
        cpu_us(step)  # warm
    per = work_of(pair, setting)
    found = []
    for index in range(count):
        order = steps if index % 2 == 0 else steps[::-1]
        spent = {id(step): cpu_us(step) / per for step in order}
        found.append((spent[id(steps[0])], spent[id(steps[1])]))
    claim = f"host cost, {pair.name}"
    row = ratio_row(claim, pair.peer_version, "CPU us per layer and micro-batch", found)
    return row | {"calls": [round(calls(step) / per) for step in steps]}


def alone_us(count: int, compiled: bool) -> float:
    """The same loop without any parallelism."""
    setting = Setting(ranks=1, sequences=4, microbatch=2, length=16, config=CONFIG)
    step, per = alone(setting, compiled), setting.layers * 2
    cpu_us(step)
    return statistics.median(cpu_us(step) / per for _ in range(count))


def main() -> None:
    options = read_options(__doc__, ("compiled",), pairs=15)
    bare_us = on_fake_rank(1, 0, partial(alone_us, options.pairs, options.compiled))
    rows = []
    for pair in (compiled_pairs if options.compiled else chosen)(options.only):
        if pair.peer.startswith(PEERS):
            setting, rank = setting_of(pair)
            run = partial(compare, pair, setting, options.pairs)
            row = on_fake_rank(setting.ranks, rank, run)
            beyond = (row["ours"] - bare_us) / (row["theirs"] - bare_us)
            rows.append(row | {"alone": bare_us, "ratio_beyond_alone": beyond})
    show(rows, options.json)


if __name__ == "__main__":
    main()
