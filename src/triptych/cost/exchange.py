"""What a layer's ranks exchange in one pass: seconds exposed, and bytes.

Tensor parallelism all-reduces the hidden states once per region and pass. Sequence parallelism
makes of each a reduce-scatter and an all-gather: two halves with the same bytes together.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cost.kernels.collectives import gather_bytes
from triptych.cost.operators import Seconds
from triptych.cost.setting import Setting
from triptych.cost.shard import ENTRY_PRODUCTS, LocalOperator, has_joint_region
from triptych.cost.site import Site
from triptych.cost.software import Software
from triptych.model.model import Block, Experts

HALVES = 2
"""Of one exchange: an all-reduce is a reduce-scatter and an all-gather."""


def regions(block: Block) -> int:
    """Tensor-parallel regions of a layer: attention and MLP, or both in one (a single norm)."""
    return 1 if has_joint_region(block) else 2


def halves_s(site: Site, setting: Setting, halves: int) -> float:
    """Seconds of so many halves of exchanges of the hidden states over the tensor ranks."""
    size_bytes = site.activation_bytes(setting)
    exposed = 1.0 - site.software.hides_tensor
    if setting.sequence_parallel:
        both_s = site.tensor.gather_s(size_bytes) + site.tensor.scatter_s(size_bytes)
        return exposed * halves / HALVES * both_s
    return exposed * halves / HALVES * site.tensor.all_reduce_s(size_bytes)


def halves_bytes(site: Site, setting: Setting, halves: int) -> float:
    """Bytes that a rank sends in so many halves."""
    return halves * gather_bytes(setting.tensor, site.activation_bytes(setting))


def gathers_again(software: Software, setting: Setting) -> bool:
    """True if products that alone read a region's input keep this rank's part of it only."""
    return software.gathers_entries and setting.sequence_parallel and _is_written(software, setting)


def _is_written(software: Software, setting: Setting) -> bool:
    """True unless layers are compiled, which exchange as torch has it."""
    return software.is_fused or not setting.compile


def entries(
    site: Site, block: Block, local: Sequence[LocalOperator], setting: Setting
) -> list[int]:
    """Places of the products that alone read what enters a region, if their backward gathers that
    again or hides its exchanges (`runtime/tensor/entered.py`).
    """
    software = site.software
    if not (software.gathers_entries or software.hides_entries) or setting.tensor == 1:
        return []
    if has_joint_region(block) or not _is_written(software, setting):
        return []
    return [i for i, op in enumerate(local) if op.operator.name in ENTRY_PRODUCTS]


def entries_s(
    site: Site, places: Sequence[int], seconds: Sequence[Seconds], setting: Setting
) -> float:
    """Seconds of the gathers of a backward that its products of input gradients do not hide."""
    if not gathers_again(site.software, setting):
        return 0.0
    gather_s = site.tensor.gather_s(site.activation_bytes(setting))
    return sum(max(0.0, gather_s - _hiding_s(site, seconds[i].input_gradient_s)) for i in places)


def hidden_sums_s(
    site: Site, places: Sequence[int], seconds: Sequence[Seconds], setting: Setting
) -> float:
    """Seconds of the sums of a backward that its products of weight gradients hide."""
    halves = 1 if setting.sequence_parallel else HALVES
    sum_s = halves_s(site, setting, halves)
    return sum(min(sum_s, _hiding_s(site, seconds[i].weight_gradient_s)) for i in places)


def _hiding_s(site: Site, product_s: float) -> float:
    """What can travel behind a product; on a CPU nothing can."""
    return product_s if site.software.hides_entries and not site.rates.is_cpu else 0.0


def norm_sum_bytes(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Size of the sums that norms over all heads exchange in a pass: a fp32 each a token."""
    norms = 2 * any(op.operator.name == "qk_norm_joint" for op in local)
    return norms * 4.0 * site.tokens(setting)


def norm_sum_s(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Seconds of those sums in a pass."""
    size_bytes = norm_sum_bytes(site, local, setting)
    return site.tensor.all_reduce_s(size_bytes) if size_bytes else 0.0


def dispatch_bytes(site: Site, block: Block, setting: Setting) -> float:
    """Bytes of the tokens that a rank hands to the experts of other ranks, and gets back."""
    if not isinstance(block.mlp, Experts):
        return 0.0
    return site.activation_bytes(setting) * block.mlp.top_k


def count_bytes(block: Block) -> float:
    """Bytes of the numbers of rows for each expert, which a forward exchanges first."""
    return 8.0 * block.mlp.count if isinstance(block.mlp, Experts) else 0.0


def dispatch_s(site: Site, block: Block, setting: Setting) -> float:
    """Dispatch and combine: two all-to-alls a pass."""
    size_bytes = dispatch_bytes(site, block, setting)
    exposed = 1.0 - site.software.hides_experts
    return 2 * exposed * site.expert.all_to_all_s(size_bytes) if size_bytes else 0.0
