"""Peak bytes of tensors in a training step, ours beside each peer's.

The profiler's memory events come from the allocator itself, so they see every tensor of both sides
alike: parameters, gradients, optimizer state, activations, buffers, also where a storage shrinks.
Each side builds and trains in processes of its own, watched from before its first tensor. The
peak is that of the third step, on the rank that has most.

    python benchmarks/peak_bytes.py [--ranks 2] [--only ZeRO-3] [--json]
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch.profiler import ProfilerActivity, profile, record_function

from sides.options import chosen_pairs, read_options
from sides.pairs import Make, Pair
from sides.ranks import on_ranks
from sides.rows import show
from sides.setting import Setting

MARK = "the step that counts"


def peak_bytes(make: Make, setting: Setting) -> int:
    """The peak of this rank in the third step of one side."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step = make(setting)
        step(0), step(1)
        with record_function(MARK):
            step(2)
    events: Any = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    (mark,) = (event for event in events if event.name() == MARK)
    first_ns, last_ns = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    live, peak = 0, 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        live += event.nbytes()
        if first_ns <= event.start_ns() <= last_ns:
            peak = max(peak, live)
    return peak


def compare(pair: Pair, ranks: int) -> dict[str, Any]:
    """The peaks of a pair."""
    setting = pair.setting(ranks)
    ours, theirs = (
        max(on_ranks(ranks, partial(peak_bytes, make, setting)))
        for make in (pair.ours, pair.theirs)
    )
    return {
        "claim": f"peak tensor bytes, {pair.name}, {ranks} ranks",
        "peer": pair.peer_version,
        "metric": "bytes",
        "ours": ours,
        "theirs": theirs,
        "ratio": ours / theirs,
        "better": "lower",
    }


def main() -> None:
    options = read_options(__doc__, ranks=2)
    pairs = chosen_pairs(options.only)
    show([compare(pair, options.ranks) for pair in pairs], options.json)


if __name__ == "__main__":
    main()
