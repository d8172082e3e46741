"""What the API process and the process of a group say to each other, over one pipe.

    API to group: `Start` first; an `Ask`, an `Abort`, a `Stop`, each `To` a model; `Bring` and
                  `Drop` of models; `Close` at the end
    group to API: `Opened` of each model, once all are there; then `Admitted` and `News` as they
                  come, `Opened` and `Gone` of models that come and go, `Ended` at the end

A group whose pipe ends without `Close` ends too: the API process is gone. Numbers of requests are
unique over all models of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from triptych.errors import TriptychError
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Admission
from triptych.serve.core.scheduler import Load
from triptych.serve.core.step import Took
from triptych.serve.engine.values import Ask, Output

if TYPE_CHECKING:
    from triptych.serve.engine.hosts import Hosted


class Abort(NamedTuple):
    """Nobody waits for a request any more."""

    request_id: int


class Stop(NamedTuple):
    """The text of one answer is complete."""

    request_id: int
    continuation: int


class To(NamedTuple):
    """A command for the engine of a model."""

    model: str
    command: Ask | Abort | Stop


class Start(NamedTuple):
    """What the group runs: models on so many ranks, their bytes for keys and values, and the GPUs
    that it sees (none: all).
    """

    world: int
    models: Sequence[Hosted]
    cache_bytes: int | None = None
    gpus: tuple[str, ...] = ()


class Bring(NamedTuple):
    """A model more; `cache_bytes` is what all will share."""

    hosted: Hosted
    cache_bytes: int | None = None


class Drop(NamedTuple):
    """A model less; nobody waits for it."""

    model: str
    cache_bytes: int | None = None


class Close(NamedTuple):
    """No more commands: end."""


class Opened(NamedTuple):
    """A model is ready."""

    model: str
    limits: Limits


class Gone(NamedTuple):
    """A model is not there, or not any more; `error` says why if that was not wanted."""

    model: str
    error: TriptychError | None = None


class Admitted(NamedTuple):
    """What became of an `Ask`: an admission, or why it cannot work at all."""

    request_id: int
    result: Admission | TriptychError


class News(NamedTuple):
    """What has happened since: outputs in their order; by model, how busy it is and its steps."""

    outputs: list[Output]
    loads: Mapping[str, Load]
    took: Mapping[str, Sequence[Took]]


class Ended(NamedTuple):
    """The group has ended, and why."""

    error: TriptychError
