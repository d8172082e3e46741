"""Which plan a job runs: the one it names, or the best that a search finds.

The search and the prices come in as a `Planner`: `train` itself knows neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from triptych.cluster.cluster import Cluster
from triptych.cluster.local import local_cluster
from triptych.cluster.text import parse_cluster
from triptych.errors import JobError, PlanError, Problem
from triptych.model.model import Model
from triptych.plan.batch import RULE
from triptych.plan.freeze import frozen_names, known_names, matching_names
from triptych.plan.launch import degrees, launch_problem
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan
from triptych.plan.routing import routing_problems
from triptych.plan.rules import unrunnable, verify
from triptych.plan.short import parse_plan, precision, read_words
from triptych.plan.toml import read_plan
from triptych.plan.workload import Workload
from triptych.train.batch import fit_batch
from triptych.train.environment import Place
from triptych.train.job import Job

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: its best plan that runs today, and its JSON document."""

    plan: Plan
    step_time_s: float  # predicted
    document: Mapping[str, Any]


class Planner(Protocol):
    """Searches and prices plans."""

    def search(
        self, model: Model, cluster: Cluster, workload: Workload, fixed: Mapping[str, str]
    ) -> Found:
        """The best plan with some settings fixed. Raises PlanError if there is none."""

    def price(
        self, model: Model, cluster: Cluster, workload: Workload, plan: Plan
    ) -> Mapping[str, Any]:
        """The prediction for a plan as a JSON document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan of a run, where it runs, and how it was found."""

    plan: Plan
    cluster: Cluster
    workload: Workload
    search: Mapping[str, Any] | None  # None: the job named the plan
    batch_unit: int = 1  # plan and job fix this divisor of the global batch


def choose_plan(job: Job, model: Model, place: Place | None, planner: Planner) -> Choice:
    """The plan of a job on this machine or in this launch; legal, and runnable today.

    Raises JobError or PlanError with every broken rule and what would work, ModelError for a
    pattern of frozen parameters that matches nothing.
    """
    if job.train.freeze:
        frozen_names(job.train.freeze, known_names(model), model)
    if job.optimizer.no_decay:
        matching_names("no_decay", job.optimizer.no_decay, known_names(model), model)
    workload = Workload(
        sequence_length=job.data.sequence_length,
        global_batch=job.train.global_batch,
        optimizer=job.optimizer.name,
    )
    if job.parallel.plan == AUTO:
        return _searched(job, model, place, workload, planner)
    return _named(job, model, place, workload)


# --- a search -----------------------------------------------------------------------------------


def _searched(
    job: Job, model: Model, place: Place | None, workload: Workload, planner: Planner
) -> Choice:
    cluster = launch_cluster(place, job.parallel.ranks)
    found: list[Found] = []
    problems: list[Problem] = []
    for fixed in _searches(job, cluster):
        try:
            found.append(planner.search(model, cluster, workload, fixed))
        except PlanError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if not found:
        raise PlanError(problems or _no_share(job, cluster))
    best = min(found, key=lambda f: f.step_time_s)
    if problems := [*_routing(job, best.plan, model), *_samples(job, best.plan)]:
        raise PlanError(problems)
    unit = (job.train.microbatch or 1) * (job.train.accumulation or 1)
    return Choice(
        plan=best.plan,
        cluster=cluster,
        workload=workload,
        search=best.document,
        batch_unit=unit,
    )


