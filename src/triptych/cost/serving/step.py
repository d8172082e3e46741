"""Seconds of one step of a serving engine on each stage, by what they are spent on.

A step computes a token of every running sequence and tokens of prompts besides, in one batch:
products see them all together, attention apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.attention import flash_s
from triptych.cost.kernels.gemm import KERNEL_S
from triptych.cost.kernels.rates import Rates, rates, slowest_device
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.kernels import Reducer, product_s, reducer
from triptych.cost.serving.layout import Layer, Layout, is_wide, weight_bytes
from triptych.cost.shard import LocalOperator
from triptych.plan.serving import ServingPlan
from triptych.units import DTYPE_BYTES


class Load(NamedTuple):
    """What a step computes. Counts may be means, hence fractions."""

    decodes: float = 0.0  # sequences that compute one token
    context: float = 0.0  # cached tokens that they attend to, all together
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0  # pairs of tokens that prompts attend over
    samples: float = 0.0  # sequences that get a new token

    @property
    def tokens(self) -> float:
        """Rows of a product."""
        return self.decodes + self.prompt_tokens


class StepParts(NamedTuple):
    """Seconds of a stage in a step."""

    products_s: float = 0.0
    attention_s: float = 0.0
    kernels_s: float = 0.0  # norms, positions, activations, residuals
    tensor_s: float = 0.0  # all-reduces
    head_s: float = 0.0  # product with the vocabulary, gathering, sampling
    host_s: float = 0.0  # what issuing adds to the device's work

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


LAUNCHES = 8
"""Kernels of a layer that are products, attention or collectives."""

SAMPLING_BYTES = 12.0
"""Bytes a logit of softmax and sampling: fp32, read, written and sorted in part."""


class Stepper:
    """Prices steps of one layout. Same layout, same load: same seconds."""

    def __init__(self, layout: Layout, cluster: Cluster, plan: ServingPlan, engine: Engine) -> None:
        device = slowest_device(cluster)
        self.layout, self.plan, self.engine = layout, plan, engine
        whole = rates(device, plan.weights)
        self.cache_bytes_per_s = whole.read_bytes_per_s * engine.decode_rate
        whole = _reading(whole, engine.weight_rate)
        is_narrow = plan.weights == "fp8"
        self.rates: Rates = whole.slowed(engine.fp8_rate) if is_narrow else whole
        self.wide_rates = rates(device, "bf16") if is_narrow else self.rates
        self.cache_bytes = DTYPE_BYTES[plan.cache]
        self.reducer: Reducer = reducer(cluster, plan.tensor, engine.one_shot_s)
        self.start_s = 0.0 if whole.is_cpu else KERNEL_S

    def stage(self, index: int, load: Load) -> StepParts:
        """Seconds of a stage."""
        stage = self.layout.stages[index]
        parts = [self.layer(layer, load) for layer in stage.layers]
        products, attention, kernels, tensor = (sum(column) for column in zip(*parts, strict=True))
        is_last = index == len(self.layout.stages) - 1
        head = self.head_s(load) if is_last else 0.0
        device_s = products + attention + kernels + tensor + head
        layers = sum(layer.count for layer in stage.layers)
        issued_s = layers * (self.engine.kernels + LAUNCHES) * self.engine.eager_s
        host = max(0.0, issued_s - device_s)
        if is_last:
            host += self.engine.host_s + load.samples * self.engine.sequence_s
        return StepParts(products, attention, kernels, tensor, head, host)

    def stages_s(self, load: Load) -> list[float]:
        """Seconds of each stage."""
        return [self.stage(index, load).total_s for index in range(len(self.layout.stages))]

    def layer(self, layer: Layer, load: Load) -> tuple[float, float, float, float]:
        """Products, attention, other kernels and all-reduces of a kind of layer, all of them."""
        products = sum(self._product(op, load.tokens) for op in layer.products)
        element_s = self.rates.element_bytes / self.rates.memory_bytes_per_s
        moved_s = layer.moved * load.tokens * element_s + self.engine.kernels * self.start_s
        reduce_s = self.reducer.all_reduce_s(load.tokens * self.layout.hidden * 2.0)
        attention_s = self._decoding(layer, load) + self._prompts(layer, load)
        n = layer.count
        return products * n, attention_s * n, moved_s * n, layer.sums * reduce_s * n

    def head_s(self, load: Load) -> float:
        """Head, gathered logits and sampling for the last token of each sequence."""
        samples = load.samples
        if not samples:
            return 0.0
        head, wide = self.layout.head, self.wide_rates
        seconds = product_s(wide, samples, head.k, head.n, weight_bytes=self.plan.wide_bytes)
        seconds += self.reducer.group.gather_s(samples * self.layout.vocab * 2.0)
        sampled_s = samples * self.layout.vocab * SAMPLING_BYTES / wide.memory_bytes_per_s
        return seconds + sampled_s + 4 * self.start_s

    def _product(self, local: LocalOperator, tokens: float) -> float:
        """A product, or the experts that any token of the step visits."""
        op = local.operator
        rows, copies = tokens, float(local.copies)
        if op.copies > 1:
            visited = 1.0 - (1.0 - op.tokens_factor / op.copies) ** max(1.0, tokens)
            copies = op.copies * visited
            rows = tokens * op.tokens_factor / copies
        attained = self.wide_rates if is_wide(local, self.plan) else self.rates
        size = weight_bytes(local, self.plan)
        return product_s(attained, rows, local.k, local.n, weight_bytes=size, copies=copies)

    def _decoding(self, layer: Layer, load: Load) -> float:
        """Cached keys and values are read once for the query heads that a kernel does together."""
        if not load.decodes:
            return 0.0
        limit = load.decodes * layer.window if layer.window else math.inf
        heads = layer.core.query_heads / layer.core.kv_heads
        passes = math.ceil(heads / self.engine.grouped_heads)
        context = min(load.context, limit)
        read_bytes = context * layer.cache_elements * passes * self.cache_bytes
        flops = 2.0 * context * layer.core.query_heads * layer.width
        seconds = max(read_bytes / self.cache_bytes_per_s, flops / self.wide_rates.gemm_flops)
        return seconds + self.start_s

    def _prompts(self, layer: Layer, load: Load) -> float:
        """A flash kernel over what each prompt token sees."""
        if not load.prompt_tokens:
            return 0.0
        context, op = load.prompt_pairs / load.prompt_tokens, layer.core.operator
        forward_s, _ = flash_s(
            self.rates,
            self.engine.flash,
            heads=layer.core.query_heads,
            width=op.head_dim + op.value_dim,
            context=min(context, layer.window) if layer.window else context,
            tokens=load.prompt_tokens,
        )
        return forward_s


def _reading(rates: Rates, rate: float) -> Rates:
    """The same with memory so many times faster."""
    return replace(
        rates,
        memory_bytes_per_s=rates.memory_bytes_per_s * rate,
        read_bytes_per_s=rates.read_bytes_per_s * rate,
    )
