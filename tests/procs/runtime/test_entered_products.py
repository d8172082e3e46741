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
from triptych.runtime.comm import Communicator
from triptych.runtime.tensor.linear import Deferral

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
FAMILIES = ("llama biases", "gpt2", "phi3", "deepseek_v3")  # apart, transposed, packed, few alone


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


class _Ends:
    """A communication whose wait is noted."""

    def __init__(self, events: list[str], name: str, pending: Any) -> None:
        self._events, self._name, self._pending = events, name, pending

    def wait(self) -> torch.Tensor:
        self._events.append(f"{self._name} ends")
        return self._pending.wait()


def _events(plan: Plan, config: dict[str, Any]) -> list[str]:
    """Communication of tensor ranks and products of weights' gradients, from the first of those."""
    events: list[str] = []

    def noted(name: str, start: Any) -> Any:
        def begin(comm: Communicator, *args: Any) -> Any:
            if comm.axis != "tensor":
                return start(comm, *args)
            events.append(f"{name} starts")
            return _Ends(events, name, start(comm, *args))

        return begin

    def taken(deferral: Deferral, *args: Any) -> None:
        if events[-1] != "dW":
            events.append("dW")
        take(deferral, *args)

    engine = make_engine(plan, config)
    rows = batch_of(0, 1, 24, config["vocab_size"])
    take = Deferral.take
    with pytest.MonkeyPatch.context() as patch:
        for name, method in (("gather", "all_gather"), ("sum", "reduce_scatter")):
            start = getattr(Communicator, f"start_{method}")
            patch.setattr(Communicator, f"start_{method}", noted(name, start))
        patch.setattr(Deferral, "take", taken)
        engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3)
    return events[events.index("dW") :]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gather_starts_before_the_sum_whose_wait_is_behind_the_products(family: str) -> None:
    config = family_config(family) | {"num_hidden_layers": 1}
    last = ["dW"]  # of a region's last product
    entry = ["gather starts", "sum starts", "gather ends", "dW", "sum ends"]
    gradient = ["gather starts", "gather ends"]  # of what leaves a region, and the embedding
    plan = Plan.uniform(1, tp=2, sequence_parallel=True)
    for events in run_ranks(2, _events, plan, config):
        assert events == [*last, *entry, *gradient, *last, *entry, *gradient]