def _searches(job: Job, cluster: Cluster) -> list[dict[str, str]]:
    """The settings to keep: one search, or one for each data degree if accumulation is given.

    Given accumulation, each data degree leaves one micro-batch.
    """
    fixed = _fixed(job)
    accumulation = job.train.accumulation
    if accumulation is None:
        return [fixed]
    shares = [
        {"dp": str(dp), "microbatch": str(job.train.global_batch // (accumulation * dp))}
        for dp in divisors(cluster.num_devices)
        if job.train.global_batch % (accumulation * dp) == 0
    ]
    return [
        fixed | share for share in shares if all(fixed.get(k, v) == v for k, v in share.items())
    ]


def _no_share(job: Job, cluster: Cluster) -> list[Problem]:
    batch, accumulation = job.train.global_batch, job.train.accumulation
    what = (
        f"[train] accumulation = {accumulation} with global_batch = {batch}"
        + (f" and microbatch = {job.train.microbatch}" if job.train.microbatch else "")
        + f" on {cluster.num_devices} ranks"
    )
    return [Problem(what, RULE, "accumulation left out: the search then chooses it")]


def _fixed(job: Job) -> dict[str, str]:
    """The settings that the search must keep, under their full names."""
    words = [f"{key}={value}" for key, value in job.parallel.fix.items()]
    fixed = {
        key: "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in read_words(",".join(words)).items()
    }
    if job.train.microbatch is not None:
        fixed["microbatch"] = str(job.train.microbatch)
    if job.parallel.precision != AUTO:
        fixed["precision"] = job.parallel.precision
    if job.moe.capacity_factor is not None:
        fixed.setdefault("cp", "1")  # `routing_problems` says why
    return fixed


def _routing(job: Job, plan: Plan, model: Model) -> list[Problem]:
    has_losses = bool(job.moe.aux_loss or job.moe.z_loss)
    factor = job.moe.capacity_factor
    return list(routing_problems(plan, model, has_losses=has_losses, capacity_factor=factor))


# --- a plan of the user's -----------------------------------------------------------------------


def _named(job: Job, model: Model, place: Place | None, workload: Workload) -> Choice:
    text = job.parallel.plan
    if text.endswith(".toml"):
        plan, says = read_plan(Path(text)), {"microbatch", "precision"}
    else:
        says = set(read_words(text))
        plan = parse_plan(text, model, _cluster_for(text, model, place, job.parallel.ranks))
    _require_ranks(plan, place, job.parallel.ranks)
    plan = _with_precision(plan, job, "precision" in says)
    plan, problems = fit_batch(
        plan,
        workload.global_batch,
        microbatch=job.train.microbatch,
        accumulation=job.train.accumulation,
        plan_says="microbatch" in says,
    )
    cluster = launch_cluster(place, plan.world_size)
    told = {problem.rule for problem in problems}  # the batch equation is told once
    problems += [p for p in verify(plan, model, cluster, workload) if p.rule not in told]
    problems += [Problem(reason, "a plan runs today") for reason in unrunnable(plan, model)]
    problems += [*_routing(job, plan, model), *_samples(job, plan)]
    if problems:
        raise PlanError(problems)
    is_fixed = job.train.microbatch or "microbatch" in says or not plan.is_uniform
    fixed = plan.microbatch if is_fixed else 1
    unit = plan.dp * fixed * (job.train.accumulation or 1)
    return Choice(plan=plan, cluster=cluster, workload=workload, search=None, batch_unit=unit)


def _cluster_for(text: str, model: Model, place: Place | None, ranks: int | None) -> Cluster:
    """Where a short form runs: what is launched or asked for, all GPUs, or as many CPU ranks as
    its degrees multiply to.
    """
    if place is not None or ranks is not None:
        return launch_cluster(place, ranks)
    here = local_cluster()
    if here.device.kind != "cpu":
        return here
    return local_cluster(parse_plan(text, model).world_size)


def _samples(job: Job, plan: Plan) -> Iterator[Problem]:
    """Rows that every rank has whole are what generation needs."""
    if job.train.sample_prompts and len({stage.data for stage in plan.stages}) > 1:
        what = "[train] sample_prompts under stages with data degrees of their own"
        yield Problem(what, "prompts are continued by one replica", "no sample_prompts")


def _require_ranks(plan: Plan, place: Place | None, ranks: int | None) -> None:
    """Returns if the plan has the ranks that were launched or asked for. Raises JobError."""
    if place is not None and place.world_size != plan.world_size:
        ours = f"`triptych train JOB`, which starts the {plan.world_size} ranks itself"
        command = f"-m triptych train JOB, or without a launcher {ours}"
        raise JobError(launch_problem(plan, place.world_size, command))
    if ranks is not None and ranks != plan.world_size:
        what = f"[parallel] ranks = {ranks}, but the plan has {degrees(plan)} ranks"
        works = f"ranks = {plan.world_size}, or none in the job"
        raise JobError(Problem(what, "ranks = TP x PP x CP x DP", works))


def _with_precision(plan: Plan, job: Job, plan_says: bool) -> Plan:
    asked = job.parallel.precision
    if asked == AUTO:
        return plan
    if plan_says and plan.precision.parameter != asked:
        what = f"[parallel] precision = {asked!r}, but the plan says {plan.precision.parameter!r}"
        raise JobError(Problem(what, "job and plan agree", 'precision = "auto"'))
    return plan.with_(precision=precision(asked))


# --- where --------------------------------------------------------------------------------------


def launch_cluster(place: Place | None, ranks: int | None) -> Cluster:
    """The cluster of the ranks: this machine, or the nodes of a launch, all like this one."""
    if place is None:
        return local_cluster(ranks)
    here = local_cluster(place.local_world_size)
    nodes = place.world_size // place.local_world_size
    if nodes == 1:
        return here
    device = "cpu" if here.device.kind == "cpu" else here.device.name
    return parse_cluster(f"{nodes}x{place.local_world_size}x{device}")
