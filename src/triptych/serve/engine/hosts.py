"""The engines of one group of ranks: they take turns on them and share their memory.

A model may come and go while the others serve. In a group of one rank it loads beside their steps;
several ranks load it together, between two steps.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from triptych.errors import RunError, TriptychError
from triptych.plan.plan import Plan
from triptych.runtime.local import local_ranks
from triptych.serve.core.budget import Budget
from triptych.serve.core.order import Policy
from triptych.serve.core.turns import Claim, shares
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.executor import RankExecutor, RankLine, follow_line
from triptych.serve.engine.replica import Rank, load_rank
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.suitable import require_suitable
from triptych.serve.engine.worker import Worker


class Hosted(NamedTuple):
    """A model as a group is to run it; all plans of a group have as many ranks."""

    name: str
    folder: Path
    plan: Plan | None
    settings: EngineSettings
    policy: Policy
    claim: Claim = Claim()


class Hosts:
    """Engines by the names of their models; one thread calls all of it.

    Args:
        world: ranks of the group.
        cache_bytes: of each rank's memory for keys and values of all models; None: each model
            takes what it finds.

    """

    def __init__(self, world: int = 1, cache_bytes: int | None = None) -> None:
        self.engines: dict[str, Engine] = {}
        self._world = world
        self._parted_bytes = cache_bytes if torch.cuda.is_available() else None
        is_shared = cache_bytes is not None and self._parted_bytes is None
        self._budget = Budget(cache_bytes or 0) if is_shared else None
        self._claims: dict[str, Claim] = {}
        self._seats: dict[str, RankExecutor] = {}
        self._line = RankLine()
        self._stack = ExitStack()
        self._loaded: queue.SimpleQueue[tuple[Hosted, Rank | BaseException]] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()

    @property
    def shares_memory(self) -> bool:
        """Whether what one model gives back another may take."""
        return self._budget is not None and len(self.engines) > 1

    def start(self, models: Sequence[Hosted]) -> None:
        """Starts the other ranks and loads the first models, at least one. Raises TriptychError."""
        parts = shares([hosted.claim for hosted in models])
        sized = [self._sized(*each) for each in zip(models, parts, strict=True)]
        if self._world > 1:
            for hosted in sized:
                assert hosted.plan is not None
                require_suitable(hosted.plan, ModelSource.open(hosted.folder).model(), self._world)
            ranks = local_ranks(self._world, partial(_follow, sized))
            self._stack.enter_context(ranks)
        try:
            for hosted in sized:
                self._admit(hosted, self._rank(hosted))
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise

    def load(self, hosted: Hosted, cache_bytes: int | None) -> None:
        """Lets a model come; `loaded` tells when it is there."""
        if self._budget is not None and cache_bytes is not None:
            self._budget.total_bytes = cache_bytes
        sized = self._sized(hosted)

        def work() -> None:
            found: Rank | BaseException
            try:
                found = self._rank(sized)
            except BaseException as error:
                found = error
            self._loaded.put((sized, found))
            self._ring.send(b"\0")

        def together() -> None:
            self._line.send(pickle.dumps((-1, sized)))
            work()

        if self._world == 1:
            threading.Thread(target=work, name=f"load {hosted.name}", daemon=True).start()
        else:
            self._line.call(together)

    def fileno(self) -> int:
        """Readable when a model that was to come is there or failed."""
        return self._bell.fileno()

    def loaded(self) -> Iterable[tuple[str, TriptychError | None]]:
        """The models that have come, and why others have not."""
        while True:
            try:
                hosted, found = self._loaded.get_nowait()
            except queue.Empty:
                return
            self._bell.recv(1)
            try:
                if isinstance(found, TriptychError):
                    raise found
                if isinstance(found, BaseException):
                    raise RunError(f"{hosted.name} cannot be loaded: {found!r}")
                self._admit(hosted, found)
            except TriptychError as error:
                yield hosted.name, error
            else:
                yield hosted.name, None

    def drop(self, name: str, cache_bytes: int | None = None) -> None:
        """Ends the engine of a model, which nobody waits for."""
        engine = self.engines.pop(name)
        engine.leave()
        allowance = engine.scheduler.book.pool.allowance
        if allowance is not None and self._budget is not None:
            allowance.leave()
            if cache_bytes is not None:
                self._budget.total_bytes = cache_bytes
        self._seats.pop(name, None)
        self._claims.pop(name, None)
        self._share_out()

    def close(self) -> None:
        """Ends all ranks."""
        for engine in self.engines.values():
            engine.leave()
        self._line.close()
        self._stack.close()
        self._bell.close()
        self._ring.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within -------------------------------------------------------------------------------

    def _sized(self, hosted: Hosted, share: float = 0.0) -> Hosted:
        """With the room of the group, if it is known, or its share where that is taken at once.

        A model that comes to a GPU later takes of what is free there.
        """
        if self._budget is not None:
            cache_bytes = self._budget.total_bytes
        elif self._parted_bytes is not None and share:
            cache_bytes = int(share * self._parted_bytes)
        else:
            return hosted
        return hosted._replace(settings=replace(hosted.settings, cache_bytes=cache_bytes))

    def _rank(self, hosted: Hosted) -> Rank:
        return load_rank(ModelSource.open(hosted.folder), hosted.plan, hosted.settings, self._world)

    def _admit(self, hosted: Hosted, rank: Rank) -> None:
        """A loaded model becomes an engine. Raises InputError if memory is guaranteed to others."""
        allowance = None
        if self._budget is not None:
            least = rank.limits.blocks(rank.limits.context)
            guarantee = int(hosted.claim.guarantee * self._budget.total_bytes)
            allowance = self._budget.join(rank.block_bytes, guarantee, least)
        seat = RankExecutor(rank.worker, self._line)
        self._seats[hosted.name], self._claims[hosted.name] = seat, hosted.claim
        self.engines[hosted.name] = Engine.of(
            rank,
            seat,
            policy=hosted.policy,
            stack=self._stack if self._world > 1 else None,
            allowance=allowance,
        )
        self._share_out()

    def _share_out(self) -> None:
        names = list(self._seats)
        found = shares([self._claims[name] for name in names])
        numbers = [self._seats[name].number for name in names]
        self._line.share_out(dict(zip(numbers, found, strict=True)))


def _follow(models: Sequence[Hosted]) -> None:
    """The life of a rank other than 0."""
    world = models[0].plan.world_size if models[0].plan is not None else 1

    def loaded(hosted: Hosted) -> Worker:
        source = ModelSource.open(hosted.folder)
        return load_rank(source, hosted.plan, hosted.settings, world).worker

    def load(hosted: object) -> Worker | None:
        assert isinstance(hosted, Hosted)
        try:
            return loaded(hosted)
        except TriptychError:  # rank 0 has it too, and tells
            return None

    follow_line({number: loaded(hosted) for number, hosted in enumerate(models)}, load)
