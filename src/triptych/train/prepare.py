"""From a job to a run folder that ranks can start from; nothing is written before all is valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triptych.errors import JobError
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml
from triptych.train.environment import Place
from triptych.train.folder import RunFolder, write_json, write_text
from triptych.train.fork_server import start_fork_server
from triptych.train.job import Job
from triptych.train.job_file import job_toml
from triptych.train.peak import Peak, peak_of
from triptych.train.planning import Choice, Planner, choose_plan
from triptych.train.source import Source, read_source
from triptych.train.text import DataSet, Say, build_data, data_lines, read_text, write_data
from triptych.train.trackers import missing_trackers
from triptych.units import format_bytes

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A run that is valid, with its text as tokens, before its folder is written."""

    job: Job
    source: Source
    choice: Choice
    data: DataSet
    peak: Peak
    prediction: Mapping[str, Any]

    @property
    def run(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(Path(self.job.run.folder or ""))

    @property
    def is_on_gpu(self) -> bool:
        """True if the ranks have GPUs."""
        return self.choice.cluster.device.kind != "cpu"


def draft(job: Job, place: Place | None, planner: Planner, say: Say) -> Draft:
    """Everything that a run needs. Raises the InputError of whatever cannot work.

    Only the token cache is written, and only if there is enough text. Under a launch (`place`) the
    ranks exist already; else the fork server for them starts as soon as the job is sure to run.
    """
    if problems := missing_trackers(job.run.trackers):
        raise JobError(problems)
    source = read_source(job)
    choice = choose_plan(job, source.model, place, planner)
    text = read_text(job)

    def start_ranks() -> None:
        if place is None and choice.cluster.device.kind == "cpu":
            start_fork_server(choice.plan.world_size, source.model.family)

    say(f"plan: {choice.plan.short()} on {choice.plan.world_size} ranks of {choice.cluster.name}")
    size_bytes = sum(corpus.size_bytes for corpus in text.train)
    num_files = sum(len(corpus.files) for corpus in text.train)
    say(f"reading {format_bytes(size_bytes)} of data in {num_files} files")
    data = _build(
        text_is_enough=text.is_surely_enough(job),
        start_ranks=start_ranks,
        build=lambda: build_data(text, job, source.tokenizer, say, choice.batch_unit),
    )
    for line in data_lines(text, data, job):
        say(line)
    prediction = planner.price(source.model, choice.cluster, choice.workload, choice.plan)
    for line in _pipeline_lines(choice, prediction):
        say(line)
    peak = peak_of(
        choice.cluster,
        choice.plan.world_size,
        choice.plan.precision.parameter,
        job.run.peak_tflops,
    )
    say(peak.text)
    say(kernel_line(choice.plan))
    return Draft(job=job, source=source, choice=choice, data=data, peak=peak, prediction=prediction)


def kernel_line(plan: Plan) -> str:
    """Which attention runs, and what is absent that some would expect."""
    absent = "" if find_spec("flash_attn") else "; flash-attn is absent and not needed"
    return f"kernels: attention {plan.attention} of torch, fused AdamW of torch{absent}"


def _pipeline_lines(choice: Choice, prediction: Mapping[str, Any]) -> Iterator[str]:
    """How full the pipeline is, if there is one."""
    plan, bubble = choice.plan, prediction.get("bubble_fraction")
    if plan.pp == 1 or bubble is None:
        return
    count = plan.num_microbatches(choice.workload.global_batch)
    yield f"pipeline: {count} micro-batches over {plan.pp} ranks, predicted bubble {bubble:.0%}"
    if count < plan.pp:
        yield (
            f"warning: fewer micro-batches ({count}) than pipeline ranks ({plan.pp}) leave ranks "
            "idle; a larger [train] global_batch, a smaller microbatch or fewer ranks do not"
        )


def _build(
    *, text_is_enough: bool, start_ranks: Callable[[], None], build: Callable[[], DataSet]
) -> DataSet:
    """Builds the data while the ranks' imports run, unless the data might be refused."""
    if text_is_enough:
        start_ranks()
        return build()
    data = build()
    start_ranks()
    return data


def write_run(draft: Draft) -> RunFolder:
    """The run folder holds all that the ranks and the report read."""
    run = draft.run
    write_text(run.job, job_toml(draft.job))
    write_text(run.plan, plan_toml(draft.choice.plan))
    write_text(run.config, json.dumps(dict(draft.source.config), indent=1) + "\n")
    write_data(run, draft.data, draft.source.tokenizer.folder)
    write_json(run.peak, draft.peak.to_json())
    version = {"schema_version": SCHEMA_VERSION}
    write_json(run.path / "prediction.json", version | dict(draft.prediction))
    search = run.path / "search.json"
    if draft.choice.search is not None:
        write_json(search, version | dict(draft.choice.search))
    else:
        search.unlink(missing_ok=True)  # of an earlier launch with another plan
    return run
