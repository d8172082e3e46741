"""The run folder: what a run writes, under which names.

job.toml  plan.toml  config.json  data.json  peak.json
                                                what the ranks read: written before they start
search.json  prediction.json                    for the report only
metrics.jsonl  timeline.json                    what happened
trace.json  samples.jsonl  tensorboard/         if the job asks for them
status/rank-N  errors/rank-N.txt                where each rank is, and how it failed
errors/stack-rank-N.txt                         where it was when it was asked to end
attempts/K/status, errors                       the same of attempts before a restart
checkpoints/  tokens/
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import InputError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def job(self) -> Path:
        """The resolved job."""
        return self.path / "job.toml"

    @property
    def plan(self) -> Path:
        """The plan that the ranks run."""
        return self.path / "plan.toml"

    @property
    def config(self) -> Path:
        """The Hugging Face config of the model."""
        return self.path / "config.json"

    @property
    def data(self) -> Path:
        """Where the tokens are."""
        return self.path / "data.json"

    @property
    def metrics(self) -> Path:
        """One JSON line a step and an evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """The recorded timeline of the last step."""
        return self.path / "timeline.json"

    @property
    def trace(self) -> Path:
        """Chosen steps of all ranks, for ui.perfetto.dev."""
        return self.path / "trace.json"

    @property
    def samples(self) -> Path:
        """What the model said, one JSON line a prompt."""
        return self.path / "samples.jsonl"

    @property
    def peak(self) -> Path:
        """What utilisation is measured against."""
        return self.path / "peak.json"

    def status(self, rank: int) -> Path:
        """Where a rank is in the run."""
        return self.path / "status" / f"rank-{rank}"

    def error(self, rank: int) -> Path:
        """How a rank failed."""
        return self.path / "errors" / f"rank-{rank}.txt"

    def stack(self, rank: int) -> Path:
        """Where a rank was when it was asked to end."""
        return self.path / "errors" / f"stack-rank-{rank}.txt"

    def attempt(self, number: int) -> RunFolder:
        """What is left of an attempt that was followed by a restart."""
        return RunFolder(self.path / "attempts" / str(number))

    def keep_attempt(self, rank: int, number: int) -> None:
        """Moves what a rank left in an attempt out of the way of the next one."""
        kept = self.attempt(number)
        for file in (self.status(rank), self.error(rank), self.stack(rank)):
            if file.exists():
                target = kept.path / file.parent.name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)

    @contextmanager
    def unchanged_if_refused(self) -> Iterator[None]:
        """If what happens inside ends as bad input, the prepared files are as they were before."""
        names = ("job.toml", "plan.toml", "config.json", "data.json", "peak.json")
        files = [self.path / name for name in (*names, "search.json", "prediction.json")]
        former = {file: file.read_bytes() if file.is_file() else None for file in files}
        try:
            yield
        except InputError:
            for file, content in former.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    file.write_bytes(content)
            raise

    def clear_last_launch(self) -> None:
        """Removes the status and error files of an earlier launch in this folder."""
        shutil.rmtree(self.path / "attempts", ignore_errors=True)
        for name in ("status", "errors"):
            folder = self.path / name
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("*rank-*"):
                file.unlink()


def predicted_peak_bytes(run: RunFolder) -> float | None:
    """What was predicted for the largest rank, to be shown; None if nothing was."""
    try:
        document = json.loads((run.path / "prediction.json").read_text("utf-8"))
        return float(document["peak_memory_gib"]) * 1024**3
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_text(path: Path, text: str) -> None:
    """The file has this content, or (after a crash) still its former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """As `write_text`, for a JSON document."""
    write_text(path, json.dumps(document, indent=1) + "\n")
