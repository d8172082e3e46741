"""What is read off a module is what its description says, for families that have one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from family_samples import FAMILIES, family_config

from triptych.capture.build import capture
from triptych.cluster.text import parse_cluster
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.storage import Storage
from triptych.model.count import forward_flops_per_token, parameters
from triptych.model.hf import from_config
from triptych.model.model import Block, Model
from triptych.model.operators import block_operators, embedding_operators, head_operators
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload
from triptych.search.intra.block import Layer
from triptych.search.intra.ilp import solve
from triptych.search.intra.modes import ENTRY, flows

BESIDE = ("gpt_neox", "cohere", "cohere norms")
"""Attention beside the MLP: both are added up in another order than the description's."""
LATENT = ("deepseek_v3",)
"""Latent attention: rotation and assembly are other kernels than the description's."""
GATED = ("qwen2_moe", "qwen2_moe window")
"""The gate of shared experts: its sigmoid is an operator of two elements."""
OTHERS = ("llama4_text", "llama4_text plain", "deepseek_v3 plain queries")
"""Every expert on every token; biases that the description leaves out and says so."""
SAME = [name for name in FAMILIES if name not in (*BESIDE, *LATENT, *GATED, *OTHERS)]


def both(name: str) -> tuple[Model, Model]:
    config = family_config(name)
    return capture(config, "it"), from_config(config, "it")


def pairs(one: Model, other: Model) -> set[tuple[Block, Block]]:
    return set(zip(one.blocks, other.blocks, strict=True))


@pytest.mark.parametrize("name", [*SAME, *BESIDE, *LATENT, *GATED])
def test_parameters_and_flops_are_those_of_the_description(name: str) -> None:
    captured, described = both(name)
    assert parameters(captured) == parameters(described)
    for causal in (True, False):
        flops = forward_flops_per_token(captured, 64, causal)
        assert flops == forward_flops_per_token(described, 64, causal)
    assert embedding_operators(captured) == embedding_operators(described)
    assert head_operators(captured) == head_operators(described)
    assert captured.tied == described.tied


@pytest.mark.parametrize("name", SAME)
def test_operators_and_flows_are_those_of_the_description(name: str) -> None:
    for own, block in pairs(*both(name)):
        _, described = both(name)
        assert own.captured is not None
        assert own.captured.operators == block_operators(described, block)
        ordered = flows((ENTRY, *block_operators(described, block)))
        assert sorted(own.captured.flows) == sorted(ordered)


@pytest.mark.parametrize("name", [*BESIDE, *GATED])
def test_operators_elsewhere_are_those_of_the_description_but_for_small_ones(name: str) -> None:
    captured, described = both(name)
    for own, block in pairs(captured, described):
        found = Counter(block_operators(captured, own))
        wanted = Counter(block_operators(described, block))
        assert not wanted - found
        assert all(op.kind == "memory" and op.elements <= 2 for op in found - wanted)


@pytest.mark.parametrize("name", SAME)
def test_layers_of_one_kind_are_equal(name: str) -> None:
    captured, described = both(name)
    assert len(set(captured.blocks)) == len(set(described.blocks))


def layer(model: Model, axes: tuple[int, ...], rows: int) -> Layer:
    workload = Workload(sequence_length=4096, global_batch=64)
    pricer = Pricer(model, parse_cluster("1x8xH100-SXM"), workload)
    plan = Plan.uniform(model.num_layers, precision=Precision.mixed())
    return Layer(
        pricer=pricer,
        block=pricer.kinds[0],
        axes=axes,
        rows=rows,
        num_microbatches=64 // rows,
        setting=Setting.of(plan),
        storage=Storage.of(plan),
    )


def best_layout(asked: Layer, share: float) -> list[tuple[str, list[str]]]:
    """The names of what each axis does to each operator, in `share` of what one device needs."""
    alone = replace(asked, axes=(1,)).graph()
    limit_bytes = share * alone.total_bytes([0] * len(alone.seconds))
    choice = solve(asked.graph(limit_bytes))
    assert choice is not None
    chosen = zip(asked.operators, asked.strategies, choice, strict=True)
    return [(op.name, [mode.name for mode in found[index]]) for op, found, index in chosen]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    ("axes", "rows", "share"), [((2,), 1, 0.7), ((2,), 2, 9.0), ((2, 2), 2, 0.4)]
)
def test_the_best_layout_is_that_of_the_description(
    name: str, axes: tuple[int, ...], rows: int, share: float
) -> None:
    captured, described = (best_layout(layer(model, axes, rows), share) for model in both(name))
    assert captured == described
