"""kill -9 of a random rank at a random moment, many times over: is anything lost?

Each cycle is a whole run of a tiny model under `triptych train`'s launcher, with a checkpoint after
every step, written beside the training. One rank gets SIGKILL at a random moment between the first
step and the end, so that many kills fall into a save. The launcher starts the ranks again from the
newest complete checkpoint; then every tensor of the last checkpoint (weights and moments) must have
the bits of the unbroken run. A torn checkpoint that was loaded would end the run or change them.

    python benchmarks/killed_ranks.py [--cycles 100] [--seed 0] [--only "tp=2,dp=2,zero=1"] [--json]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [
    str(_TESTS / part) for part in ("procs/train", "procs/user_cases", "pure/train", "procs")
]

from kill_cycles import Cycle, Cycles  # noqa: E402

from sides.options import read_options  # noqa: E402

PLANS = ("dp=2,zero=1", "tp=2", "pp=2", "dp=2,zero=3", "tp=2,dp=2,zero=1")


def main() -> None:
    options = read_options(__doc__, cycles=100, seed=0)
    chance = random.Random(options.seed)
    plans = [options.only] if options.only else PLANS
    found: list[Cycle] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            cycles = Cycles(Path(folder) / str(number), plan)
            share = options.cycles * (number + 1) // len(plans)
            while len(found) < share:
                cycle = cycles.cycle(chance)
                found += [cycle] if cycle.kill else []  # else the run was over before the kill
                if cycle.kill and not options.json:
                    _tell(len(found), plan, cycle)
    equal = sum(cycle.is_equal for cycle in found)
    if options.json:
        row = {"claim": "bits after kill -9", "peer": "the unbroken run", "metric": "runs equal"}
        values = {"ours": equal, "theirs": len(found), "ratio": equal / len(found)}
        print(json.dumps({"rows": [row | values | {"better": "higher"}]}))
    else:
        _sum_up(found, equal)
    sys.exit(equal < len(found))


def _tell(number: int, plan: str, cycle: Cycle) -> None:
    kill = cycle.kill
    assert kill is not None
    saving = ", while saving" if kill.is_saving else ""
    print(
        f"{number:4} {plan}: rank {kill.rank} in step {kill.step} ({kill.phase}{saving}), "
        f"{'equal' if cycle.is_equal else 'NOT EQUAL'}, {cycle.restarts} restarts, "
        f"{cycle.wall_s:.1f} s",
        flush=True,
    )


def _sum_up(found: list[Cycle], equal: int) -> None:
    kills = [cycle.kill for cycle in found if cycle.kill]
    phases = Counter(str(kill.phase) for kill in kills)
    print(f"{equal} of {len(found)} runs ended in the bits of the unbroken run")
    print(f"killed in: {dict(phases)}; {sum(k.is_saving for k in kills)} while saving")
    print(f"median run with its kill: {statistics.median(c.wall_s for c in found):.2f} s")


if __name__ == "__main__":
    main()
