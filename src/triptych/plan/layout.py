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

from triptych.errors import ModelError
from triptych.model.model import Attention, Block, Experts, Model
from triptych.plan.families import Family, Rule, Split, family_of
from triptych.plan.plan import Plan, part

Box = tuple[tuple[int, int], ...]


_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_REPLICATED, _BY_VOCABULARY = Rule((Split.NONE,)), Rule((Split.VOCAB,))


def layer_of(name: str) -> int | None:
    """The transformer layer that a tensor name belongs to, or None for the ends of the model."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def expert_of(name: str) -> int | None:
    """The routed expert that a tensor name belongs to, or None."""
    match = _EXPERT.search(name)
    return int(match.group(1)) if match else None


def expert_range(count: int, ep: int, ep_rank: int) -> tuple[int, int]:
    """The experts that an expert rank holds of `count`: consecutive ones, as many on each."""
    return part(count, ep, ep_rank)


def model_order(family: Family, name: str) -> tuple[int, int, str]:
    """A key that sorts names as a forward uses them.

    Embedding, positions, layers by number, final norm, head.
    """
    if name == family.embedding_name:
        return 0, 0, name
    if family.positions is not None and name == family.name_of(family.positions):
        return 1, 0, name
    layer = layer_of(name)
    if layer is not None:
        return 2, layer, name
    return (4 if name == family.head_name else 3), 0, name


def rule_for(name: str, model_type: str) -> Rule:
    """How a tensor of a family is split. Raises ModelError for an unknown name: never guess."""
    family = family_of(model_type)
    if name in (family.embedding_name, family.head_name):
        return _BY_VOCABULARY
    ends = [family.norm] if family.positions is None else [family.norm, family.positions]
    if name.rpartition(".")[0] in [f"{family.trunk}.{end}" for end in ends]:
        return _REPLICATED
    match = _LAYER.search(name)
    rule = family.rules.get(_EXPERT.sub(".experts.*.", match.group(2))) if match else None
    if rule is None:
        raise ModelError(f"no tensor-parallel rule for parameter '{name}'")
    return rule


def num_parts(name: str, model_type: str, tp: int) -> int:
    """The boxes that a tensor rank holds of a tensor: several of a packed one, if it is split."""
    return len(rule_for(name, model_type).splits) if tp > 1 else 1


def stages_of(name: str, plan: Plan, model: Model) -> tuple[int, ...]:
    """The stages that hold a tensor: two (first and last) for a tied embedding with PP."""
    layer = layer_of(name)
    last = len(plan.stages) - 1
    if layer is not None:
        return tuple(i for i, s in enumerate(plan.stages) if s.start <= layer < s.stop)
    family = family_of(model.family)
    if name == family.embedding_name:
        return (0, last) if model.tied and last > 0 else (0,)
    if family.positions is not None and name == family.name_of(family.positions):
        return (0,)
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


def held_range(split: Split, model: Model, block: Block, tp: int, tp_rank: int) -> tuple[int, int]:
    """The units (heads, columns of the MLP, rows of the vocabulary) that a tensor rank holds."""
    match split:
        case Split.QUERY:
            return query_head_range(block.attention, tp, tp_rank)
        case Split.KV:
            return kv_head_range(block.attention, tp, tp_rank)
        case _:
            return part(_units(split, model, block), tp, tp_rank)


def _units(split: Split, model: Model, block: Block) -> int:
    """How many units a split divides."""
    match split:
        case Split.NONE:
            return 1
        case Split.QUERY:
            return block.attention.query_heads
        case Split.KV:
            return block.attention.kv_heads
        case Split.VOCAB:
            return model.vocab
        case Split.WIDTH:
            return block.mlp.width
        case Split.SHARED:
            assert isinstance(block.mlp, Experts)
            return block.mlp.shared_width


def local_box(
    name: str, shape: Sequence[int], model: Model, tp: int, tp_rank: int, index: int = 0
) -> Box:
    """The box of a logical tensor of `shape` that tensor rank `tp_rank` holds.

    Of a packed tensor that is split (`num_parts`) it is the box in part `index`.
    """
    rule = rule_for(name, model.family)
    whole = tuple((0, size) for size in shape)
    if tp == 1 or rule.splits[index] is Split.NONE:
        return whole
    block = model.blocks[layer_of(name) or 0]
    units = [_units(split, model, block) for split in rule.splits]
    size, rest = divmod(shape[rule.dim], sum(units))
    assert rest == 0, f"{name} of shape {tuple(shape)} has no whole number of {rule.splits}"
    start, stop = held_range(rule.splits[index], model, block, tp, tp_rank)
    first = sum(units[:index])
    held = ((first + start) * size, (first + stop) * size)
    return (*whole[: rule.dim], held, *whole[rule.dim + 1 :])


def holders(
    name: str, shape: Sequence[int], model: Model, tp: int, tp_rank: int, index: int = 0
) -> list[int]:
    """The tensor ranks that hold the same box as `tp_rank`, ascending; the first one owns it."""
    boxes = [local_box(name, shape, model, tp, rank, index) for rank in range(tp)]
    return [rank for rank, box in enumerate(boxes) if box == boxes[tp_rank]]


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
