"""What the API process and the engine process say to each other, over one pipe.

    API to engine: `Open` first; an `Ask`, an `Abort`, a `Stop`; `Close` at the end
    engine to API: `Opened` once, then `Admitted` and `News` as they come, `Ended` at the end

An engine whose pipe ends without `Close` ends too: the API process is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from triptych.errors import TriptychError
from triptych.plan.plan import Plan
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import Admission
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.values import Output

if TYPE_CHECKING:
    from triptych.serve.engine.settings import EngineSettings


class Abort(NamedTuple):
    """Nobody waits for a request any more."""

    request_id: int


class Stop(NamedTuple):
    """The text of one answer is complete."""

    request_id: int
    continuation: int


class Open(NamedTuple):
    """What the engine runs."""

    folder: Path
    plan: Plan | None
    settings: EngineSettings
    policy: Policy


class Close(NamedTuple):
    """No more commands: end."""


class Opened(NamedTuple):
    """The engine is ready."""

    limits: Limits


class Admitted(NamedTuple):
    """What became of an `Ask`: an admission, or why it cannot work at all."""

    request_id: int
    result: Admission | TriptychError


class News(NamedTuple):
    """What has happened since: outputs in their order, and how busy the engine is now."""

    outputs: list[Output]
    load: Load


class Ended(NamedTuple):
    """The engine has ended, and why."""

    error: TriptychError
