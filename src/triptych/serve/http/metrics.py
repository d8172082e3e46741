"""Figures for Prometheus: what the engine says of itself, and what clients see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from triptych.serve.core.limits import Limits
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.values import Output

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class _LoadCollector(Collector):
    """The engine's load, read when it is asked for."""

    def __init__(self, limits: Limits, load: Callable[[], Load]) -> None:
        self._limits, self._load = limits, load

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The figures of now."""
        load, blocks = self._load(), self._limits.num_blocks
        gauges = {
            "requests_waiting": ("Sequences that wait for room.", load.num_waiting),
            "requests_running": ("Sequences that run.", load.num_running),
            "kv_blocks": ("Blocks of keys and values.", blocks),
            "kv_blocks_free": ("Blocks that are free, with or without content.",
                               load.num_free_blocks),
            "kv_usage_ratio": ("Share of the blocks that is held.",
                               1 - load.num_free_blocks / blocks),
        }  # fmt: skip
        counters = {
            "preemptions": ("Sequences that gave up their blocks.", load.num_preemptions),
            "prompt_tokens_reused": ("Prompt tokens found in the cache.", load.num_reused_tokens),
        }
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(f"triptych_{name}", words, value)
        for name, (words, value) in counters.items():
            yield CounterMetricFamily(f"triptych_{name}", words, value)


class Metrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, limits: Limits, load: Callable[[], Load]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_LoadCollector(limits, load))
        self.responses = Counter(
            "triptych_responses", "HTTP responses.", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "triptych_prompt_tokens", "Tokens of admitted prompts.", registry=registry
        )
        self.output_tokens = Counter(
            "triptych_output_tokens", "Tokens of answers.", registry=registry
        )
        self.left = Counter(
            "triptych_clients_left", "Clients that left before the end.", registry=registry
        )
        self.ttft_s = self._seconds("time_to_first_token", "Arrival to first token.", _TTFT_S)
        self.tpot_s = self._seconds("time_per_output_token", "Each token after it.", _TPOT_S)
        self.whole_s = self._seconds("request", "Arrival to last token.", _WHOLE_S)

    def text(self) -> bytes:
        """All of them in Prometheus' text form."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"triptych_{name}_seconds", words, buckets=buckets, registry=self.registry)


class Stopwatch:
    """The times of one request, from its arrival on."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
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
        self._metrics.output_tokens.inc(num_tokens)
        if self._first_s is None:
            self._first_s = self._last_s
            self._metrics.ttft_s.observe(self._first_s - self._start_s)

    def left(self) -> None:
        """Takes in that the client left before the end."""
        self._metrics.left.inc()

    def ended(self, num_tokens: int, num_answers: int) -> None:
        """Takes in that nothing more comes; once."""
        if self._has_ended or self._first_s is None:
            return
        self._has_ended = True
        self._metrics.whole_s.observe(self._last_s - self._start_s)
        rest = num_tokens / num_answers - 1
        if rest > 0:
            self._metrics.tpot_s.observe((self._last_s - self._first_s) / rest)
