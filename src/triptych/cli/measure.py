"""`triptych measure`: calibrates the machine or cluster that it runs on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption
from triptych.errors import InputError, PlanError, Problem, RunError

if TYPE_CHECKING:
    from triptych.measure.run import Calibration, Order
    from triptych.train.environment import Place

DTYPES = ("fp32", "bf16", "fp16", "fp64")
TIMEOUT_S = 300.0
"""Without a word from a rank for so long, it is lost."""


def command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write.")] = Path(
        "cluster.toml"
    ),
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Ranks on this machine; default: one a core or GPU."
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="D[,D]", help="Dtypes to measure; auto: fp32, and bf16 where there are GPUs."
        ),
    ] = "auto",
    again: Annotated[
        bool, typer.Option("--again", help="Forget what an attempt before has measured.")
    ] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Measure products, attention, memory-bound operators, host time, updates, collectives.

    Takes minutes. A calibration that was cut off goes on where it stopped. The file is a cluster
    for `--cluster`. Under torchrun or Slurm it measures the ranks of that launch, links between
    nodes included.
    """
    from triptych.train.environment import place

    launched = place()
    if launched is None:
        _require_writable(out)
    if launched is not None and ranks is not None:
        raise InputError(
            Problem(
                f"--ranks {ranks} in a launch of {launched.world_size} ranks",
                "a launcher says how many ranks there are",
                "no --ranks",
            )
        )
    say("loading torch ...")
    from triptych.measure.run import Order

    order = Order(out=out, dtypes=_dtypes(dtype), again=again)
    try:
        found = _as_rank(order, launched) if launched else _here(order, ranks)
    except RunError as error:
        raise RunError(f"{error}{_kept(out)}") from error
    return Answer() if found is None else _answer(order, found)


def _require_writable(out: Path) -> str:
    """The path, if the file can be there. Raises InputError before anything is measured."""
    problems = []
    if out.suffix != ".toml":
        problems.append(
            Problem(f"--out {out}", "a path that ends in .toml is a cluster file", f"{out}.toml")
        )
    if out.is_dir():
        problems.append(Problem(f"--out {out} is a folder", "it is a file to write"))
    folder = out.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        rule = "the folder of the file exists and can be written to"
        problems.append(Problem(f"no folder to write to: {folder}", rule, f"mkdir -p {folder}"))
    if problems:
        raise InputError(problems)
    return str(out)


def _dtypes(text: str) -> tuple[str, ...]:
    import torch

    if text == "auto":
        return ("bf16", "fp32") if torch.cuda.is_available() else ("fp32",)
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [word for word in words if word not in DTYPES]
    if unknown:
        raise PlanError(
            Problem(f"--dtype {', '.join(unknown)}", "a dtype that runs", ", ".join(DTYPES))
        )
    return words


def _kept(out: Path) -> str:
    """What is said after a failure: the figures so far are not lost."""
    from triptych.measure.record import record_path

    kept = record_path(out)
    if not kept.exists():
        return ""
    return f"; what was measured is kept in {kept}, the same command goes on from there"


def _here(order: Order, ranks: int | None) -> Calibration | None:
    """On ranks that this process starts."""
    import torch

    from triptych.cluster.machine import usable_cores
    from triptych.measure.run import measure
    from triptych.runtime.local import local_ranks

    world = ranks or torch.cuda.device_count() or usable_cores()
    work = partial(measure, order, world, say)
    say(f"measuring {world} ranks ...")
    if world == 1:
        torch.set_num_threads(usable_cores())
        return work()
    with local_ranks(world, work, is_fresh=True):
        return work()


def _as_rank(order: Order, place: Place) -> Calibration | None:
    """As one rank of a launch, after the example of training."""
    from triptych.measure.run import measure
    from triptych.train.environment import export
    from triptych.train.meeting import meet, told_by_first
    from triptych.train.worker import process_group

    export(place)
    store = meet(place)
    told_by_first(store, place.rank, lambda: _require_writable(order.out))
    try:
        with process_group(place, store, TIMEOUT_S):
            return measure(order, place.local_world_size, say)
    except (RuntimeError, ConnectionError) as error:
        raise RunError(f"rank {place.rank} failed, or lost its peers: {error}") from error


def _answer(order: Order, found: Calibration) -> Answer:
    cluster, entries = found.cluster, found.record.entries
    device, link = cluster.device, cluster.groups[0].link
    measured = device.measured
    assert measured is not None, "a calibration measures its device"
    noisy = max(entries, key=lambda name: entries[name].noise)
    lines = [f"{cluster.name}: {cluster.num_devices} x {device.name}, {measured.threads} threads"]
    lines += [
        f"{dtype}: products up to {max(kernels.products.rates) / 1e9:.4g} GFLOP/s"
        for dtype, kernels in measured.kernels.items()
    ]
    lines.append(
        f"memory: {device.memory_bytes_per_s / 1e9:.3g} GB/s read and written by a copy, "
        f"{device.read_bytes_per_s / 1e9:.3g} GB/s read by a sum"
    )
    lines.append(
        f"host: {measured.host_s[0] * 1e6:.3g} us a kernel forward, "
        f"{measured.host_s[1] * 1e6:.3g} us backward"
    )
    for name, one in {"link": link, "network": cluster.network}.items():
        if one.measured and (name == "link" or cluster.groups[0].nodes > 1):
            lines.append(
                f"{name}: {one.latency_s * 1e6:.3g} us a message, "
                f"{one.bytes_per_s / 1e9:.3g} GB/s in collectives"
            )
    lines.append(f"spread of repeats: at most {entries[noisy].noise:.0%} ({noisy})")
    lines += [f"{order.out}: a cluster for --cluster", *_next(order)]
    document = {
        "out": str(order.out),
        "cluster": cluster.name,
        "num_devices": cluster.num_devices,
        "figures": {
            name: {"noise": e.noise, "date": e.date, "points": len(e.rows)}
            for name, e in entries.items()
        },
        "resumed_figures": found.resumed,
    }
    return Answer(text="\n".join(lines), document=document)


def _next(order: Order) -> list[str]:
    return [f"next: triptych plan MODEL --cluster {order.out}"]
