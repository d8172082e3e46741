"""Exchanges at the entries of tensor-parallel regions: exposed where no product hides them."""

from __future__ import annotations

import pytest
from cost_samples import cluster, llama, setting, work

from triptych.cost.operators import operator_seconds
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting

MODEL = llama(hidden=1024, heads=16, kv_heads=8, width=4096)
LINKS = (1e9, 30e9, 300e9)  # all of it, some of it, none of it is exposed


def _products(pricer: Pricer, own: Setting) -> list[tuple[float, float]]:
    """Seconds of the gradients of the input and the weights behind each entry."""
    site, local = pricer.site(own), pricer.local(0, own)
    entries = [op for op in local if op.operator.name in ("qkv", "mlp_up")]
    found = [operator_seconds(site, op, own) for op in entries]
    return [(s.input_gradient_s, s.weight_gradient_s) for s in found]


@pytest.mark.parametrize("link_bytes_per_s", LINKS)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_products_hide_the_gather_and_the_sum_of_a_backward(
    kind: str, link_bytes_per_s: float
) -> None:
    where = cluster(2, kind=kind, link_bytes_per_s=link_bytes_per_s)
    pricer = Pricer(MODEL, where, work(sequence_length=1024))
    own = setting(tensor=2, sequence_parallel=True, compile=False)
    gather_s = pricer.site(own).tensor.gather_s(1024 * 1024 * 2)
    exposed = 0.0
    for hiding in _products(pricer, own):
        behind = hiding if kind == "cuda" else (0.0, 0.0)
        exposed += gather_s + sum(max(0.0, gather_s - product_s) for product_s in behind)
    piece = pricer.piece(0, own)
    assert piece.backward.tensor_s == pytest.approx(exposed)
    assert piece.forward.tensor_s == pytest.approx(4 * gather_s)


@pytest.mark.parametrize("link_bytes_per_s", LINKS)
def test_without_sequence_parallelism_weight_gradients_hide_the_sum(
    link_bytes_per_s: float,
) -> None:
    where = cluster(2, link_bytes_per_s=link_bytes_per_s)
    pricer = Pricer(MODEL, where, work(sequence_length=1024))
    own = setting(tensor=2, compile=False)
    sum_s = pricer.site(own).tensor.all_reduce_s(1024 * 1024 * 2)
    exposed = sum(max(0.0, sum_s - product_s) for _, product_s in _products(pricer, own))
    assert pricer.piece(0, own).backward.tensor_s == pytest.approx(exposed)


def test_compiled_layers_expose_all_of_it_and_gather_nothing_again() -> None:
    pricer = Pricer(MODEL, cluster(2), work(sequence_length=1024))
    own = setting(tensor=2, sequence_parallel=True)
    gather_s = pricer.site(own).tensor.gather_s(1024 * 1024 * 2)
    assert pricer.piece(0, own).backward.tensor_s == pytest.approx(4 * gather_s)


def test_deferred_products_hide_no_sum() -> None:
    """I of a split backward has lost W, and what travels behind W with it."""
    pricer = Pricer(MODEL, cluster(2), work(sequence_length=1024))
    own = setting(tensor=2, sequence_parallel=True, compile=False)
    piece = pricer.piece(0, own)
    gather_s = pricer.site(own).tensor.gather_s(1024 * 1024 * 2)
    hidden_s = sum(min(gather_s, weight_s) for _, weight_s in _products(pricer, own))
    assert hidden_s > 0
    assert piece.split_input_s + piece.weight_s >= piece.backward.total_s + 0.5 * hidden_s
