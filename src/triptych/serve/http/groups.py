"""The groups of a server: started, lost and started again; models come to them and go.

Whoever routes requests hears of what is lost with a group, and decides what becomes of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triptych.errors import RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.fleet.router import Place, Router
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepTimes
from triptych.serve.core.scheduler import Load
from triptych.serve.http.client import Conversation, GroupClient
from triptych.serve.http.hosting import Hosting
from triptych.serve.http.link import GroupProcess
from triptych.serve.http.messages import Bring, Drop, Gone, News, Opened

_PATIENCE_S = (0.0, 1.0, 5.0, 20.0)
"""Before a group is started again that failed for the first, second, ... time in a row."""
_WELL_S = 60.0
"""After so long a failure is the first one again."""
_POLL_S = 0.02

Rescue = Callable[[set[Conversation], int, TriptychError], None]
"""Gets what was under way on a group or for a model of it, the group's number, and the cause."""


class Started(NamedTuple):
    """A process and the limits of its engines."""

    process: GroupProcess
    limits: dict[str, Limits]


@dataclass(slots=True, eq=False)
class Group:
    """A group of the server; without a client it is lost or still starting."""

    number: int
    spec: HostGroup
    process: GroupProcess
    client: GroupClient | None = None
    cause: str = ""
    num_failures: int = 0
    since_s: float = 0.0  # when it was opened last
    places: dict[str, Place] = field(default_factory=dict)
    coming: dict[str, asyncio.Future[TriptychError | None]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`serving`, `partly`: a model of it is just loading, or `starting`: none is there."""
        if self.client is None:
            return "starting"
        return "serving" if set(self.spec.models) <= set(self.places) else "partly"


class Groups:
    """All groups; used within one event loop.

    Args:
        hosting: what runs.
        start: starts the process of a group.
        rescue: is told what was under way where something is lost.
        when_lost: gets why a group is lost that is not to be started again.
        say: gets what an operator should know.

    """

    def __init__(
        self,
        hosting: Hosting,
        start: Callable[[HostGroup], GroupProcess],
        rescue: Rescue,
        when_lost: Callable[[TriptychError], None],
        say: Callable[[str], None],
    ) -> None:
        self.hosting = hosting
        self.router = Router()
        self.all: list[Group] = []
        self._start, self._rescue = start, rescue
        self._when_lost, self._say = when_lost, say
        self._numbers = itertools.count()
        self._times: dict[tuple[int, str], StepTimes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    def take(self, started: Sequence[Started]) -> None:
        """Takes in the processes of the first groups, in their order."""
        for spec, each in zip(self.hosting.groups, started, strict=True):
            group = Group(next(self._numbers), spec, each.process)
            self.all.append(group)
            self._open(group, each.limits)

    async def close(self) -> None:
        """Lets all groups end, which is no failure."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(asyncio.to_thread(_close, group) for group in self.all))

    # ---- what groups say (Listener) -----------------------------------------------------------

    def told(self, client: GroupClient, message: News | Opened | Gone) -> None:
        """Takes in steps, and models that came or went."""
        group = self._of(client)
        if group is None:
            return
        match message:
            case News(took=took):
                for model, steps in took.items():
                    for step in steps:
                        self._times_of(group, model).saw(*step)
            case Opened(model):
                self._add_place(group, model)
                self._arrived(group, model, None)
            case Gone(model, error):
                self._withdraw(group, model)
                if not self._arrived(group, model, error) and error is not None:
                    self._model_lost(group, model, error)

    def lost(self, client: GroupClient, error: TriptychError) -> None:
        """A group has ended by itself."""
        if not self.hosting.restarts:
            client.fail(error)
            self._when_lost(error)
            return
        group = self._of(client)
        if group is None:
            return  # it was to end
        group.client, group.cause = None, str(error)
        self._note_failure(group)
        for model in list(group.places):
            self._withdraw(group, model)
        for future in group.coming.values():
            if not future.done():
                future.set_result(error)
        self._say(f"group {group.number} is lost and starts again: {error}")
        self._rescue(client.conversations, group.number, error)
        self._do(self._restart(group))

    # ---- models come and go -------------------------------------------------------------------

    async def become(self, hosting: Hosting, when_there: Callable[[], None] = lambda: None) -> None:
        """Other models on other groups, without a dropped request.

        What is new loads first; then (`when_there`) requests go there; what is not wanted any more
        ends once nobody waits for it. Raises TriptychError if something new does not load: all is
        as before.
        """
        async with self._changing:
            hosting.require_successor(self.hosting)
            kept, new, old = self._matched(hosting)
            made: list[Group] = []
            brought: list[tuple[Group, str]] = []
            before, self.hosting = self.hosting, hosting
            try:
                made = await self._launch_all(new)
                for group, spec in kept:
                    for name in [n for n in spec.models if n not in group.places]:
                        await self._bring(group, name, hosting)
                        brought.append((group, name))
            except TriptychError:
                self.hosting = before
                for group, name in brought:
                    await self._dismiss(group, name)
                for group in made:
                    await self._end(group)
                raise
            when_there()
            for group, spec in kept:
                group.spec = spec
                for name, place in group.places.items():
                    place.terms = hosting.models[name].terms if name in spec.models else place.terms
            leaving = [
                self._dismiss(group, name)
                for group, spec in kept
                for name in list(group.places)
                if name not in spec.models
            ]
            await asyncio.gather(*leaving, *(self._end(group) for group in old))

    def _matched(
        self, hosting: Hosting
    ) -> tuple[list[tuple[Group, HostGroup]], list[HostGroup], list[Group]]:
        """Groups that stay, with what they become; those to be made; those to be ended."""
        left, kept, new = list(self.all), [], []
        for spec in hosting.groups:
            alike = [g for g in left if (g.spec.shape, g.spec.cores) == (spec.shape, spec.cores)]
            if alike and spec.models:
                best = max(alike, key=lambda g: len(set(g.spec.models) & set(spec.models)))
                left.remove(best)
                kept.append((best, spec))
            elif spec.models:
                new.append(spec)
        return kept, new, left

    async def _launch_all(self, specs: Sequence[HostGroup]) -> list[Group]:
        made: list[Group] = []
        try:
            for spec in specs:
                group = Group(next(self._numbers), spec, self._start(spec))
                made.append(group)
                limits = await self._launched(group)
                self.all.append(group)
                self._open(group, limits)
        except TriptychError:
            for group in made:
                await self._end(group)
            raise
        return made

    async def _bring(self, group: Group, name: str, hosting: Hosting) -> None:
        """Lets a group load a model more; returns when it serves it."""
        if group.client is None:
            raise RunError(f"group {group.number} is just starting: try again")
        shape, names = group.spec.shape, [*group.places, name]
        coming = self._awaited(group, name)
        cache_bytes = hosting.cache_bytes(shape, names)
        group.client.send(Bring(hosting.hosted(name, shape), cache_bytes))
        if (error := await coming) is not None:
            raise RunError(f"{name} on group {group.number}: {error}")

    async def _dismiss(self, group: Group, name: str) -> None:
        """Takes a model from a group once nobody waits for it there."""
        place = group.places.get(name)
        if place is None:
            return
        place.is_open = False
        while place.living and group.client is not None:
            await asyncio.sleep(_POLL_S)
        if group.client is not None:
            rest = [each for each in group.places if each != name]
            known = all(each in self.hosting.models for each in rest)
            cache_bytes = self.hosting.cache_bytes(group.spec.shape, rest) if known else None
            going = self._awaited(group, name)
            group.client.send(Drop(name, cache_bytes))
            await going

    async def _end(self, group: Group) -> None:
        """Ends a group once nobody waits for it."""
        for place in group.places.values():
            place.is_open = False
        while group.client is not None and group.client.num_living:
            await asyncio.sleep(_POLL_S)
        for model in list(group.places):
            self._withdraw(group, model)
        if group in self.all:
            self.all.remove(group)
        await asyncio.to_thread(_close, group)

    # ---- within -------------------------------------------------------------------------------

    def _of(self, client: GroupClient) -> Group | None:
        return next((group for group in self.all if group.client is client), None)

    def _open(self, group: Group, limits: dict[str, Limits]) -> None:
        group.client = GroupClient(group.process.pipe, limits, self, group.process.death)
        group.cause, group.since_s = "", time.monotonic()
        for model in limits:
            self._add_place(group, model)

    def _add_place(self, group: Group, model: str) -> None:
        assert group.client is not None
        client, limits = group.client, group.client.limits[model]
        client.loads.setdefault(model, Load.idle(limits))
        place = Place(
            model,
            group.number,
            self.hosting.models[model].terms,
            self._times_of(group, model),
            limits,
            lambda: client.loads[model].most_running,
        )
        group.places[model] = self.router.add(place)

    def _withdraw(self, group: Group, model: str) -> None:
        place = group.places.pop(model, None)
        if place is not None:
            self.router.remove(place)

    def _model_lost(self, group: Group, model: str, error: TriptychError) -> None:
        """One engine of a group has failed: it is loaded again beside the others."""
        self._say(f"{model} on group {group.number} failed and loads again: {error}")
        self._note_failure(group)
        assert group.client is not None
        mine = {c for c in group.client.conversations if c.model == model}
        for conversation in mine:
            for ask in conversation.asks:
                group.client.forget(ask.id)
        self._rescue(mine, group.number, error)
        self._do(self._reload(group, model))

    async def _reload(self, group: Group, model: str) -> None:
        while group.client is not None and model in group.spec.models:
            await asyncio.sleep(_patience_s(group))
            try:
                async with self._changing:
                    if model not in group.places:
                        await self._bring(group, model, self.hosting)
                return
            except TriptychError as error:
                group.num_failures += 1
                self._say(str(error))

    async def _restart(self, group: Group) -> None:
        await asyncio.to_thread(group.process.end, is_waited_for=False)
        while group in self.all:
            await asyncio.sleep(_patience_s(group))
            group.process = self._start(group.spec)
            try:
                limits = await self._launched(group)
            except TriptychError as error:
                group.num_failures += 1
                group.cause = str(error)
                self._say(f"group {group.number} does not start: {error}")
                continue
            self._open(group, limits)
            self._say(f"group {group.number} serves again")
            return

    async def _launched(self, group: Group) -> dict[str, Limits]:
        """Waits for a process; ends it if it does not open."""
        process, start = group.process, self.hosting.start(group.spec)
        try:
            process.open(start)
            return await asyncio.to_thread(process.opened, len(start.models))
        except BaseException:
            process.end(is_waited_for=False)
            raise

    def _awaited(self, group: Group, name: str) -> asyncio.Future[TriptychError | None]:
        future: asyncio.Future[TriptychError | None] = asyncio.get_running_loop().create_future()
        group.coming[name] = future
        return future

    def _arrived(self, group: Group, name: str, error: TriptychError | None) -> bool:
        """Tells whoever waits for a model to come or go; whether somebody does."""
        future = group.coming.pop(name, None)
        if future is None or future.done():
            return False
        future.set_result(error)
        return True

    def _times_of(self, group: Group, model: str) -> StepTimes:
        return self._times.setdefault((group.number, model), StepTimes())

    def _note_failure(self, group: Group) -> None:
        is_first = time.monotonic() - group.since_s > _WELL_S
        group.num_failures = 1 if is_first else group.num_failures + 1

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _close(group: Group) -> None:
    if group.client is not None:
        group.client.close()
    group.process.end(is_waited_for=group.client is not None)


def _patience_s(group: Group) -> float:
    """Longer the more often a group has failed."""
    return _PATIENCE_S[min(group.num_failures, len(_PATIENCE_S)) - 1]
