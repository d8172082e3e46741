"""Compiled layers = layers as they are; one graph for all that are alike, no break inside.

Most tests stop short of machine code (`aot_eager`): graphs, taps and collectives are the same. A
compiler may round otherwise: fp64 to 1e-10, fp32 to 1e-5.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # loaded once here, not once a rank
import torch._functorch.aot_autograd
from layouts import DOUBLE, Run, assert_equal_runs, batch_of, make_engine, merge, tiny_config, train
from ranks import run_ranks
from torch._dynamo.utils import counters
from transformers.activations import ACT2FN

import triptych.runtime.compiled as compiled
from triptych.plan.plan import Plan, Precision
from triptych.runtime.engine import MicroBatch

compiled.BACKEND = "aot_eager"

PAIRED: dict[str, dict[str, Any]] = {
    "PP2": {"pp": 2},
    "PP2 ZB-H1": {"pp": 2, "schedule": "zb-h1"},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "ZeRO-3 recompute": {"dp": 2, "zero": 3, "recompute": "full"},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "TP2+SP recompute": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
}


def _plan(**settings: Any) -> Plan:
    return Plan.uniform(4, microbatch=2, precision=DOUBLE, **settings)


def _both(settings: list[dict[str, Any]]) -> list[tuple[Run, Run, int]]:
    """Each layout as it is and compiled, and the graphs that were made for it."""
    found = []
    for changes in settings:
        counters.clear()
        as_it_is, ours = (
            train(_plan(**changes, compile=compile), tiny_config(), eps=1e-2)
            for compile in (False, True)
        )
        assert not counters["graph_break"]
        found.append((as_it_is, ours, counters["stats"]["unique_graphs"]))
    return found


@pytest.fixture(scope="module")
def paired() -> dict[str, tuple[Run, Run, list[int]]]:
    by_rank = run_ranks(2, _both, list(PAIRED.values()), timeout_s=240)
    return {
        name: (
            merge([as_it_is for as_it_is, _, _ in parts]),
            merge([ours for _, ours, _ in parts]),
            [graphs for _, _, graphs in parts],
        )
        for name, parts in zip(PAIRED, zip(*by_rank, strict=True), strict=True)
    }


@pytest.mark.parametrize("layout", PAIRED)
def test_compiled_layers_give_the_same(
    paired: dict[str, tuple[Run, Run, list[int]]], layout: str
) -> None:
    as_it_is, ours, _ = paired[layout]
    assert_equal_runs(ours, as_it_is, 1e-10)


def test_layers_that_are_alike_share_a_graph(
    paired: dict[str, tuple[Run, Run, list[int]]],
) -> None:
    """Two layers of a stage, two stages' worth of layouts: one graph until something differs."""
    made = {layout: graphs for layout, (_, _, graphs) in paired.items()}
    assert made["PP2"] == [1, 1]
    assert made["PP2 ZB-H1"] == made["ZeRO-3"] == made["ZeRO-3 recompute"] == [0, 0]
    assert made["TP2+SP"] == [1, 1]


def _lengths() -> tuple[list[float], list[float], int]:
    """Losses of steps of several lengths, as it is and compiled, and the graphs."""
    config = tiny_config()
    counters.clear()
    losses: list[list[float]] = []
    for compile in (False, True):
        engine = make_engine(_plan(compile=compile), config)
        found = []
        for length in (24, 16, 32, 8, 24):
            rows = batch_of(length, 2, length, config["vocab_size"])
            ids, labels = (torch.stack(column) for column in zip(*rows, strict=True))
            found.append(engine.step([MicroBatch(ids, labels)], 1e-2).loss)
        losses.append(found)
    return losses[0], losses[1], counters["stats"]["unique_graphs"]


def _kept() -> tuple[int, int]:
    """Inputs of linears that wait for a backward, of layers that keep them and of repeated ones."""
    found = []
    for recompute in ("none", "full"):
        engine = make_engine(_plan(compile=True, recompute=recompute), tiny_config())
        engine.buckets.begin_step()
        ids = torch.stack([row[0] for row in batch_of(0, 2, 24, 512)])
        hidden = engine.stages[0](ids)
        calls = [call for call in gc.get_objects() if type(call) is compiled._Call]
        found.append(sum(len(call.inputs) for call in calls))
        del calls, hidden, engine
        gc.collect()
    return found[0], found[1]


class _Opaque(torch.nn.GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _refused() -> tuple[list[float], list[str]]:
    """Losses and messages of layers that the compiler cannot look into, or with dropout."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("triptych").addHandler(Keep())
    losses = []
    ACT2FN["gelu"] = _Opaque
    for compile in (False, True):
        engine = make_engine(_plan(compile=compile), tiny_config(hidden_act="gelu"))
        rows = batch_of(0, 2, 24, 512)
        ids, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        losses += [engine.step([MicroBatch(ids, labels)], 1e-2).loss for _ in range(2)]
    make_engine(_plan(compile=True), tiny_config(attention_dropout=0.1))
    return losses, messages


class _Alone(NamedTuple):
    """What one rank found; the layers that are alike share a graph all the way."""

    lengths: tuple[list[float], list[float], int]
    kept: tuple[int, int]
    refused: tuple[list[float], list[str]]


@pytest.fixture(scope="module")
def alone() -> _Alone:
    found = run_ranks(1, lambda: (_lengths(), _kept(), _refused()), timeout_s=280)
    return _Alone(*found[0])


def test_lengths_that_vary_are_compiled_for_once_more(alone: _Alone) -> None:
    as_it_is, ours, graphs = alone.lengths
    assert ours == pytest.approx(as_it_is, rel=1e-10)
    assert graphs == 2  # of one length, then of all


def test_repeated_layers_keep_nothing_for_their_linears(alone: _Alone) -> None:
    """Queries, keys and values share an input, and so do the gate and what it gates."""
    assert alone.kept == (4 * 4, 0)


def _machine_code() -> tuple[Run, Run]:
    compiled.BACKEND = "inductor"
    plan = Plan.uniform(2, microbatch=2, precision=Precision(), compile=True)
    config = tiny_config(num_hidden_layers=2)
    as_it_is, ours = (train(p, config, eps=1e-2) for p in (plan.with_(compile=False), plan))
    return as_it_is, ours


@pytest.mark.timeout(900)  # a C++ compiler runs a dozen times
def test_machine_code_gives_the_same() -> None:
    """The compiler that makes it warns when it is imported; warnings are errors here."""
    ((as_it_is, ours),) = run_ranks(1, _machine_code, timeout_s=800)
    assert_equal_runs(merge([ours]), merge([as_it_is]), 1e-5)


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(alone: _Alone) -> None:
    losses, messages = alone.refused
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-10)
    assert "cannot be compiled and runs as it is" in messages[0]
    reason = "not compiled, since dropout draws a mask for every sequence: layers 0, 1, 2, 3"
    assert messages[-1] == reason
