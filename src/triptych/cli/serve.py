"""`triptych serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.generate import plan_of, require_suitable_plan
from triptych.cli.options import JsonOption
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass

FolderArgument = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="An HF directory, a checkpoint or a run.")
]
PlanOption = Annotated[
    str | None, typer.Option(metavar="PLAN", help="A plan file or 'tp=2,pp=2'; default: none.")
]
HostOption = Annotated[str, typer.Option(help="Where to listen; default: this machine only.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
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
BudgetOption = Annotated[
    int | None, typer.Option(min=2, help="Tokens of a step; default: 512, 2048 on GPUs.")
]
BlocksOption = Annotated[
    int | None, typer.Option(min=1, help="Blocks of keys and values; default: as fit.")
]
TtftOption = Annotated[float, typer.Option(min=1e-9, help="Objective: seconds to the first token.")]
TpotOption = Annotated[
    float, typer.Option(min=1e-9, help="Objective: seconds a token; prompts wait for it.")
]
LateOption = Annotated[
    bool, typer.Option("--refuse-late", help="429 for what would miss --slo-ttft.")
]
DrainOption = Annotated[float, typer.Option(min=0, help="Seconds to end requests after SIGTERM.")]


def command(
    folder: FolderArgument,
    plan: PlanOption = None,
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
    refuse_late: LateOption = False,
    drain_s: DrainOption = 30.0,
    as_json: JsonOption = False,
) -> Answer:
    """Serve the model in MODEL_DIR over HTTP until SIGTERM or Ctrl-C; see docs/serve.md."""
    if plan:
        require_suitable_plan(folder, plan)
    if not api_key and not _is_loopback(host):
        say(f"anybody who reaches {host} may ask: there is no --api-key")
    stopped_by = _serve(
        folder,
        plan,
        place={"host": host, "port": port, "drain_s": drain_s},
        exposure={
            "name": name or folder.resolve().name,
            "keys": tuple(api_key or ()),
            "max_body_bytes": max_body_bytes,
            "max_requests": max_requests,
        },
        sizes={
            "max_running": max_running,
            "max_waiting": max_waiting,
            "token_budget": token_budget,
            "context": context,
            "num_blocks": num_blocks,
        },
        policy=Policy(
            classes=(LatencyClass(ttft_s=slo_ttft, tpot_s=slo_tpot),), refuses_late=refuse_late
        ),
    )
    return Answer(text=f"ended by {stopped_by}", document={"stopped_by": stopped_by})


def _serve(
    folder: Path,
    plan: str | None,
    place: dict[str, Any],
    exposure: dict[str, Any],
    sizes: dict[str, Any],
    policy: Policy,
) -> str:
    """Serves until a signal asks for the end; its name."""
    say("loading torch ...")
    from triptych.serve.http.link import EngineProcess

    with EngineProcess() as process:  # it loads torch while this process does
        from triptych.serve.core.limits import Limits
        from triptych.serve.engine.settings import EngineSettings
        from triptych.serve.engine.source import ModelSource
        from triptych.serve.http.exposure import Exposure
        from triptych.serve.http.server import ServerSettings, serve

        source = ModelSource.open(folder)
        for note in source.notes:
            say(note)
        settings = ServerSettings(
            **place,
            exposure=Exposure(**exposure),
            engine=EngineSettings(**sizes),
            policy=policy,
        )

        def when_ready(url: str, limits: Limits) -> None:
            say(f"serving {exposure['name']} at {url}, context {limits.context} tokens")

        wanted = plan_of(plan, source) if plan else None
        return serve(process, source, wanted, settings, when_ready)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
