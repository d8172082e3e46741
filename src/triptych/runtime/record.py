"""When things happened on this rank, as spans with the labels that a prediction uses too.

On a CPU a span is what the host saw. On CUDA the host runs ahead, so spans are pairs of events,
read when they are asked for, a step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """A labelled interval, seconds since the recorder began its step."""

    label: str
    start_s: float
    end_s: float


class _Span:
    """There are many in a step: a generator for each would cost the host more."""

    __slots__ = ("_label", "_now", "_raw", "_start")

    def __init__(
        self, label: str, raw: list[tuple[str, object, object]], now: Callable[[], object]
    ) -> None:
        self._label, self._raw, self._now = label, raw, now

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._raw.append((self._label, self._start, self._now()))


class Recorder:
    """Collects the spans of one step; `begin` starts anew."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._origin_s = time.time()
        self._origin = self._now()
        self._raw: list[tuple[str, object, object]] = []

    def begin(self) -> None:
        """Starts a new step; earlier spans are dropped."""
        self._origin_s = time.time()
        self._origin = self._now()
        self._raw = []

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drops what is recorded inside (an evaluation between two steps)."""
        kept = len(self._raw)
        yield
        del self._raw[kept:]

    @property
    def origin_s(self) -> float:
        """Wall-clock seconds at the beginning of the step."""
        return self._origin_s

    def span(self, label: str) -> _Span:
        """Records what runs inside under `label`."""
        return _Span(label, self._raw, self._now)

    def marks(self) -> list[Mark]:
        """The spans of the step so far. On CUDA this waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return [
            Mark(label, self._since(start), self._since(end)) for label, start, end in self._raw
        ]

    def _now(self) -> object:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since(self, moment: object) -> float:
        if isinstance(moment, float) and isinstance(self._origin, float):
            return moment - self._origin
        assert isinstance(moment, torch.cuda.Event) and isinstance(self._origin, torch.cuda.Event)
        return float(self._origin.elapsed_time(moment)) / 1e3
