"""What the context ranks of a layer exchange in attention: bytes, and seconds exposed.

A ring sends those keys and values of a rank's tokens that some rank sees, step by step; twice as
much in the backward, where gradients go home (domain.md section 3). Where weights are dropped it
gathers keys and values whole, and their gradients are reduce-scattered. Ulysses exchanges queries,
keys, values and outputs, whose heads are dealt to the ranks: as much in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.cost.kernels.collectives import gather_bytes
from triptych.cost.operators import Seconds
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site
from triptych.plan.context import ring_reaches


def context_bytes(
    site: Site, local: tuple[LocalOperator, ...], setting: Setting, *, is_forward: bool
) -> float:
    """Bytes that a rank sends in a forward, or in a backward without what it runs again."""
    if setting.context == 1:
        return 0.0
    if setting.context_method == "ulysses":
        return gather_bytes(setting.context, sum(_dealt_bytes(site, local, setting)))
    rounds = 1 if is_forward else 2
    sent = rounds * sum(_ring_bytes(site, local, setting))
    return sent + gather_bytes(setting.context, _gathered_bytes(site, local, setting))


def context_s(
    site: Site,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
    *,
    is_forward: bool,
) -> float:
    """Exposed seconds of a pass: all of Ulysses; of a ring what attention does not hide."""
    if setting.context == 1:
        return 0.0
    if setting.context_method == "ulysses":
        return sum(map(site.context.all_to_all_s, _dealt_bytes(site, local, setting)))
    rounds = 1 if is_forward else 2
    sent_s = rounds * sum(map(site.context.send_s, _ring_bytes(site, local, setting)))
    gathered = _gathered_bytes(site, local, setting)
    gathered_s = site.context.gather_s(gathered) if gathered else 0.0
    attention_s = sum(
        piece.forward_s if is_forward else piece.backward_s
        for op, piece in zip(local, seconds, strict=True)
        if op.operator.kind == "attention"
    )
    hidden_s = 0.0 if site.rates.is_cpu else attention_s * (1 - 1 / setting.context)
    return max(0.0, sent_s - hidden_s) + gathered_s


def _ring_bytes(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> Iterator[float]:
    """Of each attention and step of its ring: bytes of the keys and values that travel."""
    for op in local:
        if op.operator.kind == "attention" and not op.operator.dropout:
            width = op.kv_heads * (op.operator.head_dim + op.operator.value_dim)
            token_bytes = setting.microbatch * width * site.rates.element_bytes
            sight = (op.operator.window, op.operator.chunk)
            for reach in ring_reaches(site.sequence_length, setting.context, *sight):
                yield (reach.stop - reach.start) * token_bytes


def _gathered_bytes(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Keys and values of whole sequences, where weights are dropped."""
    widths = (
        op.kv_heads * (op.operator.head_dim + op.operator.value_dim)
        for op in local
        if op.operator.kind == "attention" and op.operator.dropout
    )
    tokens = site.sequence_length * setting.microbatch
    return sum(widths) * tokens * site.rates.element_bytes


def _dealt_bytes(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> Iterator[float]:
    """Of each attention: bytes of its queries, keys and values, and of its outputs.

    Fewer KV heads than ranks are repeated.
    """
    element_bytes = site.tokens(setting) * site.rates.element_bytes
    for op in local:
        if op.operator.kind == "attention":
            key, value = op.operator.head_dim, op.operator.value_dim
            kv_heads = max(op.kv_heads, setting.context)
            yield (op.query_heads * key + kv_heads * (key + value)) * element_bytes
            yield op.query_heads * value * element_bytes
