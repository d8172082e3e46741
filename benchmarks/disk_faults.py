"""Disks that fill, refuse or lie: is the message right, the last checkpoint whole, no rank alone?

Faults of writing: a full disk (a small tmpfs), a quota on one rank (a limit on the size of its
files), a disk that turns read-only, a write that fails once. Faults of what is stored: a torn file,
a flipped byte, a missing shard. Four ranks train a tiny model; after each fault the newest intact
checkpoint must be the one expected, nothing half-written may be left where it can be removed, every
rank must have ended or gone on alike, and a run that goes on must have the losses of the unbroken
one. Mounting needs root.

    python benchmarks/disk_faults.py [--only quota] [--json]
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [
    str(_TESTS / part) for part in ("procs/train", "procs/user_cases", "pure/train", "procs")
]

import faulty_entries as faulty  # noqa: E402
from checkpoints import step_folder  # noqa: E402
from tiny_runs import losses, make_job, run_job  # noqa: E402

from sides.options import read_options  # noqa: E402
from sides.rows import show  # noqa: E402
from triptych.checkpoint.find import newest_intact  # noqa: E402
from triptych.checkpoint.folder import unfinished  # noqa: E402
from triptych.errors import RunError  # noqa: E402
from triptych.train.failure import read_error  # noqa: E402
from triptych.train.folder import RunFolder  # noqa: E402

PLAN = ("parallel.plan=tp=2,dp=2,zero=1", "train.steps=6", "checkpoint.every=2")
RANKS = 4


class Fault:
    """One run with one fault, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.job = make_job(folder)
        self.folder, self.run = folder, folder / "run"

    def fails(self, *settings: str, entry: Any = None) -> str:
        """Trains to its failure; what it says. All ranks have ended with the same words."""
        try:
            run_job(self.job, *PLAN, *settings, entry=entry)
        except RunError as error:
            files = [read_error(RunFolder(self.run), rank) for rank in range(RANKS)]
            assert all(f is not None for f in files), "a rank ended without a word"
            needed = {tuple(re.findall(r"needed: \d+", f.text)[:1]) for f in files if f}
            assert len(needed) == 1, f"ranks disagree: {needed}"
            return str(error)
        raise AssertionError("the run did not fail")

    def goes_on(self, whole: dict[int, float], *settings: str, entry: Any = None) -> str:
        """Trains to the end, with the losses of the unbroken run; what rank 0 said."""
        said = self.folder / "said"
        with _stderr_to(said):
            run_job(self.job, *PLAN, *settings, entry=entry)
        ours = losses(self.job)
        assert ours.keys() == whole.keys()
        assert max(abs(ours[s] - whole[s]) for s in ours) < 1e-5
        return said.read_text()


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """What is written to stderr, by ranks that are forked from now on too, is in a file."""
    from tiny_runs import stop_fork_server

    stop_fork_server()
    kept = os.dup(2)
    with path.open("w") as stream:
        os.dup2(stream.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            stop_fork_server()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def expect(folder: Path, step: int) -> None:
    """The newest intact checkpoint is that of a step, and no part of another is left."""
    found, _ = newest_intact(folder)
    assert found is not None and found.name == f"step-{step:08d}", f"{found}"
    assert not unfinished(folder), f"{unfinished(folder)}"


def checkpoint_bytes(whole: Fault) -> int:
    """Bytes of one checkpoint on the disk."""
    return sum(file.stat().st_size for file in step_folder(whole.run, 6).iterdir())


def full(fault: Fault, whole: Fault) -> str:
    """The third save does not fit; the run stops with its last step unsaved."""
    with small_disk(fault.folder, int(2.6 * checkpoint_bytes(whole))) as disk:
        where = (f'checkpoint.folder="{disk}/c"', "checkpoint.keep_last=3", "checkpoint.retries=0")
        text = fault.fails(*where)
        assert "needed: " in text and "free: " in text
        expect(disk / "c", 4)
    return text


def full_goes_on(fault: Fault, whole: Fault) -> str:
    """A save in the middle that fails is told; the run goes on and saves its last step."""
    said = fault.goes_on(losses(whole.job), "checkpoint.retries=0", entry=faulty.no_room_at_step_4)
    expect(fault.run / "checkpoints", 6)
    return next(line for line in said.splitlines() if "could not be written" in line)


def quota(fault: Fault, whole: Fault) -> str:
    """One rank may not write large files from the third save on."""
    text = fault.fails("checkpoint.retries=0", entry=faulty.has_a_quota)
    expect(fault.run / "checkpoints", 4)
    return text


def read_only(fault: Fault, whole: Fault) -> str:
    """The disk is read-only from the third save on."""
    with small_disk(fault.folder, 100 * checkpoint_bytes(whole)) as disk:
        settings = (f'checkpoint.folder="{disk}/c"', "checkpoint.retries=1")
        text = fault.fails(*settings, entry=faulty.disk_turns_read_only)
        assert "Read-only file system" in text
        expect(disk / "c", 4)
    return text


def fails_once(fault: Fault, whole: Fault) -> str:
    """One write of one rank fails once: it is tried again and told."""
    said = fault.goes_on(losses(whole.job), entry=faulty.write_fails_once)
    expect(fault.run / "checkpoints", 6)
    return next(line for line in said.splitlines() if "again in" in line)


def damaged(damage: Callable[[Path], None]) -> Callable[[Fault, Fault], str]:
    """The newest checkpoint is damaged: the run goes on from the one before, and says so."""

    def check(fault: Fault, whole: Fault) -> str:
        run_job(fault.job, *PLAN)
        damage(step_folder(fault.run, 6))
        said = fault.goes_on(losses(whole.job))
        assert "step-00000006 is skipped" in said and "after step 4" in said
        expect(fault.run / "checkpoints", 6)
        return next(line for line in said.splitlines() if "is skipped" in line)

    return check


def tear(checkpoint: Path) -> None:
    file = checkpoint / "rank-00001.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    file = checkpoint / "rank-00002.optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


def remove(checkpoint: Path) -> None:
    (checkpoint / "rank-00003.optimizer.safetensors").unlink()


FAULTS: dict[str, Callable[[Fault, Fault], str]] = {
    "full disk": full,
    "full disk, goes on": full_goes_on,
    "quota": quota,
    "read-only": read_only,
    "a write fails once": fails_once,
    "torn file": damaged(tear),
    "flipped byte": damaged(flip),
    "missing shard": damaged(remove),
}


def main() -> None:
    options = read_options(__doc__)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        whole = Fault(Path(name) / "whole")
        run_job(whole.job, *PLAN)
        for fault, check in FAULTS.items():
            if options.only not in fault:
                continue
            begun_s, trouble = time.monotonic(), ""
            try:
                text = check(Fault(Path(name) / fault.replace(" ", "-")), whole)
            except (AssertionError, RunError) as error:
                text, trouble = "", f"{type(error).__name__}: {error}"
            row = {"claim": fault, "peer": "what must hold", "metric": "holds", "better": "higher"}
            rows.append(row | {"ours": float(not trouble), "theirs": 1.0, "ratio": not trouble})
            rows[-1]["message"] = trouble or text
            if not options.json:
                print(
                    f"{fault}: {'holds' if not trouble else 'FAILS'} "
                    f"({time.monotonic() - begun_s:.1f} s)\n    "
                    + "\n    ".join((trouble or text).splitlines()),
                    flush=True,
                )
    if options.json:
        show(rows, True)
    sys.exit(not all(row["ratio"] for row in rows))


if __name__ == "__main__":
    main()
