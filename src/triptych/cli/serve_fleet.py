"""`triptych serve fleet.toml`: several models on the groups of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.cli.answer import say
from triptych.errors import InputError, Problem
from triptych.fleet.llm_file import HostGroup, LlmFile, is_of_llms, read_llm_fleet

if TYPE_CHECKING:
    from triptych.serve.core.limits import Limits
    from triptych.serve.http.hosting import Hosting


def serve_fleet(
    path: Path,
    place: Mapping[str, Any],
    exposure: Mapping[str, Any],
    replace_every: float | None,
    ray: str | None,
) -> str:
    """Serves until a signal asks for the end; its name. `ray` is the address of a cluster, on whose
    nodes the groups are; else they are processes of this machine.
    """
    file = _read(path)
    say("loading torch ...")
    start = _starter(ray, file)
    with ExitStack() as stack:  # they load torch while this process does
        processes = [stack.enter_context(start(group)) for group in file.groups]
        from triptych.serve.http.exposure import Exposure
        from triptych.serve.http.hosting import of_file, sources_of
        from triptych.serve.http.server import ServerSettings, Watcher, serve

        def reread() -> Hosting:
            changed = _read(path)
            return of_file(changed, sources_of(changed))

        def ready(url: str, limits: Mapping[str, Limits]) -> None:
            say(f"serving {' '.join(limits)} at {url}, {len(file.groups)} groups")

        settings = ServerSettings(
            **place, exposure=Exposure(**exposure), replace_every_s=replace_every
        )
        hosting = of_file(file, sources_of(file))
        return serve(hosting, processes, settings, Watcher(ready, say, reread), start)


def _starter(ray: str | None, file: LlmFile) -> Callable[[HostGroup], Any]:
    """What starts a group. Raises RunError if there is no such cluster, InputError for more ranks
    than GPUs.
    """
    if ray is None:
        from triptych.serve.http.gpus import Gpus
        from triptych.serve.http.link import GroupProcess

        gpus = Gpus.of_machine()
        gpus.require(sum(group.shape.devices for group in file.groups))
        return lambda spec: GroupProcess(spec.cores, gpus)
    from triptych.serve.http.ray_groups import RayGroup, connect

    connect(ray)
    return RayGroup


def _read(path: Path) -> LlmFile:
    """A file whose models all have a group. Raises InputError for others."""
    if not is_of_llms(path):
        works = 'models with a `folder`; "triptych simulate" takes those with `stage_s`'
        raise InputError(Problem(f"{path} has no LLMs", "served models have folders", works))
    file = read_llm_fleet(path)
    if not file.groups:
        works = f"triptych place {path} --out placed.toml, or [[groups]] by hand"
        raise InputError(Problem(f"{path} has no [[groups]]", "a fleet that is placed", works))
    held = {name for group in file.groups for name in group.models}
    homeless = [name for name in file.names if name not in held]
    if homeless:
        what = f"no group of {path} holds {', '.join(homeless)}"
        raise InputError(Problem(what, "each model is on a group", "add it to one, or remove it"))
    empty = [str(index) for index, group in enumerate(file.groups) if not group.models]
    if empty:
        what = f"groups without models in {path}: {', '.join(empty)}"
        raise InputError(Problem(what, "a group holds a model", "remove them"))
    return file
