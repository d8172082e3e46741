"""Which rectangular part (box) of each logical tensor a rank holds.

A logical tensor has the name and shape it has on the hub's disks. Tensor parallelism cuts one
dimension; a ZeRO shard cuts the flattened rest, and a flat range of a box is again a few boxes.
So everything that is stored, loaded or moved is a box, and resharding is intersecting boxes.

Shards may be uneven: 9 query and 3 KV heads on 2 ranks are 6+3 and 2+1 heads. With more ranks
than KV heads each rank keeps one KV head and several ranks keep the same one (domain.md sec. 3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from triptych.errors import ModelError
from triptych.model.model import Attention, Mlp, Model
from triptych.plan.plan import Plan, part

Box = tuple[tuple[int, int], ...]


class Split(StrEnum):
    """What tensor parallelism divides a tensor by."""

    NONE = "none"
    QUERY = "query heads"
    KV = "kv heads"
    WIDTH = "mlp width"
    VOCAB = "vocabulary"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of parameter is split: by `split` along dimension `dim`.

    `partial` marks a replicated parameter inside a tensor-parallel region: each rank's gradient
    covers only its own heads, with or without sequence parallelism.
    """

    split: Split
    dim: int = 0
    partial: bool = False


_COLUMN_QUERY, _COLUMN_KV = Rule(Split.QUERY), Rule(Split.KV)
_REPLICATED = Rule(Split.NONE)

_RULES: dict[str, Rule] = {
    "embed_tokens.weight": Rule(Split.VOCAB),
    "lm_head.weight": Rule(Split.VOCAB),
    "norm.weight": _REPLICATED,
    "input_layernorm.weight": _REPLICATED,
    "post_attention_layernorm.weight": _REPLICATED,
    "self_attn.q_proj.weight": _COLUMN_QUERY,
    "self_attn.q_proj.bias": _COLUMN_QUERY,
    "self_attn.k_proj.weight": _COLUMN_KV,
    "self_attn.k_proj.bias": _COLUMN_KV,
    "self_attn.v_proj.weight": _COLUMN_KV,
    "self_attn.v_proj.bias": _COLUMN_KV,
    "self_attn.o_proj.weight": Rule(Split.QUERY, dim=1),
    "self_attn.o_proj.bias": _REPLICATED,
    "self_attn.q_norm.weight": Rule(Split.NONE, partial=True),
    "self_attn.k_norm.weight": Rule(Split.NONE, partial=True),
    "mlp.gate_proj.weight": Rule(Split.WIDTH),
    "mlp.gate_proj.bias": Rule(Split.WIDTH),
    "mlp.up_proj.weight": Rule(Split.WIDTH),
    "mlp.up_proj.bias": Rule(Split.WIDTH),
    "mlp.down_proj.weight": Rule(Split.WIDTH, dim=1),
    "mlp.down_proj.bias": _REPLICATED,
}

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def layer_of(name: str) -> int | None:
    """The transformer layer that a tensor name belongs to, or None for the ends of the model."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def rule_for(name: str) -> Rule:
    """How a tensor is split. Raises ModelError for a name outside the table: never guess."""
    match = _LAYER.search(name)
    key = match.group(2) if match else name.removeprefix("model.")
    rule = _RULES.get(key)
    if rule is None:
        raise ModelError(f"no tensor-parallel rule for parameter '{name}'")
    return rule


def stages_of(name: str, plan: Plan, model: Model) -> tuple[int, ...]:
    """The stages that hold a tensor: two (first and last) for a tied embedding with PP."""
    layer = layer_of(name)
    last = len(plan.stages) - 1
    if layer is not None:
        return tuple(i for i, s in enumerate(plan.stages) if s.start <= layer < s.stop)
    if name.endswith("embed_tokens.weight"):
        return (0, last) if model.tied and last > 0 else (0,)
    return (last,)


def kv_head_range(attention: Attention, tp: int, tp_rank: int) -> tuple[int, int]:
    """KV heads of a tensor rank; one, shared with its neighbours, when tp > KV heads."""
    if tp <= attention.kv_heads:
        return part(attention.kv_heads, tp, tp_rank)
    head = tp_rank // (tp // attention.kv_heads)
    return head, head + 1


def query_head_range(attention: Attention, tp: int, tp_rank: int) -> tuple[int, int]:
    """Query heads of a tensor rank: those that attend with its KV heads."""
    start, stop = kv_head_range(attention, tp, tp_rank)
    group = attention.query_heads // attention.kv_heads
    if tp <= attention.kv_heads:
        return start * group, stop * group
    copies = tp // attention.kv_heads
    first = start * group + (tp_rank % copies) * (group // copies)
    return first, first + group // copies


def split_range(
    name: str, rule: Rule, model: Model, tp: int, tp_rank: int
) -> tuple[int, int] | None:
    """The elements of dimension `rule.dim` that a tensor rank holds; None: all of them."""
    block = model.blocks[layer_of(name) or 0]
    dim = block.attention.head_dim
    match rule.split:
        case Split.NONE:
            return None
        case Split.VOCAB:
            return part(model.vocab, tp, tp_rank)
        case Split.WIDTH:
            assert isinstance(block.mlp, Mlp)
            return part(block.mlp.width, tp, tp_rank)
        case Split.QUERY:
            start, stop = query_head_range(block.attention, tp, tp_rank)
        case Split.KV:
            start, stop = kv_head_range(block.attention, tp, tp_rank)
    return start * dim, stop * dim


def local_box(name: str, shape: Sequence[int], model: Model, tp: int, tp_rank: int) -> Box:
    """The box of a logical tensor of `shape` that tensor rank `tp_rank` holds."""
    rule = rule_for(name)
    held = split_range(name, rule, model, tp, tp_rank)
    return tuple(
        held if held is not None and dim == rule.dim else (0, size)
        for dim, size in enumerate(shape)
    )


def holders(name: str, shape: Sequence[int], model: Model, tp: int, tp_rank: int) -> list[int]:
    """The tensor ranks that hold the same box as `tp_rank`, ascending; the first one owns it."""
    mine = local_box(name, shape, model, tp, tp_rank)
    return [rank for rank in range(tp) if local_box(name, shape, model, tp, rank) == mine]


def box_shape(box: Box) -> tuple[int, ...]:
    """The size of a box along each dimension."""
    return tuple(stop - start for start, stop in box)


def box_elements(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(box_shape(box))


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements `start` to `stop` of a flattened tensor, in memory order.

    Each box is contiguous in the flattened tensor. At most 2 x dims - 1 of them:

        shape (4, 5), range 3..17:   . . . x x      row 0, columns 3..5
                                     x x x x x      rows 1..3
                                     x x x x x
                                     x x . . .      row 3, columns 0..2
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return _in_row(first, flat_range_to_boxes(shape[1:], head, tail))
    boxes: list[Box] = []
    if head:
        boxes += _in_row(first, flat_range_to_boxes(shape[1:], head, inner))
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + _in_row(last, flat_range_to_boxes(shape[1:], 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, row + 1), *box) for box in boxes]


def shift(box: Box, origin: Box) -> Box:
    """A box given inside `origin`, in the coordinates of the logical tensor."""
    return tuple(
        (start + base, stop + base) for (start, stop), (base, _) in zip(box, origin, strict=True)
    )
