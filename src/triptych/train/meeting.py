"""Where the ranks of a launch first meet: torch's key-value store, and the news that rank 0 has
made the run ready. Free of what trains, so that a job that cannot run is refused soon.
"""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from triptych.errors import RunError, TriptychError
from triptych.train.environment import Place
from triptych.train.folder import RunFolder

_HELLO, _WELCOME, _THANKS = "triptych/hello", "triptych/welcome", "triptych/thanks"
_MEETING = datetime.timedelta(minutes=30)
_LOOK_S = 0.01
_PREPARED = "triptych/prepared"
_PREPARING = datetime.timedelta(days=2)  # other ranks wait while rank 0 reads the text


def meet(place: Place) -> Store:
    """The store of the launch that the environment describes, without what is left in it.

    Agents keep one store for all restarts, and a restart for fewer nodes is not even counted: keys
    of dead ranks would be taken for those of living ones. So rank 0 draws a prefix, and hands it to
    each rank for a number that the rank has just drawn.
    """
    found: tuple[Store, int, int] = next(iter(rendezvous("env://")))
    store, number = found[0], secrets.token_hex(8)
    if place.rank == 0:
        _hand_out(store, number, place.world_size)
        return PrefixStore(number, store)
    store.set(f"{_HELLO}/{place.rank}", number)
    store.wait([f"{_WELCOME}/{number}"], _MEETING)
    prefix = store.get(f"{_WELCOME}/{number}").decode()
    store.set(f"{_THANKS}/{prefix}/{place.rank}", "")
    return PrefixStore(prefix, store)


def _hand_out(store: Store, prefix: str, world_size: int) -> None:
    """Gives the prefix to every rank. Raises RunError if one does not come."""
    waiting, last_s = set(range(1, world_size)), time.monotonic() + _MEETING.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"{_THANKS}/{prefix}/{rank}"]):
                waiting.remove(rank)
            elif store.check([f"{_HELLO}/{rank}"]):
                number = store.get(f"{_HELLO}/{rank}").decode()
                store.set(f"{_WELCOME}/{number}", prefix)
        if time.monotonic() > last_s:
            raise RunError(f"ranks {sorted(waiting)} did not start")
        time.sleep(_LOOK_S)


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
