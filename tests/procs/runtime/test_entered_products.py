"""What travels at the entry of a tensor-parallel region does so behind products, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import Run, batch_of, make_engine, merge, split, train
from ranks import run_ranks

import triptych.runtime.tensor.shard as shard
from triptych.plan.plan import Plan
from triptych.runtime.tensor import linear

PLANS: dict[str, dict[str, Any]] = {
    "TP2": {},
    "TP2+SP": {"sequence_parallel": True},
    "TP2+SP ZB-H1 recompute": {
        "sequence_parallel": True,
        "pp": 2,
        "schedule": "zb-h1",
        "recompute": "full",
    },
}
FAMILIES = ("llama", "gpt2", "phi3", "deepseek_v3")  # separate, transposed, packed; few are alone


def _both(plan: Plan, config: dict[str, Any]) -> tuple[Run, Run]:
    """As it is, and with every exchange waited for where it begins."""
    ours = train(plan, config)
    shard.are_joined = lambda linears: False
    return ours, train(plan, config)


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_travels_behind_products_changes_no_bit(family: str, layout: str) -> None:
    plan = Plan.uniform(4, tp=2, microbatch=2, **PLANS[layout])
    by_rank = run_ranks(plan.world_size, _both, plan, family_config(family))
    ours, waiting = (merge(list(runs)) for runs in zip(*by_rank, strict=True))
    assert ours.losses == waiting.losses and ours.norms == waiting.norms
    for key, expected in waiting.tensors.items():
        assert torch.equal(ours.tensors[key], expected), key


class _Watched:
    """What the backward of a step does at the entries of regions, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        gather, add = linear.Region.start_gather, linear.Region.start_sum
        product, take = linear._add_product, linear._take

        def start_gather(region: Any, local: torch.Tensor) -> Any:
            self.events.append("gather starts")
            wait = gather(region, local)
            return lambda: (self.events.append("gather ends"), wait())[1]

        def start_sum(region: Any, grad: torch.Tensor) -> Any:
            self.events.append("sum starts")
            return _Ends(self.events, add(region, grad))

        def note(name: str, function: Any) -> Any:
            return lambda *args: (self.events.append(name), function(*args))[1]

        monkeypatch.setattr(linear.Region, "start_gather", start_gather)
        monkeypatch.setattr(linear.Region, "start_sum", start_sum)
        monkeypatch.setattr(linear, "_add_product", note("dx", product))
        monkeypatch.setattr(linear, "_take", note("dW", take))


class _Ends:
    def __init__(self, events: list[str], pending: Any) -> None:
        self._events, self._pending = events, pending

    def wait(self) -> torch.Tensor:
        self._events.append("sum ends")
        return self._pending.wait()


def test_gradients_of_inputs_hide_the_gather_and_those_of_weights_the_sum() -> None:
    def body(plan: Plan) -> list[str]:
        engine = make_engine(plan, config)
        rows = batch_of(0, 1, 24, config["vocab_size"])
        with pytest.MonkeyPatch.context() as monkeypatch:
            watched = _Watched(monkeypatch)
            engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3)
        return watched.events

    config = family_config("llama") | {"num_hidden_layers": 1}
    plan = Plan.uniform(1, tp=2, sequence_parallel=True)
    row = ["dx", "dW"]  # of the region's last product, whose gradient is gathered before
    for events in run_ranks(2, body, plan):
        assert events == [
            *row,
            *("gather starts", "dx", "dx", "sum starts", "gather ends", "dW", "dW", "sum ends"),
            *row,
            *("gather starts", *["dx"] * 3, "sum starts", "gather ends", *["dW"] * 3, "sum ends"),
        ]
