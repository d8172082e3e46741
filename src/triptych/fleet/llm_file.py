"""Fleet files of LLMs: what `triptych serve`, `place` and `simulate` read.

    [devices]
    count = 2                             # of this machine, or of a cluster
    memory_gib = 4.0                      # of each, for weights, keys and values; default: measured
    cluster = "1x8xH100-SXM"              # prices steps for `place` and `simulate`

    [[models]]
    name = "chat"
    folder = "models/chat"                # beside the file: a Hugging Face directory, a checkpoint
    slo_ttft_s = 0.5                      # objectives, any of them: to the first token,
    slo_tpot_s = 0.05                     # a token after it,
    slo_s = 4.0                           # to the last token
    weight = 2.0                          # of turns, where several models are busy; default 1
    guarantee = 0.25                      # share of its groups that others cannot take; default 0
    context = 4096                        # longest prompt and answer; default: the model's
    max_running = 64                      # sequences at once; default 256
    token_budget = 512                    # tokens of a step

    [[groups]]                            # written by hand, or by `triptych place`
    shape = "1x1"                         # PIPELINExTENSOR; default 1x1
    models = ["chat", "code"]
    cores = [0]                           # of this machine; default: all

    [requests]                            # only `place` and `simulate` need it
    rate_per_s = 8.0                      # and cv, duration_s, share_exponent, seed
    prompt_tokens = 512                   # mean; or: trace = "requests.csv"
    output_tokens = 128                   # (model,arrival_s,prompt_tokens,output_tokens)

Reading is strict: every unknown key, missing key and wrong value is reported at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.cluster.table import Table
from triptych.errors import InputError, Problem
from triptych.fleet.file import (
    Requests,
    check_names,
    open_table,
    read_requests,
    renumbered,
    shape_of,
)
from triptych.fleet.models import Shape
from triptych.fleet.room import crowded
from triptych.fleet.terms import Terms
from triptych.serve.core.turns import Claim
from triptych.simulate.arrivals import draw_models, power_law_shares
from triptych.simulate.trace import Trace, log_normal_lengths, make, read_trace
from triptych.units import GIB

LENGTHS_CV = 1.0  # of drawn prompts and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """A model of a file, and the sizes of its engines; None: the engine's own."""

    name: str
    folder: Path
    terms: Terms
    context: int | None = None
    max_running: int = 256
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class HostGroup:
    """A group of a file; no cores: all of the machine."""

    shape: Shape
    models: tuple[str, ...]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmFile:
    """All that such a file says; no groups before `triptych place`."""

    path: Path
    models: tuple[HostedModel, ...]
    groups: tuple[HostGroup, ...]
    num_devices: int
    memory_bytes: int | None
    cluster: str | None
    requests: Requests | None
    lengths: tuple[int, int] = (512, 128)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models, in the order of the numbers that traces use."""
        return tuple(model.name for model in self.models)

    def model(self, name: str) -> HostedModel:
        """The model of a name, which must be there."""
        return next(model for model in self.models if model.name == name)

    def draw(self, seed: int | None = None) -> Trace:
        """The requests of the file, or of another seed. Raises InputError if it has none."""
        source = self.requests
        if source is None:
            what = f"{self.path} has no [requests]"
            raise InputError(Problem(what, "it says how requests arrive", "rate_per_s, duration_s"))
        if source.trace is not None:
            no_slo = np.full(len(self.models), math.inf)
            return renumbered(read_trace(source.trace), self.names, no_slo, source.trace)
        rng = np.random.default_rng(source.seed if seed is None else seed)
        shares = power_law_shares(len(self.models), source.share_exponent)
        arrival_s, model = draw_models(source.windows, shares, rng)
        prompt, output = self.lengths
        lengths = log_normal_lengths((prompt, LENGTHS_CV), (output, LENGTHS_CV))
        return make(arrival_s, lengths, rng, model, self.names)


def is_of_llms(path: Path) -> bool:
    """Whether a fleet file has models with folders: LLMs. Raises InputError if it is no TOML."""
    models = open_table(path).peek("models")
    return isinstance(models, list) and any("folder" in m for m in models if isinstance(m, dict))


def read_llm_fleet(path: Path) -> LlmFile:
    """The fleet of a file.

    Raises:
        InputError: with every fault of the file; if it has none, with every group whose models do
            not fit its memory, and the bytes.

    """
    table = open_table(path)
    devices = table.table("devices")
    models = tuple(_model(own, path.parent) for own in table.tables("models"))
    names = [model.name for model in models]
    groups: tuple[HostGroup, ...] = ()
    if table.peek("groups") is not None:
        groups = tuple(_group(own, names) for own in table.tables("groups"))
    requests, lengths = None, (512, 128)
    if table.peek("requests") is not None:
        requests = read_requests(table, path.parent)
        own = table.table("requests")
        lengths = own.integer("prompt_tokens", 512), own.integer("output_tokens", 128)
    memory_gib = devices.number("memory_gib", math.inf)
    found = LlmFile(
        path=path,
        models=models,
        groups=groups,
        num_devices=devices.integer("count"),
        memory_bytes=int(memory_gib * GIB) if math.isfinite(memory_gib) else None,
        cluster=devices.string("cluster", "") or None,
        requests=requests,
        lengths=lengths,
    )
    devices.check_unknown()
    table.check_unknown()
    table.problems += [*_together(found)]
    if table.problems:
        raise InputError(table.problems)
    require_room(found)
    return found


def require_room(file: LlmFile) -> None:
    """Raises InputError with every group whose models do not fit its memory, and the bytes."""
    if file.memory_bytes is None:
        return
    problems = []
    for index, group in enumerate(file.groups):
        held = [file.model(name) for name in group.models]
        sizes = [(model.name, model.folder, model.context) for model in held]
        problem = crowded(f"group {index}", group.shape, sizes, file.memory_bytes)
        problems += [problem] if problem else []
    if problems:
        raise InputError(problems)


def _model(table: Table, folder: Path) -> HostedModel:
    claim = Claim(table.number("weight", 1.0), 0.0)
    if table.peek("guarantee") is not None:
        claim = claim._replace(guarantee=table.share("guarantee", 1.0))
    terms = Terms(
        ttft_s=table.number("slo_ttft_s", math.inf),
        tpot_s=table.number("slo_tpot_s", math.inf),
        answer_s=table.number("slo_s", math.inf),
        claim=claim,
    )
    where = folder / table.string("folder")
    if not where.is_dir():
        what = f"folder {str(where)!r} in {table.where}"
        table.problems.append(Problem(what, "a folder that exists, beside the fleet file"))
    found = HostedModel(
        name=table.string("name"),
        folder=where,
        terms=terms,
        context=_optional(table, "context"),
        max_running=table.integer("max_running", 256),
        token_budget=_optional(table, "token_budget"),
    )
    table.check_unknown()
    return found


def _optional(table: Table, key: str) -> int | None:
    return None if table.peek(key) is None else table.integer(key)


def _group(table: Table, names: Sequence[str]) -> HostGroup:
    shape, models = shape_of(table, "1x1"), table.strings("models")
    check_names(table, models, names)
    cores = table.peek("cores") or []
    if not isinstance(cores, list) or not all(type(c) is int and c >= 0 for c in cores):
        table.wrong("cores", cores, "a list of whole numbers from 0")
        cores = []
    table.check_unknown()
    return HostGroup(shape, tuple(models), tuple(cores))


def _together(file: LlmFile) -> list[Problem]:
    """Rules between the parts of a file."""
    found = [
        Problem(f"two models {name!r} in {file.path}", "names differ")
        for name, count in Counter(file.names).items()
        if count > 1
    ]
    used = sum(group.shape.devices for group in file.groups)
    if used > file.num_devices:
        what = f"groups of {used} devices in {file.path}"
        found.append(Problem(what, f"at most {file.num_devices}", "fewer or smaller groups"))
    held = Counter(core for group in file.groups for core in group.cores)
    found += [
        Problem(f"core {core} is in two groups of {file.path}", "a core belongs to one group")
        for core, count in held.items()
        if count > 1
    ]
    guarantees = {model.name: model.terms.claim.guarantee for model in file.models}
    for index, group in enumerate(file.groups):
        found += [
            Problem(f"{name!r} twice in group {index} of {file.path}", "a model once in a group")
            for name, count in Counter(group.models).items()
            if count > 1
        ]
        total = sum(guarantees.get(name, 0.0) for name in set(group.models))
        if total > 1:
            what = f"guarantees of {total:g} in group {index} of {file.path}"
            found.append(Problem(what, "at most 1 together", "smaller ones, or fewer models"))
    return found
