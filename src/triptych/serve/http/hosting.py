"""What a server is to run: models, and groups of ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych.errors import InputError, Problem
from triptych.fleet.llm_file import HostGroup, LlmFile
from triptych.fleet.models import Shape
from triptych.fleet.room import room
from triptych.fleet.shared import policy_of
from triptych.fleet.terms import Terms
from triptych.plan.plan import Plan, Precision
from triptych.serve.core.order import Policy
from triptych.serve.core.request import DEFAULT_CLASS
from triptych.serve.engine.hosts import Hosted
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.messages import Start

_RULE = ("a model that runs keeps all but its objectives", "another name, or a new start")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model to be served.

    Args:
        source: its folder.
        settings: sizes of its engines.
        policy: how their schedulers order requests.
        terms: its objectives, by which requests are routed and refused; its claim.
        plan: of its engines; None: what the shape of a group says.

    """

    source: ModelSource
    settings: EngineSettings = field(default_factory=EngineSettings)
    policy: Policy = field(default_factory=Policy)
    terms: Terms = field(default_factory=Terms)
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Models by name and the groups that hold them.

    Args:
        models: those that clients may ask.
        groups: at least one.
        memory_bytes: of each rank, for weights, keys and values of all its models; None: each
            takes what it finds.
        restarts: whether a group that is lost is started again; else the server ends.

    """

    models: Mapping[str, ServedModel]
    groups: tuple[HostGroup, ...]
    memory_bytes: int | None = None
    restarts: bool = True

    def start(self, group: HostGroup) -> Start:
        """What the process of a group is told first."""
        hosted = [self.hosted(name, group.shape) for name in group.models]
        return Start(group.shape.devices, hosted, self.cache_bytes(group.shape, group.models))

    def hosted(self, name: str, shape: Shape) -> Hosted:
        """A model on groups of a shape."""
        model = self.models[name]
        plan = model.plan or _plan_of(model.source, shape)
        claim = model.terms.claim
        return Hosted(name, model.source.folder, plan, model.settings, model.policy, claim)

    def cache_bytes(self, shape: Shape, names: Sequence[str]) -> int | None:
        """What weights leave for keys and values of some models on a rank of a group."""
        if self.memory_bytes is None:
            return None
        held = (room(self.models[name].source.folder, shape, 1).weights_bytes for name in names)
        return self.memory_bytes - sum(held)

    def require_successor(self, before: Hosting) -> None:
        """Raises InputError for what cannot change while a model runs: all but its objectives."""
        problems = []
        for name in sorted(set(self.models) & set(before.models)):
            new, old = self.models[name], before.models[name]
            for what in ("source", "settings", "plan"):
                if getattr(new, what) != getattr(old, what):
                    problems.append(Problem(f"{name}: its {what} changed", *_RULE))
            if new.terms.claim != old.terms.claim:
                problems.append(Problem(f"{name}: its weight or guarantee changed", *_RULE))
        if self.memory_bytes != before.memory_bytes:
            problems.append(Problem("memory_gib changed", *_RULE))
        if problems:
            raise InputError(problems)

    def with_models(self, models: Sequence[Sequence[str]]) -> Hosting:
        """The same groups with other models on them."""
        pairs = zip(self.groups, models, strict=True)
        return replace(self, groups=tuple(HostGroup(g.shape, tuple(m), g.cores) for g, m in pairs))


def single(name: str, model: ServedModel, cores: Sequence[Sequence[int]] = ((),)) -> Hosting:
    """One model on a group for each item of `cores`, of the shape of its plan.

    A group that is alone takes the server with it if it is lost; of several, one starts again.
    """
    shape = Shape(model.plan.pp, model.plan.tp) if model.plan else Shape(1)
    groups = tuple(HostGroup(shape, (name,), tuple(own)) for own in cores)
    return Hosting(models={name: model}, groups=groups, restarts=len(groups) > 1)


def of_file(file: LlmFile, sources: Mapping[str, ModelSource]) -> Hosting:
    """What a fleet file says, which must have groups."""
    models = {}
    for each in file.models:
        settings = EngineSettings(
            max_running=each.max_running,
            token_budget=each.token_budget,
            context=each.context,
        )
        models[each.name] = ServedModel(
            source=sources[each.name],
            settings=settings,
            policy=policy_of(DEFAULT_CLASS, each.terms),
            terms=each.terms,
        )
    return Hosting(models=models, groups=file.groups, memory_bytes=file.memory_bytes)


def sources_of(file: LlmFile) -> dict[str, ModelSource]:
    """The folders of a file's models. Raises InputError with all that are no models."""
    found: dict[str, ModelSource] = {}
    problems: list[Problem] = []
    for model in file.models:
        try:
            found[model.name] = ModelSource.open(model.folder)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return found


def _plan_of(source: ModelSource, shape: Shape) -> Plan | None:
    """The plan of a shape, in the dtype of the stored weights; None: one process."""
    if shape.devices == 1:
        return None
    stored = source.dtype()
    precision = Precision(parameter=stored, master=stored)
    layers = source.model().num_layers
    return Plan.uniform(layers, pp=shape.pipeline, tp=shape.tensor, precision=precision)
