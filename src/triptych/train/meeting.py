"""Where the ranks of a launch first meet: torch's key-value store, and the news that rank 0 has
made the run ready. Free of what trains, so that a job that cannot run is refused soon.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from triptych.errors import TriptychError
from triptych.train.folder import RunFolder

_PREPARED = "triptych/prepared"
_PREPARING = datetime.timedelta(days=2)  # other ranks wait while rank 0 reads the text


def meet() -> Store:
    """The store of the launch that the environment describes."""
    found: tuple[Store, int, int] = next(iter(rendezvous("env://")))
    return found[0]


def prepared(store: Store, rank: int, prepare: Callable[[], RunFolder]) -> RunFolder:
    """The run folder that rank 0 has prepared, on a file system that all nodes share.

    Ends the other ranks quietly if it could not.
    """
    return RunFolder(Path(told_by_first(store, rank, lambda: str(prepare().path))))


def told_by_first(store: Store, rank: int, tell: Callable[[], str]) -> str:
    """What rank 0 tells, which is not empty. Ends the other ranks quietly if it could not."""
    if rank > 0:
        store.wait([_PREPARED], _PREPARING)
        told = store.get(_PREPARED).decode()
        if not told:
            raise SystemExit(TriptychError.exit_code)
        return str(told)
    try:
        told = tell()
    except BaseException:
        store.set(_PREPARED, "")
        raise
    store.set(_PREPARED, told)
    return told
