"""Figures for Prometheus, by model: what engines say of themselves, and what clients see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.values import Output

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Held(NamedTuple):
    """A model on a group: its limits, how busy it is, and what its steps have cost of late."""

    model: str
    group: int
    limits: Limits
    load: Load
    price: StepPrice


Loads = Callable[[], Sequence[Held]]
"""Gives all that groups hold now."""


class _LoadCollector(Collector):
    """The engines' loads, read when they are asked for."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The figures of now."""
        labels = ["model", "group"]
        gauges = {
            "requests_waiting": "Sequences that wait for room.",
            "requests_running": "Sequences that run.",
            "kv_blocks": "Blocks of keys and values.",
            "kv_blocks_free": "Blocks that may be taken, with or without content.",
            "kv_usage_ratio": "Share of the blocks that is taken.",
            "step_fixed_seconds": "Of any step of late, by least squares.",
            "step_decode_row_seconds": "More for each sequence that decodes.",
            "step_prompt_row_seconds": "More for each prompt token.",
        }
        counters = {
            "preemptions": "Sequences that gave up their blocks.",
            "prompt_tokens_reused": "Prompt tokens found in the cache.",
        }
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            **{n: GaugeMetricFamily(f"triptych_{n}", w, labels=labels) for n, w in gauges.items()},
            **{
                n: CounterMetricFamily(f"triptych_{n}", w, labels=labels)
                for n, w in counters.items()
            },
        }
        for held in self._loads():
            for name, value in _figures(held).items():
                families[name].add_metric([held.model, str(held.group)], value)
        yield from families.values()


def _figures(held: Held) -> dict[str, float]:
    limits, load, price = held.limits, held.load, held.price
    return {
        "requests_waiting": load.num_waiting,
        "requests_running": load.num_running,
        "kv_blocks": limits.num_blocks,
        "kv_blocks_free": load.num_free_blocks,
        "kv_usage_ratio": 1 - load.num_free_blocks / limits.num_blocks,
        "step_fixed_seconds": price.fixed_s,
        "step_decode_row_seconds": price.decode_s,
        "step_prompt_row_seconds": price.prompt_s,
        "preemptions": load.num_preemptions,
        "prompt_tokens_reused": load.num_reused_tokens,
    }


class Metrics:
    """The figures of one server, in a registry of its own; all by model but the responses."""

    def __init__(self, loads: Loads) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(loads))
        self.responses = self._counter("responses", "HTTP responses.", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of admitted prompts.", "model")
        self.output_tokens = self._counter("output_tokens", "Tokens of answers.", "model")
        self.left = self._counter("clients_left", "Clients that left before the end.", "model")
        self.attained = self._counter("requests_in_time", "Answered within objectives.", "model")
        self.missed = self._counter("requests_missed", "Refused, late or lost.", "model")
        self.ttft_s = self._seconds("time_to_first_token", "Arrival to first token.", _TTFT_S)
        self.tpot_s = self._seconds("time_per_output_token", "Each token after it.", _TPOT_S)
        self.whole_s = self._seconds("request", "Arrival to last token.", _WHOLE_S)

    def ended(self, model: str, is_in_time: bool) -> None:
        """Counts a request of a model."""
        (self.attained if is_in_time else self.missed).labels(model).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' text form."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        name = f"triptych_{name}_seconds"
        return Histogram(name, words, ["model"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"triptych_{name}", words, labels, registry=self.registry)


class Stopwatch:
    """The times of one request for a model, from its arrival on."""

    def __init__(
        self, metrics: Metrics, model: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._model, self._clock = metrics, model, clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._has_ended = False

    def heard(self, outputs: Sequence[Output]) -> None:
        """Takes in that outputs have come."""
        num_tokens = sum(output.token is not None for output in outputs)
        if not num_tokens:
            return
        self._last_s = self._clock()
        self._metrics.output_tokens.labels(self._model).inc(num_tokens)
        if self._first_s is None:
            self._first_s = self._last_s
            self._metrics.ttft_s.labels(self._model).observe(self._first_s - self._start_s)

    def left(self) -> None:
        """Takes in that the client left before the end."""
        self._metrics.left.labels(self._model).inc()

    def ended(self, num_tokens: int, num_answers: int) -> None:
        """Takes in that nothing more comes; once."""
        if self._has_ended or self._first_s is None:
            return
        self._has_ended = True
        self._metrics.whole_s.labels(self._model).observe(self._last_s - self._start_s)
        rest = num_tokens / num_answers - 1
        if rest > 0:
            self._metrics.tpot_s.labels(self._model).observe((self._last_s - self._first_s) / rest)
