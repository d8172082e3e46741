"""The ends of the model: the embedding in front, the head with its loss behind.

The head makes its gradients in the forward pass, chunk by chunk, so all three of its products are
in F of the last stage and logits are never whole (`runtime/tensor/loss.py`).
"""

from __future__ import annotations

import math

from triptych.cost.kernels.gemm import gemm_s
from triptych.cost.operators import host_s, operator_seconds, with_host
from triptych.cost.setting import Parts, PieceCost, Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site

CHUNK_TOKENS = 1024
"""Tokens whose logits are alive at once."""

LOSS_OPERATORS = 6


def embedding_cost(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> PieceCost:
    """The lookup and the sum of the ranks' parts; the backward scatters into the table."""
    seconds = [operator_seconds(site, op, setting) for op in local]
    forward_host_s, backward_host_s = host_s(site, setting, len(local))
    forward_s = with_host(site.rates, sum(s.forward_s for s in seconds), forward_host_s)
    backward_s = with_host(site.rates, sum(s.backward_s for s in seconds), backward_host_s)
    table_elements = sum(op.weight_elements for op in local if op.operator.split == "vocab")
    backward_s += table_elements * site.rates.element_bytes / site.rates.memory_bytes_per_s
    gathered_s, reduced_s = _exchange_s(site, setting)
    return PieceCost(
        forward=Parts(compute_s=forward_s, tensor_s=reduced_s),
        backward=Parts(
            compute_s=backward_s, tensor_s=gathered_s if setting.sequence_parallel else 0.0
        ),
        recomputed_flops=0.0,
        saved_bytes=0.0,
        working_bytes=0.0,
    )


def head_cost(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> PieceCost:
    """Final norm, the product with the vocabulary, softmax and its small all-reduces.

    Ours makes all gradients in the forward, chunk by chunk; programs that keep logits whole make
    them in the backward.
    """
    tokens = site.tokens(setting)
    norm, product = local[0], local[1]
    norm_s = operator_seconds(site, norm, setting)
    is_whole = bool(site.software.footprint.logit_bytes)
    chunks = 1 if is_whole else math.ceil(tokens / CHUNK_TOKENS)
    forward_s, backward_s = _chunk_s(site, product, setting, tokens / chunks)
    early_s = chunks * (forward_s if is_whole else forward_s + backward_s)
    late_s = backward_s if is_whole else 0.0
    gathered_s, reduced_s = _exchange_s(site, setting)
    norm_saved = norm.saved + norm.sequence_saved / setting.sequence_split
    return PieceCost(
        forward=Parts(
            compute_s=norm_s.forward_s + early_s,
            tensor_s=chunks * _softmax_sums_s(site, tokens / chunks)
            + (gathered_s if setting.sequence_parallel else 0.0),
        ),
        backward=Parts(compute_s=norm_s.backward_s + late_s, tensor_s=reduced_s),
        recomputed_flops=0.0,
        saved_bytes=(norm_saved + site.model.hidden) * tokens * site.rates.element_bytes,
        working_bytes=0.0,
        logits_bytes=_logits_bytes(site, tokens, product.n, setting.tensor),
        head_gradient_bytes=0.0
        if site.software.footprint.in_place
        else product.weight_elements * site.rates.element_bytes,
    )


def _logits_bytes(site: Site, tokens: float, width: int, tensor: int) -> float:
    """Bytes of the logits that exist at once, with what is made of them."""
    kept = site.software.footprint
    whole = (tensor > 1 and kept.split_logit_bytes) or kept.logit_bytes
    if whole:
        return tokens * width * whole * site.rates.element_bytes / 2.0
    return min(CHUNK_TOKENS, tokens) * width * logit_bytes(site.rates.element_bytes)


def logit_bytes(element_bytes: float) -> float:
    """Bytes per logit of a chunk: fp32, overwritten by its gradient; 16-bit copies around it."""
    return element_bytes if element_bytes >= 4 else 4.0 + 2.0 * element_bytes


def _chunk_s(
    site: Site, product: LocalOperator, setting: Setting, rows: float
) -> tuple[float, float]:
    """One chunk: logits, softmax and loss; gradients of the hidden states and of the matrix."""
    rates, k, n = site.rates, product.k, product.n
    moved_bytes = rows * n * site.software.kernels(setting.compile).loss_bytes
    moved_s = moved_bytes / rates.memory_bytes_per_s / 2.0
    if rates.kernels:
        moved_s = rates.kernels.operators["loss"][0].above_least(rows * n) / 2.0
    issued_s = host_s(site, setting, LOSS_OPERATORS)[0] / 2.0
    gradients_s = gemm_s(rates, rows, n, k) + gemm_s(rates, k, rows, n)
    return (
        with_host(rates, gemm_s(rates, rows, k, n) + moved_s, issued_s),
        with_host(rates, gradients_s + moved_s, issued_s),
    )


def _softmax_sums_s(site: Site, rows: float) -> float:
    """The maximum, then the sum of exponentials with the target's logit; in fp32."""
    return site.tensor.all_reduce_s(4.0 * rows) + site.tensor.all_reduce_s(8.0 * rows)


def _exchange_s(site: Site, setting: Setting) -> tuple[float, float]:
    """Seconds to gather the hidden states, and to sum them (all-reduce or reduce-scatter)."""
    size_bytes = site.activation_bytes(setting)
    gathered_s = site.tensor.gather_s(size_bytes)
    if setting.sequence_parallel:
        return gathered_s, gathered_s
    return 0.0, site.tensor.all_reduce_s(size_bytes)
