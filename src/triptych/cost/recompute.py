"""What the backward of a layer runs again, and what the layer keeps instead.

Full recomputation keeps a layer's input and runs its forward again, up to the last tensor that the
backward needs: the MLP's last product and its reduction are not repeated (PyTorch's
non-reentrant checkpoint stops there). Selective recomputation runs attention again
(Korthikanti et al. 2022, sec. 5).
"""

from __future__ import annotations

from triptych.cost.exchange import HALVES, regions
from triptych.cost.rates import Rates
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site
from triptych.model.model import Block, Mlp, Model


def repeated(
    model: Model, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> list[int]:
    """Indices of the operators that the backward runs again."""
    if setting.recompute == "full":
        return list(range(len(local) - _unneeded(model, block, local)))
    if setting.recompute == "selective":
        return [i for i, op in enumerate(local) if op.operator.kind == "attention"]
    return []


def repeated_halves(model: Model, block: Block, setting: Setting) -> int:
    """Halves of tensor-parallel exchanges that the backward runs again."""
    if setting.recompute != "full":
        return 0
    all_of_them = HALVES * regions(block)
    if not _ends_in_sum(model, block):
        return all_of_them
    return all_of_them - (1 if setting.sequence_parallel else HALVES)


def _ends_in_sum(model: Model, block: Block) -> bool:
    """True if nothing behind the sum over tensor ranks is kept for the backward."""
    return not model.dropout and not block.ends_in_norm


def _unneeded(model: Model, block: Block, local: tuple[LocalOperator, ...]) -> int:
    """Operators at the end of a layer whose results the backward does not need."""
    if not _ends_in_sum(model, block) or not isinstance(block.mlp, Mlp):
        return 0  # the weighted sum over a token's experts keeps what they made
    names = [op.operator.name for op in local]
    return len(names) - names.index("mlp_down")


# --- memory ------------------------------------------------------------------------------------


def saved_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Elements per token that a layer keeps if nothing is recomputed."""
    split = setting.sequence_split
    saved = sum(op.saved + op.sequence_saved / split for op in local)
    if setting.attention == "eager":
        saved += _score_elements(site, local)
    return saved + (0.0 if setting.compile else _unfused_elements(local, setting, site.rates))


def kept_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Elements per token that a layer keeps until its backward."""
    if setting.recompute == "full":
        return site.model.hidden / setting.sequence_split
    saved = saved_elements(site, local, setting)
    if setting.recompute == "selective":
        saved -= sum(
            op.query_heads * (op.operator.value_dim + 2)  # output and log-sum-exp
            for op in local
            if op.operator.kind == "attention"
        )
        saved -= _score_elements(site, local) if setting.attention == "eager" else 0.0
    return saved


def _score_elements(site: Site, local: tuple[LocalOperator, ...]) -> float:
    """Elements per token of materialised score matrices."""
    heads = sum(op.query_heads for op in local if op.operator.kind == "attention")
    return float(heads * site.sequence_length)


def _unfused_elements(local: tuple[LocalOperator, ...], setting: Setting, rates: Rates) -> float:
    """What eager kernels keep on top.

    A norm keeps its normalised input, and a fp32 copy instead of a 16-bit input; SwiGLU keeps the
    activated gate.
    """
    extra = 0.0
    norm_extra = 1.0 + max(0.0, 4.0 / rates.element_bytes - 1.0)
    for op in local:
        name = op.operator.name
        if name.endswith("_norm") and op.operator.split == "sequence":
            extra += norm_extra * op.sequence_elements / 2.0 / setting.sequence_split
        elif name.endswith("_activation") and op.elements > 2.0 * op.saved:
            extra += op.saved
    return extra
