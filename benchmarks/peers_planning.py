"""Triptych beside Calculon and SimuMax: errors on the measured runs that they can express.

Each is asked with its own inputs and its own system files; only the network between nodes that a
run states is put into Calculon's. Their checkouts are the user's:

    git clone https://github.com/calculon-ai/calculon
    git clone https://github.com/MooreThreads/SimuMax     # its requirements: sympy, pandas, ...

    python benchmarks/peers_planning.py training.csv [--calculon DIR] [--simumax DIR]
        [--simumax-python PYTHON] [--sources NAME ...] [--rows out.csv] [--json]

What one of them lacks is counted by reason. A table of measured runs is a source (`validate`).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers import calculon, simumax
from triptych.validate.case import Case, case_of
from triptych.validate.figures import errors
from triptych.validate.table import Skip, read_table
from triptych.validate.train import outcome_of

HERE = Path(__file__).parent / "peers"


class Answer(NamedTuple):
    """What a peer and we say of one measured run."""

    case: Case
    ours: tuple[float, float | None]  # relative error of the step time, of the peak
    theirs: tuple[float, float | None]


def read_cases(path: Path) -> list[Case]:
    """The runs of a table that have a step time and that we can price."""
    cases = []
    for row in read_table(path, ["id"], ["iteration_time_s"]):
        try:
            case = case_of(row)
        except Skip:
            continue
        if case.measured_s:
            cases.append(case)
    return cases


def ask(
    cases: Sequence[Case],
    request: Callable[[Case], dict[str, Any]],
    command: Sequence[str],
) -> tuple[list[tuple[Case, dict[str, Any]]], Counter[str]]:
    """What a peer answers for the runs that it can express, and why not for the others."""
    asked, lacking = [], Counter[str]()
    for case in cases:
        try:
            asked.append((case, request(case)))
        except Skip as reason:
            lacking[str(reason)] += 1
    lines = "\n".join(json.dumps(one) for _, one in asked)
    run = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    found = []
    for (case, _), line in zip(asked, run.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        if "refused" in answer:
            lacking[f"refused: {answer['refused'][:60]}"] += 1
        else:
            found.append((case, answer))
    return found, lacking


def beside(case: Case, answer: dict[str, Any]) -> Answer:
    """Their error and ours."""
    outcome = outcome_of(case)
    assert case.measured_s and outcome.time_error is not None
    peak, theirs = case.measured_bytes, None
    if peak and answer["bytes"]:
        theirs = answer["bytes"] / peak - 1
    return Answer(
        case,
        (outcome.time_error, outcome.memory_error if peak else None),
        (answer["seconds"] / case.measured_s - 1, theirs),
    )


def tables(answers: Sequence[Answer], name: str) -> list[dict[str, Any]]:
    """A row for each source and quantity: mean absolute errors, theirs over ours."""
    by_source: dict[str, list[Answer]] = {}
    for answer in answers:
        by_source.setdefault(answer.case.row.source, []).append(answer)
    rows = []
    for source, listed in by_source.items():
        for index, metric in enumerate(("step time", "memory")):
            both = [
                (one.ours[index], one.theirs[index])
                for one in listed
                if one.ours[index] is not None and one.theirs[index] is not None
            ]
            if not both:
                continue
            ours, theirs = (errors([pair[side] for pair in both]) for side in (0, 1))
            rows.append(
                {
                    "claim": f"{source}: {metric}, {len(both)} rows",
                    "peer": name,
                    "metric": "mean absolute relative error",
                    "ours": ours["mean_abs_rel_error"],
                    "theirs": theirs["mean_abs_rel_error"],
                    "ratio": theirs["mean_abs_rel_error"] / ours["mean_abs_rel_error"],
                    "better": "lower",
                    "medians": [side["median_abs_rel_error"] for side in (ours, theirs)],
                }
            )
    return rows


def write_rows(path: Path, answers: Sequence[tuple[str, Answer]]) -> None:
    """Every run with both errors."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["peer", "id", "ours_time", "theirs_time", "ours_peak", "theirs_peak"])
        for peer, one in answers:
            errors_of = (one.ours[0], one.theirs[0], one.ours[1], one.theirs[1])
            writer.writerow([peer, one.case.row.id, *errors_of])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--simumax", type=Path)
    parser.add_argument("--simumax-python", default=sys.executable)
    parser.add_argument("--sources", nargs="*", help="tables to look at; default: all")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = read_cases(options.table)
    if options.sources:
        cases = [case for case in cases if case.row.source in options.sources]
    peers = []
    if options.calculon:
        command = [sys.executable, str(HERE / "ask_calculon.py"), str(options.calculon)]
        peers.append(("Calculon", calculon.request, command))
    if options.simumax:
        command = [options.simumax_python, str(HERE / "ask_simumax.py"), str(options.simumax)]
        peers.append(("SimuMax", simumax.request, command))
    rows: list[dict[str, Any]] = []
    counted, everything = {}, []
    for name, request, command in peers:
        found, lacking = ask(cases, request, command)
        answers = [beside(*one) for one in found]
        everything += [(name, answer) for answer in answers]
        rows += tables(answers, name)
        counted[name] = {"expressed": len(answers), "lacking": dict(lacking.most_common())}
    if options.rows:
        write_rows(options.rows, everything)
    if options.json:
        print(json.dumps({"rows": rows, "counted": counted, "priced by us": len(cases)}))
        return
    print(f"{len(cases)} measured runs that we price")
    for name, count in counted.items():
        print(f"\n{name} expresses {count['expressed']} of them; it lacks:")
        for reason, number in count["lacking"].items():
            print(f"  {number:5d}  {reason}")
        print("  mean (median) absolute error in %: ours, theirs")
        for row in rows:
            if row["peer"] == name:
                one, other = (f"{100 * row[side]:7.1f}" for side in ("ours", "theirs"))
                medians = [f"({100 * value:.1f})" for value in row["medians"]]
                print(f"  {one} {medians[0]:8s} {other} {medians[1]:8s}  {row['claim']}")


if __name__ == "__main__":
    main()
