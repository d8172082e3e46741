"""The public functions: besides the command line the only place where search and runtime meet.

Planning and pricing need no torch. What trains is in the optional extra `run`: its modules are
loaded by name, those that build a model only when the job is known to be valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.capture.late import captured
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict as price_plan
from triptych.cost.prediction import Prediction
from triptych.cost.serving.engines import engine_named
from triptych.cost.serving.predict import ServingPrediction
from triptych.cost.serving.predict import predict_serving as price_serving
from triptych.cost.uncertainty import MEMORY_SPARE
from triptych.errors import PlanError, Problem
from triptych.model.load import load_model
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import require_legal
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.plan.serving_short import broken_rules, parse_serving_plan, read_settings
from triptych.plan.toml import load_plan
from triptych.plan.workload import Workload
from triptych.search.objective import Objective
from triptych.search.pins import Pins
from triptych.search.result import SearchResult
from triptych.search.search import Question, answer, search
from triptych.search.serving import ServingQuestion, ServingResult, search_serving

if TYPE_CHECKING:
    from triptych.train.environment import Place
    from triptych.train.folder import RunFolder
    from triptych.train.job import Job
    from triptych.train.planning import Found
    from triptych.train.prepare import Draft
    from triptych.train.result import Summary

__all__ = [
    "TrainResult",
    "find_plan",
    "find_serving_plan",
    "predict",
    "predict_serving",
    "train",
]

_AUTOMATIC = "triptych.search.automatic"
_PREPARE = "triptych.train.prepare"
_PLANNING = "triptych.train.planning"
_LAUNCH = "triptych.train.launch"
_MEETING = "triptych.train.meeting"
_STOP = "triptych.train.stop"
_WORKER = "triptych.train.worker"
_ENVIRONMENT = "triptych.train.environment"


def find_plan(
    model: str | Model,
    cluster: str | Cluster,
    *,
    sequence_length: int,
    global_batch: int,
    fixed: Mapping[str, str] | None = None,
    top: int = 5,
    objective: str = "time",
    price: float | None = None,
    with_front: bool = False,
    spare: float = MEMORY_SPARE,
    auto: bool = False,
) -> SearchResult:
    """The best legal ways to train a model on a cluster, with prices and reasons.

    `fixed` holds settings that every plan keeps, such as `{"tp": "8"}`. `objective` is time,
    memory, gpu-hours or money; `price` is that of a device for an hour. `with_front` adds the
    plans than which none is both faster and smaller. A plan fits if `spare` of its peak is left
    free, by default the error bar of the memory model. `auto` also looks at stages with layers,
    degrees and devices of their own.
    """
    question = Question(
        model=_model(model),
        cluster=_cluster(cluster),
        workload=Workload(sequence_length=sequence_length, global_batch=global_batch),
        pins=Pins.read(fixed or {}),
        objective=Objective(name=objective, price=price),
        spare=spare,
    )
    find = import_module(_AUTOMATIC).answer_automatic if auto else answer
    found: SearchResult = find(question, top=top, with_front=with_front)
    return found


def predict(
    model: str | Model,
    cluster: str | Cluster,
    plan: str | Plan,
    *,
    sequence_length: int,
    global_batch: int,
) -> Prediction:
    """Step time, memory and traffic of one plan. Raises PlanError if the plan is not legal."""
    workload = Workload(sequence_length=sequence_length, global_batch=global_batch)
    shape, where = _model(model), _cluster(cluster)
    chosen = load_plan(plan, shape, where) if isinstance(plan, str) else plan
    require_legal(chosen, shape, where, workload)
    return price_plan(shape, where, workload, chosen)


# ---- serving -----------------------------------------------------------------------------------


def find_serving_plan(
    model: str | Model,
    cluster: str | Cluster,
    requests: ServingWorkload,
    *,
    engine: str = "triptych",
    fixed: Mapping[str, str] | None = None,
    top: int = 5,
) -> ServingResult:
    """The best ways to serve a model on a cluster, with prices and reasons.

    `requests` has lengths, arrivals and objectives; `fixed` holds settings that every plan keeps,
    such as `{"tp": "8", "weights": "fp8"}`. Raises InputError for what cannot be asked.
    """
    question = ServingQuestion(
        model=_model(model),
        cluster=_cluster(cluster),
        workload=requests,
        engine=engine_named(engine),
        fixed=read_settings(",".join(f"{key}={value}" for key, value in (fixed or {}).items())),
    )
    return search_serving(question, top)


def predict_serving(
    model: str | Model,
    cluster: str | Cluster,
    plan: str | ServingPlan,
    requests: ServingWorkload,
    *,
    engine: str = "triptych",
) -> ServingPrediction:
    """Latencies, throughput and room of one serving plan. Raises PlanError if it is not legal."""
    shape, where, described = _model(model), _cluster(cluster), engine_named(engine)
    if isinstance(plan, str):
        most = {"batch": described.max_batch, "chunk": described.chunk_tokens}
        plan = parse_serving_plan(plan, shape, where, **most)
    elif problems := broken_rules(plan, shape, where):
        raise PlanError(problems)
    return price_serving(shape, where, requests, plan, described)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a training run ended."""

    folder: Path
    plan: Plan
    step: int
    loss: float | None  # of the last step; None if the run was complete before
    eval_loss: float | None
    checkpoint: Path | None  # the newest one
    stopped_by: str | None = None  # the signal that ended it before its last step


