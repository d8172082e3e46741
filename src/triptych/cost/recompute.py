"""What the backward of a layer runs again, and what the layer keeps instead.

Full recomputation keeps a layer's input and runs its forward again, up to the last tensor that the
backward needs: the MLP's last product and its reduction are not repeated (PyTorch's
non-reentrant checkpoint stops there). Selective recomputation runs attention again, from its
queries, keys and values (Korthikanti et al. 2022, sec. 5): scores are not kept, nor is the
log-sum-exp of a fused kernel; attention's output is, by the product that reads it.
"""

from __future__ import annotations

from triptych.cost.exchange import HALVES, gathers_again, regions
from triptych.cost.kernels.rates import Rates
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site
from triptych.model.model import Block, Mlp, Model
from triptych.model.operator import Operator
from triptych.plan.plain import is_plain


def repeated(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> list[int]:
    """Indices of the operators that the backward runs again."""
    model = site.model
    if setting.recompute == "full":
        return list(range(len(local) - _unneeded(model, block, local)))
    if setting.recompute == "selective" and site.software.selects_operators:
        return _every_other(local)
    if setting.recompute == "selective":
        return [i for i, op in enumerate(local) if op.operator.kind == "attention"]
    return []


def _every_other(local: tuple[LocalOperator, ...]) -> list[int]:
    """All operators but attention and every other product (torchtitan's policy by operator)."""
    products = [i for i, op in enumerate(local) if op.operator.kind == "gemm"]
    kept = {i for i, op in enumerate(local) if op.operator.kind == "attention"}
    return [i for i in range(len(local)) if i not in kept | set(products[::2])]


def repeated_halves(site: Site, block: Block, setting: Setting) -> int:
    """Halves of tensor-parallel exchanges that the backward runs again."""
    model = site.model
    if setting.recompute == "selective" and site.software.selects_operators:
        return regions(block) if setting.sequence_parallel else 0
    if setting.recompute != "full":
        return 0
    all_of_them = HALVES * regions(block)
    if not _ends_in_sum(model, block):
        return all_of_them
    return all_of_them - (1 if setting.sequence_parallel else HALVES)


def _ends_in_sum(model: Model, block: Block) -> bool:
    """True if nothing behind the sum over tensor ranks is kept for the backward."""
    return not model.dropout and not block.ends_in_norm


def regathers(setting: Setting) -> bool:
    """True if the backward gathers the input of a layer from the tensor ranks."""
    return setting.recompute == "full" and setting.shard_activations


def _unneeded(model: Model, block: Block, local: tuple[LocalOperator, ...]) -> int:
    """Operators at the end of a layer whose results the backward does not need."""
    if not _ends_in_sum(model, block) or not isinstance(block.mlp, Mlp):
        return 0  # the weighted sum over a token's experts keeps what they made
    names = [op.operator.name for op in local]
    return len(names) - names.index("mlp_down") if "mlp_down" in names else 0


# --- memory ------------------------------------------------------------------------------------


def saved_elements(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> float:
    """Elements per token that a layer keeps if nothing is recomputed."""
    split = setting.sequence_split
    entering_split = split if gathers_again(site.software, setting) else 1
    saved = sum(
        op.saved + op.sequence_saved / split + op.entering_saved / entering_split for op in local
    )
    saved += _score_elements(site, local, setting) + _dealt_elements(site, local, setting)
    if not site.software.keeps_activation:
        saved -= sum(op.saved for op in local if op.operator.name.endswith("_activation"))
    is_written = site.software.writes_plain_layers and is_plain(site.model, block)
    if setting.compile or (is_written and setting.tensor == 1):
        return saved
    return saved + _unfused_elements(local, setting, site.rates)


def kept_elements(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> float:
    """Elements per token that a layer keeps until its backward."""
    if setting.recompute == "full":
        if setting.offloads_activations:
            return 0.0
        parts = setting.tensor if setting.shard_activations else setting.sequence_split
        return site.model.hidden / parts
    saved = saved_elements(site, block, local, setting)
    if setting.recompute == "selective" and site.software.selects_operators:
        return _half_elements(site, local, setting)
    if setting.recompute == "selective":
        saved -= _core_elements(site, local, setting)
    return saved


def _half_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """What recomputation by operator keeps: the input, attention's output, half of the products."""
    kept = site.model.hidden / setting.sequence_split
    for op in local:
        if op.operator.kind == "attention":
            kept += op.query_heads * op.operator.value_dim
        elif op.operator.kind == "gemm":
            is_summed = op.operator.split == "row"
            kept += op.n / 2.0 / (setting.sequence_split if is_summed else 1)
    return kept


def _dealt_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Elements per token of attention's outputs as Ulysses makes them, kept beside those that the
    next product reads, whose heads are together again. Only kernels that keep no scores need them.
    """
    if setting.context == 1 or setting.context_method != "ulysses":
        return 0.0
    return float(
        sum(
            op.query_heads * op.operator.value_dim
            for op in local
            if op.operator.kind == "attention" and not _score_matrices(site, op.operator, setting)
        )
    )


LOG_SUM = 2.0
"""Elements of a fp32 log-sum-exp, which attention keeps of each head."""


def _core_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """What attention keeps beside its inputs and its output, which the next product keeps."""
    log_sums = LOG_SUM * sum(op.query_heads for op in local if op.operator.kind == "attention")
    return log_sums + _score_elements(site, local, setting)


def _score_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Elements per token of score matrices that exist, instead of a log-sum-exp.

    Keys and values are repeated then for the query heads that share them; a ring's ranks hold those
    of whole sequences.
    """
    elements = 0.0
    for op in local:
        if op.operator.kind == "attention":
            matrices = _score_matrices(site, op.operator, setting)
            elements += op.query_heads * site.sequence_length * matrices
            if op.operator.dropout:
                width = op.operator.head_dim + op.operator.value_dim
                ranks = setting.context if setting.context_method == "ring" else 1
                repeated = ranks * op.query_heads - op.kv_heads
                elements += repeated * width - op.query_heads * LOG_SUM
    return elements


def _score_matrices(site: Site, operator: Operator, setting: Setting) -> float:
    """Matrices of the size of the scores that attention keeps (`runtime/attention.py`).

    With dropout: the softmax in fp32; the weights that multiply the values; the mask, a byte an
    element; the tanh of soft-capped scores. Without it, tiles keep none.
    """
    wide = max(1.0, 4.0 / site.rates.element_bytes)
    if not operator.dropout:
        both = 1.0 + wide * (site.software.keeps_softmax and wide > 1.0)
        return both if setting.attention == "eager" else 0.0
    return wide + 1.0 + 1.0 / site.rates.element_bytes + operator.softcapped


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
