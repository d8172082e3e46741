"""Where models should be, by what was asked of late: simulated beside the server, in a process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from triptych.fleet.place_llm import Recent, moved
from triptych.fleet.room import room
from triptych.serve.core.price import StepPrice
from triptych.serve.http.fleet import Arrival, Fleet
from triptych.serve.http.hosting import Hosting
from triptych.simulate.trace import Trace

_LEAST = 20  # requests that say something
_MOST = 1000  # requests that are simulated
_NICE = 10  # the simulation yields to the groups


async def better(fleet: Fleet, seconds: float) -> Hosting | None:
    """What to serve instead, by the requests of the last seconds; None if nothing is better.

    Nothing is while a group is lost, or before the steps of any model have been seen.
    """
    since_s = fleet.clock() - seconds
    arrivals = [arrival for arrival in fleet.arrivals if arrival.at_s >= since_s][-_MOST:]
    if len(arrivals) < _LEAST or any(group.client is None for group in fleet.groups):
        return None
    recent = recent_of(fleet, arrivals)
    if recent is None:
        return None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, os.nice, (_NICE,)) as pool:
        models = await asyncio.get_running_loop().run_in_executor(pool, moved, recent)
    if models == recent.models:
        return None
    names = sorted(fleet.hosting.models)
    return fleet.hosting.with_models([[names[model] for model in held] for held in models])


def recent_of(fleet: Fleet, arrivals: list[Arrival]) -> Recent | None:
    """What a placement depends on; None before the steps of any model have been seen."""
    hosting, names = fleet.hosting, sorted(fleet.hosting.models)
    models = [hosting.models[name] for name in names]
    groups = [group.spec for group in fleet.groups]
    limits = [fleet.limits(name) for name in names]
    prices = [_prices(fleet, name) for name in names]
    known = [price for own in prices for price in own if price is not None]
    if not known or any(each is None for each in limits):
        return None
    typical = StepPrice(*np.mean(known, axis=0).tolist())
    filled = []
    for own in prices:
        seen = [price for price in own if price is not None]
        other = StepPrice(*np.mean(seen, axis=0).tolist()) if seen else typical
        filled.append(tuple(price or other for price in own))
    return Recent(
        trace=_trace(arrivals, names),
        terms=tuple(model.terms for model in models),
        limits=tuple(each for each in limits if each is not None),
        prices=tuple(filled),
        sizes=tuple(
            tuple(room(model.source.folder, spec.shape, model.settings.context) for spec in groups)
            for model in models
        ),
        memory_bytes=hosting.memory_bytes,
        models=tuple(
            tuple(index for index, name in enumerate(names) if name in spec.models)
            for spec in groups
        ),
    )


def _prices(fleet: Fleet, name: str) -> list[StepPrice | None]:
    """Of a model's steps on each group, where any was seen."""
    found: list[StepPrice | None] = []
    for group in fleet.groups:
        place = group.places.get(name)
        is_known = place is not None and place.times.is_known
        found.append(place.times.price if place is not None and is_known else None)
    return found


def _trace(arrivals: list[Arrival], names: list[str]) -> Trace:
    number = {name: index for index, name in enumerate(names)}
    kept = [arrival for arrival in arrivals if arrival.model in number]
    start_s = kept[0].at_s if kept else 0.0
    return Trace(
        arrival_s=np.array([arrival.at_s - start_s for arrival in kept]),
        prompt_tokens=np.array([max(1, arrival.prompt_tokens) for arrival in kept], np.int64),
        output_tokens=np.array([max(1, arrival.max_tokens) for arrival in kept], np.int64),
        model=np.array([number[arrival.model] for arrival in kept], np.int64),
        models=tuple(names),
        slo_s=np.full(len(kept), np.inf),
    )
