"""Steps of a serving engine: what grows with the batch and what does not, on every kind of link."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from triptych.cluster.text import parse_cluster
from triptych.cost.serving.balance import balanced_layers, cut
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.engines import FAMILIES
from triptych.cost.serving.layout import cache_elements, layout
from triptych.cost.serving.step import Load, StepParts, Stepper
from triptych.model.load import load_model
from triptych.plan.serving import ServingPlan

LINKS = {
    "PCIe": ("1x8xL40S", 8),
    "NVLink": ("1x8xH100-SXM", 8),
    "InfiniBand": ("8x1xH100-SXM", 8),
}


def plan(tensor: int, layers: tuple[int, ...] = (80,), **settings: str) -> ServingPlan:
    return ServingPlan(layers=layers, tensor=tensor, replicas=1, batch=256, chunk=2048, **settings)


def stepper(cluster: str, chosen: ServingPlan, name: str, engine: Engine = TRIPTYCH) -> Stepper:
    return Stepper(layout(load_model(name), chosen), parse_cluster(cluster), chosen, engine)


def decode(steps: Stepper, batch: int, context: int = 1024) -> StepParts:
    return steps.stage(0, Load(decodes=batch, context=batch * context, samples=batch))


@pytest.mark.parametrize(("cluster", "tensor"), LINKS.values(), ids=LINKS)
def test_all_reduces_of_a_decode_grow_linearly_with_the_batch(cluster: str, tensor: int) -> None:
    steps = stepper(cluster, plan(tensor), "llama-3.1-70b")
    times = [decode(steps, batch).tensor_s for batch in (256, 512, 1024, 2048)]
    grown = [after - before for before, after in pairwise(times)]
    assert grown[1] == pytest.approx(2 * grown[0], rel=0.25)
    assert grown[2] == pytest.approx(2 * grown[1], rel=0.1)


@pytest.mark.parametrize(("cluster", "tensor"), LINKS.values(), ids=LINKS)
def test_products_of_a_decode_stay_flat_where_all_reduces_grow(cluster: str, tensor: int) -> None:
    steps = stepper(cluster, plan(tensor), "llama-3.1-70b")
    small, large = decode(steps, 8), decode(steps, 64)
    assert large.products_s < 1.1 * small.products_s
    assert large.attention_s > 6 * small.attention_s - 7 * 80 * steps.start_s
    sent = 80 * 2 * 56 * 8192 * 2.0  # bytes that 56 more sequences sum, in all layers
    assert large.tensor_s - small.tensor_s > 0.5 * sent / steps.reducer.group.bytes_per_s


def test_a_decode_reads_weights_at_the_rate_that_reading_attains() -> None:
    """On processors a copy counts both ways; one core may read more slowly than it copies."""
    cluster, chosen = parse_cluster("1x1xcpu"), plan(1, (16,), weights="fp32", cache="fp32")
    group = cluster.groups[0]
    copied = group.device.memory_bytes_per_s * group.device.memory_efficiency
    device = replace(group.device, read_bytes_per_s=copied / 2)
    known = replace(cluster, groups=(replace(group, device=device),))
    model = layout(load_model("llama-3.2-1b"), chosen)
    times = [decode(Stepper(model, each, chosen, TRIPTYCH), 1) for each in (cluster, known)]
    assert times[1].products_s == pytest.approx(2 * times[0].products_s, rel=0.01)
    assert times[1].attention_s == pytest.approx(2 * times[0].attention_s, rel=0.01)
    assert times[1].kernels_s == times[0].kernels_s


def test_products_wait_for_weights_then_for_arithmetic() -> None:
    steps = stepper("1x8xH100-SXM", plan(8), "llama-3.1-70b")
    weights_s = steps.layout.stages[0].weights_bytes / steps.rates.memory_bytes_per_s
    one, many = decode(steps, 1), decode(steps, 4096)
    assert one.products_s == pytest.approx(weights_s, rel=0.25)
    flops = 2 * 70e9 / 8 * 4096
    assert many.products_s > flops / steps.rates.burst_flops > 2 * one.products_s


def test_narrow_weights_halve_what_is_read() -> None:
    wide = stepper("1x8xH100-SXM", plan(8), "llama-3.1-70b")
    narrow = stepper("1x8xH100-SXM", plan(8, weights="fp8", cache="fp8"), "llama-3.1-70b")
    mixed = ServingPlan(
        layers=(80,), tensor=8, replicas=1, batch=1, chunk=1, weights="fp8", wide_attention=True
    )
    half = stepper("1x8xH100-SXM", mixed, "llama-3.1-70b")
    assert decode(narrow, 8).products_s < 0.7 * decode(wide, 8).products_s
    assert decode(narrow, 8).products_s < decode(half, 8).products_s < decode(wide, 8).products_s
    assert decode(narrow, 64).attention_s < 0.65 * decode(wide, 64).attention_s


def test_a_small_step_reads_only_the_experts_that_tokens_visit() -> None:
    steps = stepper("1x8xH100-SXM", plan(8, (32,)), "mixtral-8x7b-v0.1")
    one, many = decode(steps, 1).products_s, decode(steps, 64).products_s
    assert 2.0 < many / one < 4.0  # 2 of 8 experts against all of them, and attention's products


def test_latent_attention_waits_for_arithmetic_where_one_rank_has_all_heads() -> None:
    name, narrow = "deepseek-v3", {"weights": "fp8", "cache": "fp8"}
    whole = stepper("1x8xH200", plan(1, (61,), **narrow), name)
    eighth = stepper("1x8xH200", plan(8, (61,), **narrow), name)
    context = 64 * 4096
    read_s = 61 * context * 576 / eighth.cache_bytes_per_s
    parts = [decode(steps, 64, 4096).attention_s - 61 * steps.start_s for steps in (whole, eighth)]
    assert parts[1] == pytest.approx(read_s, rel=0.01)  # the latent is whole on every rank
    assert parts[0] > 2 * read_s


def test_prompts_share_a_step_with_decodes() -> None:
    steps = stepper("1x8xH100-SXM", plan(8), "llama-3.1-70b")
    light = Load(decodes=32, context=32 * 1024, samples=32)
    prompt = Load(prompt_tokens=1024, prompt_pairs=1024 * 512, samples=1)
    both = light._replace(prompt_tokens=1024, prompt_pairs=1024 * 512, samples=33)
    apart = sum(steps.stage(0, load).total_s for load in (light, prompt))
    assert steps.stage(0, light).total_s < steps.stage(0, both).total_s < apart


def test_host_time_shows_without_captured_graphs() -> None:
    eager = Engine(name="eager", eager_s=1e-4, host_s=0.0, sequence_s=0.0)
    steps = stepper("1x8xH100-SXM", plan(8), "llama-3.1-70b", eager)
    parts = decode(steps, 8)
    assert parts.total_s == pytest.approx(80 * (eager.kernels + 8) * 1e-4)
    assert parts.host_s > 0.5 * parts.total_s


# --- stages --------------------------------------------------------------------------------------


def brute_force(layers_s: list[float], head_s: float, stages: int) -> float:
    """The least slowest stage over all contiguous cuts."""
    if stages == 1:
        return sum(layers_s) + head_s
    return min(
        max(sum(layers_s[:count]), brute_force(layers_s[count:], head_s, stages - 1))
        for count in range(1, len(layers_s) - stages + 2)
    )


@pytest.mark.parametrize("head_s", [0.0, 1.3, 4.0, 9.0])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_are_cut_as_well_as_any_cut_can(head_s: float, stages: int) -> None:
    layers_s = [1.0, 2.0, 1.5, 1.0, 3.0, 0.5, 1.0, 1.0]
    parts = cut(layers_s, head_s, stages)
    edges = [sum(parts[:i]) for i in range(stages + 1)]
    times = [sum(layers_s[a:b]) for a, b in pairwise(edges)]
    times[-1] += head_s
    assert sum(parts) == len(layers_s) and min(parts) > 0
    assert max(times) == pytest.approx(brute_force(layers_s, head_s, stages))


def test_pipelines_for_serving_equal_brute_force_on_random_layers() -> None:
    generator = random.Random(3)
    for _ in range(300):
        layers_s = [generator.choice((0.5, 1.0, 2.5, 4.0)) for _ in range(generator.randint(1, 9))]
        stages, head_s = generator.randint(1, len(layers_s)), generator.uniform(0.0, 6.0)
        parts = cut(layers_s, head_s, stages)
        edges = [sum(parts[:i]) for i in range(stages + 1)]
        times = [sum(layers_s[a:b]) for a, b in pairwise(edges)]
        times[-1] += head_s
        assert sum(parts) == len(layers_s) and min(parts) > 0 and len(parts) == stages
        assert max(times) == pytest.approx(brute_force(layers_s, head_s, stages))


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    model, cluster = load_model("gemma-2-9b"), parse_cluster("1x4xA100-SXM4-80GB")
    even = plan(1, (11, 11, 10, 10))
    load = Load(decodes=64, context=64 * 1024.0, samples=64)
    layers = balanced_layers(model, cluster, even, TRIPTYCH, load)
    balanced = plan(1, layers)
    slowest = [
        max(steps.stage(i, load).total_s - steps.stage(i, load).host_s for i in range(4))
        for steps in (
            Stepper(layout(model, chosen), cluster, chosen, TRIPTYCH) for chosen in (even, balanced)
        )
    ]
    assert sum(layers) == 42 and layers[-1] < min(layers[:-1])
    assert slowest[1] < slowest[0]


# --- keys and values -----------------------------------------------------------------------------

CACHE_BYTES = {
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096,
    "gpt-3-175b": 4_718_592,
    "deepseek-v3": 70_272,
}
"""Of a token in 16 bit (domain facts, and DeepSeek-V2 2024, table 1)."""


@pytest.mark.parametrize(("name", "size"), CACHE_BYTES.items())
def test_bytes_of_a_cached_token(name: str, size: int) -> None:
    model = load_model(name)
    assert sum(2 * cache_elements(block.attention, 1) for block in model.blocks) == size


def test_tensor_ranks_divide_heads_but_not_latents() -> None:
    grouped = load_model("llama-3.1-70b").blocks[0].attention
    latent = load_model("deepseek-v3").blocks[0].attention
    assert [cache_elements(grouped, t) for t in (1, 2, 8, 16)] == [2048, 1024, 256, 256]
    assert cache_elements(latent, 8) == cache_elements(latent, 1)


def test_every_engine_has_features_in_their_ranges() -> None:
    for engine in FAMILIES.values():
        assert 0 < engine.memory_share <= 1 and 0 < engine.decode_rate <= 1.1
        assert engine.chunk_tokens >= 512 and engine.grouped_heads >= 1
        assert 1 <= engine.flash <= 3 and engine.lag_steps >= 0
