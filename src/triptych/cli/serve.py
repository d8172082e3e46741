"""`triptych serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.generate import plan_of, require_suitable_plan
from triptych.cli.options import JsonOption

FolderArgument = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="An HF directory, a checkpoint or a run.")
]


def command(
    folder: FolderArgument,
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="A plan file or 'tp=2,pp=2'; default: none.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; default: this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Of the model; default: the folder's.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="TRIPTYCH_API_KEY", help="Clients need it; may be repeated."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 256,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that wait; further ones get a 429.")
    ] = 512,
    max_requests: Annotated[int, typer.Option(min=1, help="HTTP requests at once.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = 4 << 20,
    token_budget: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a step; default: 512, 2048 on GPUs.")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of keys and values; default: as fit.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds to end requests after SIGTERM.")
    ] = 30.0,
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
    )
    return Answer(text=f"ended by {stopped_by}", document={"stopped_by": stopped_by})


def _serve(
    folder: Path,
    plan: str | None,
    place: dict[str, Any],
    exposure: dict[str, Any],
    sizes: dict[str, Any],
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
            **place, exposure=Exposure(**exposure), engine=EngineSettings(**sizes)
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