def train(
    job: str | Path, overrides: Sequence[str] = (), *, say: Callable[[str], None] | None = None
) -> TrainResult | None:
    """Trains as a job file says, with `section.key=value` overrides; resumes if it can.

    Starts the ranks on this machine, or is one of them under `torchrun` or Slurm; then only rank 0
    gets a result. `say` is told what happens meanwhile; by default it goes to stderr.

    Raises InputError before anything is written if the job cannot work, and RunError if a rank
    fails.
    """
    say = say or _say
    read: Job = import_module("triptych.train.job_file").read_job(job, overrides)
    place: Place | None = import_module(_ENVIRONMENT).place()
    return _train_here(read, say) if place is None else _train_as_rank(read, place, say)


# ---- training ----------------------------------------------------------------------------------


def _train_here(job: Job, say: Callable[[str], None]) -> TrainResult:
    draft: Draft = import_module(_PREPARE).draft(job, None, _Planner(), say)
    say(f"starting {draft.choice.plan.world_size} ranks")
    with draft.run.unchanged_if_refused():
        summary: Summary = import_module(_LAUNCH).launch(
            _written(draft),
            draft.choice.plan.world_size,
            job,
            on_gpu=draft.is_on_gpu,
        )
    return _result(draft, summary)


def _train_as_rank(job: Job, place: Place, say: Callable[[str], None]) -> TrainResult | None:
    drafts: list[Draft] = []

    def make_ready() -> RunFolder:
        drafts.append(import_module(_PREPARE).draft(job, place, _Planner(), say))
        refusal.enter_context(drafts[0].run.unchanged_if_refused())
        return _written(drafts[0])

    import_module(_ENVIRONMENT).export(place)
    meeting = import_module(_MEETING)
    store = meeting.meet(place)
    with ExitStack() as refusal:
        run: RunFolder = meeting.prepared(store, place.rank, make_ready)
        summary: Summary = import_module(_WORKER).run_as_rank(run, place, store)
    if not drafts and summary.stopped_by is not None:
        raise SystemExit(import_module(_STOP).EXIT_CODE)
    return _result(drafts[0], summary) if drafts else None


def _written(draft: Draft) -> RunFolder:
    """The run folder of a draft, if the checkpoints in it can be resumed from."""
    import_module(_LAUNCH).require_resumable(draft.job)
    run: RunFolder = import_module(_PREPARE).write_run(draft)
    return run


def _result(draft: Draft, summary: Summary) -> TrainResult:
    return TrainResult(
        folder=draft.run.path,
        plan=draft.choice.plan,
        step=summary.step,
        loss=summary.loss,
        eval_loss=summary.eval_loss,
        checkpoint=summary.checkpoint,
        stopped_by=summary.stopped_by,
    )


class _Planner:
    """Search and cost, as `train` asks for them."""

    def search(
        self, model: Model, cluster: Cluster, workload: Workload, fixed: Mapping[str, str]
    ) -> Found:
        """The best plan that runs. Raises PlanError with what is missing if there is none."""
        result = search(model, cluster, workload, fixed=fixed)
        if result.runnable is None:
            raise PlanError(_nothing(result, cluster))
        found: Found = import_module(_PLANNING).Found(
            plan=result.runnable.plan,
            step_time_s=result.runnable.prediction.step_time_s,
            document=result.to_json(),
        )
        return found

    def price(
        self, model: Model, cluster: Cluster, workload: Workload, plan: Plan
    ) -> Mapping[str, Any]:
        """The prediction as JSON, its timeline included."""
        prediction = price_plan(model, cluster, workload, plan)
        document: dict[str, Any] = dict(prediction.to_json())
        if prediction.timeline is not None:
            document["timeline"] = prediction.timeline.to_json()
        return document


def _nothing(result: SearchResult, cluster: Cluster) -> Problem:
    """Why a search has no plan to run, and what would fit."""
    if result.plans:
        reasons = "; ".join(result.plans[0].prediction.reasons)
        return Problem(f"no plan for {cluster.name} runs today: {reasons}")
    counts = ", ".join(f"{count} by {reason}" for reason, count in result.rejected.items())
    what = f"no plan fits on {cluster.name}; {result.candidates} rejected: {counts}"
    if result.closest is None:
        return Problem(what)
    need = f"the closest, {result.closest.plan.short()}, is {result.closest.over_bytes} bytes over"
    return Problem(what, f"a plan fits into memory; {need}", " | ".join(result.closest.changes))


def _model(model: str | Model) -> Model:
    return load_model(model, capture=captured) if isinstance(model, str) else model


def _cluster(cluster: str | Cluster) -> Cluster:
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
