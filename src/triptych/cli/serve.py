"""`triptych serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.generate import plan_of, require_suitable_plan
from triptych.cli.options import JsonOption
from triptych.cli.serve_fleet import serve_fleet
from triptych.cli.serve_tiers import policy_of
from triptych.errors import InputError, Problem
from triptych.plan.plan import part
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass

FolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR | FLEET.toml",
        help="An HF directory, a checkpoint or a run; or a fleet file with several.",
    ),
]
PlanOption = Annotated[
    str | None, typer.Option(metavar="PLAN", help="A plan file or 'tp=2,pp=2'; default: none.")
]
HostOption = Annotated[str, typer.Option(help="Where to listen; default: this machine only.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
ReplicasOption = Annotated[
    int | None, typer.Option(min=1, help="Groups that each hold the model; default 1.")
]
NameOption = Annotated[str | None, typer.Option(help="Of the model; default: the folder's.")]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(envvar="TRIPTYCH_API_KEY", help="Clients need it; may be repeated."),
]
ContextOption = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")
]
RunningOption = Annotated[int, typer.Option(min=1, help="Sequences at once.")]
WaitingOption = Annotated[
    int, typer.Option(min=1, help="Requests that wait; further ones get a 429.")
]
RequestsOption = Annotated[int, typer.Option(min=1, help="HTTP requests at once.")]
BodyOption = Annotated[int, typer.Option(min=1, help="Bytes of a request.")]
BudgetOption = Annotated[int | None, typer.Option(min=2, help="Tokens of a step; default 2048.")]
BlocksOption = Annotated[
    int | None, typer.Option(min=1, help="Blocks of keys and values; default: as fit.")
]
TtftOption = Annotated[float, typer.Option(min=1e-9, help="Objective: seconds to the first token.")]
TpotOption = Annotated[
    float,
    typer.Option(min=1e-9, help="Objective: seconds a token; prompts and new requests wait."),
]
TierOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TTFT[,TPOT[,PRIORITY]]",
        help="A class that requests ask for as service_tier; may be repeated.",
    ),
]
LateOption = Annotated[
    bool, typer.Option("--refuse-late", help="429 for what would miss --slo-ttft.")
]
ReplaceOption = Annotated[
    float | None,
    typer.Option(min=1, metavar="SECONDS", help="Of a fleet: place models anew so often."),
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Of a fleet: a Ray cluster; local: a new one."),
]
DrainOption = Annotated[float, typer.Option(min=0, help="Seconds to end requests after SIGTERM.")]


def command(
    folder: FolderArgument,
    plan: PlanOption = None,
    replicas: ReplicasOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    name: NameOption = None,
    api_key: KeysOption = None,
    context: ContextOption = None,
    max_running: RunningOption = 256,
    max_waiting: WaitingOption = 512,
    max_requests: RequestsOption = 1024,
    max_body_bytes: BodyOption = 4 << 20,
    token_budget: BudgetOption = None,
    num_blocks: BlocksOption = None,
    slo_ttft: TtftOption = 1.0,
    slo_tpot: TpotOption = math.inf,
    tier: TierOption = None,
    refuse_late: LateOption = False,
    drain_s: DrainOption = 30.0,
    replace_every: ReplaceOption = None,
    ray: RayOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Serve the model in MODEL_DIR, or those of a fleet file, over HTTP until SIGTERM or Ctrl-C;
    see docs/serve.md.
    """
    if not api_key and not _is_loopback(host):
        say(f"anybody who reaches {host} may ask: there is no --api-key")
    place = {"host": host, "port": port, "drain_s": drain_s}
    exposure = {
        "keys": tuple(api_key or ()),
        "max_body_bytes": max_body_bytes,
        "max_requests": max_requests,
    }
    sizes = {
        "max_running": max_running,
        "max_waiting": max_waiting,
        "token_budget": token_budget,
        "context": context,
        "num_blocks": num_blocks,
    }
    latency = LatencyClass(ttft_s=slo_ttft, tpot_s=slo_tpot)
    policy = policy_of(latency, tier or (), refuse_late)
    if folder.suffix == ".toml":
        says: dict[str, Any] = {"plan": plan, "replicas": replicas, "name": name, "tier": tier}
        says |= {"slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "refuse_late": refuse_late}
        _refuse(folder, _FILE_SAYS, says | sizes)
        stopped_by = serve_fleet(folder, place, exposure, replace_every, ray)
    else:
        _refuse(folder, {}, {"replace_every": replace_every, "ray": ray})
        if plan:
            require_suitable_plan(folder, plan)
        given = name or folder.resolve().name
        stopped_by = _serve(folder, plan, replicas or 1, given, place, exposure, sizes, policy)
    return Answer(text=f"ended by {stopped_by}", document={"stopped_by": stopped_by})


_FILE_SAYS = {"max_running": 256, "max_waiting": 512, "slo_ttft": 1.0, "slo_tpot": math.inf}
"""Defaults of options that a fleet file has its own keys for."""


def _refuse(folder: Path, defaults: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises InputError for options that mean nothing for what is served."""
    wrong = [key for key, value in given.items() if value and value != defaults.get(key)]
    if wrong:
        options = ", ".join("--" + key.replace("_", "-") for key in wrong)
        if defaults:
            rule, works = "a fleet file says that of each model", "its keys, as in docs/fleet.md"
        else:
            rule, works = "one model has nowhere else to go", "triptych serve FLEET.toml"
        raise InputError(Problem(f"{options} with {folder}", rule, works))


def _serve(
    folder: Path,
    plan: str | None,
    replicas: int,
    name: str,
    place: dict[str, Any],
    exposure: dict[str, Any],
    sizes: dict[str, Any],
    policy: Policy,
) -> str:
    """Serves until a signal asks for the end; its name."""
    from triptych.serve.http.gpus import Gpus
    from triptych.serve.http.link import GroupProcess

    gpus = Gpus.of_machine()
    cores = _cores_of(replicas) if replicas > 1 and not len(gpus) else [()] * replicas
    say("loading torch ...")
    with ExitStack() as stack:  # they load torch while this process does
        processes = [stack.enter_context(GroupProcess(own, gpus)) for own in cores]
        from triptych.serve.core.limits import Limits
        from triptych.serve.engine.settings import EngineSettings
        from triptych.serve.engine.source import ModelSource
        from triptych.serve.http.exposure import Exposure
        from triptych.serve.http.hosting import ServedModel, single
        from triptych.serve.http.server import ServerSettings, Watcher, serve

        source = ModelSource.open(folder)
        for note in source.notes:
            say(note)
        model = ServedModel(
            source=source,
            settings=EngineSettings(**sizes, engines_here=replicas),
            policy=policy,
            plan=plan_of(plan, source) if plan else None,
        )

        hosting = single(name, model, cores)
        gpus.require(sum(group.shape.devices for group in hosting.groups))

        def ready(url: str, limits: Mapping[str, Limits]) -> None:
            groups = f", {replicas} replicas" if replicas > 1 else ""
            say(f"serving {name} at {url}, context {limits[name].context} tokens{groups}")

        settings = ServerSettings(**place, exposure=Exposure(**exposure))
        return serve(
            hosting, processes, settings, Watcher(ready, say), lambda s: GroupProcess(s.cores, gpus)
        )


def _cores_of(replicas: int) -> list[tuple[int, ...]]:
    """The cores of this machine dealt to replicas. Raises InputError if there are too few."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if usable and replicas > len(usable):
        rule, works = f"each has a core, and there are {len(usable)}", f"up to {len(usable)}"
        raise InputError(Problem(f"--replicas {replicas}", rule, works))
    parts = [part(len(usable), replicas, index) for index in range(replicas)]
    return [tuple(usable[start:stop]) for start, stop in parts]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
