"""This rank's parameters as slots: logical name, box, and who else has a part in its gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.families import Split, family_of
from triptych.plan.layout import holders, local_box, rule_for, stages_of
from triptych.plan.plan import Plan
from triptych.plan.ranks import stages_of_rank
from triptych.runtime.build.stage import StageModule
from triptych.runtime.build.weights import initial_part
from triptych.runtime.data.slot import Slot, Sums
from triptych.runtime.data.tie import Tie
from triptych.runtime.mesh import Mesh
from triptych.runtime.tensor.packed import unpacked_name


def collect_slots(
    stages: Iterable[StageModule],
    model: Model,
    plan: Plan,
    mesh: Mesh,
    frozen: Collection[str] = (),
) -> list[Slot]:
    """One slot per parameter of the stages, in the order in which the backward finishes them.

    A tied embedding is one slot, wherever in these stages it is used. `frozen` names do not train.
    """
    family = family_of(model.family)
    places: dict[_Key, list[tuple[nn.Module, str]]] = {}
    shapes: dict[_Key, tuple[int, ...]] = {}
    for stage in stages:
        for prefix, module in stage.causal_lm.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                name, index = unpacked_name(f"{prefix}.{attribute}")
                name = family.logical_name(name)
                if name == family.head_name and model.tied:
                    name = family.embedding_name
                places.setdefault((name, index), []).append((module, attribute))
                shapes.setdefault((name, index), tuple(parameter.shape))
    slots = [_slot(key, shapes[key], places[key], model, plan, mesh) for key in shapes]
    for slot in slots:
        slot.trains = slot.name not in frozen
    return slots[::-1]


def logical_names(causal_lm: nn.Module, model: Model) -> set[str]:
    """The names of a whole model's parameters as the hub's disks have them."""
    family = family_of(model.family)
    names = {family.logical_name(name) for name, _ in causal_lm.named_parameters()}
    return names - {family.head_name} if model.tied else names


_Key = tuple[str, int]
"""A logical tensor, and which part of it if it is packed."""


def _slot(
    key: _Key,
    shape: tuple[int, ...],
    places: list[tuple[nn.Module, str]],
    model: Model,
    plan: Plan,
    mesh: Mesh,
) -> Slot:
    name, index = key
    at = mesh.coordinates
    tensor = mesh.tensor.size
    owner = holders(name, shape, model, tensor, at.tp, index)[0]
    users = stages_of(name, plan, model)
    mine = [stage for stage in users if stage in stages_of_rank(plan, at.pp)]
    return Slot(
        name=name,
        shape=shape,
        box=local_box(name, shape, model, tensor, at.tp, index),
        counted=owner == at.tp and users[0] in mine,
        before=_sum_before(key, shape, model, plan, mesh),
        stage=mine[0] if len(mine) == 1 else None,
        places=places,
    )


def _sum_before(
    key: _Key, shape: tuple[int, ...], model: Model, plan: Plan, mesh: Mesh
) -> Sums | None:
    """What a gradient that is still partial when the backward ends is summed over."""
    name, index = key
    rule = rule_for(name, model.family)
    split = rule.splits[index]
    if len(stages_of(name, plan, model)) > 1 and mesh.tie.size > 1:
        return mesh.tie if mesh.tie.size == 2 else Tie(name, shape, model, mesh)
    if split is Split.KV and mesh.copies.size > 1:
        return mesh.copies
    partial = rule.partial or plan.sequence_parallel
    if split is Split.NONE and partial and mesh.tensor.size > 1:
        return mesh.tensor
    return None


def fill_initial(slots: Sequence[Slot], model: Model, *, seed: int, std: float) -> None:
    """Draws first weights: the same logical tensors under every plan."""
    start = family_of(model.family).norm_start
    with torch.no_grad():
        for slot in slots:
            values = initial_part(
                slot.name, slot.shape, slot.box, seed=seed, std=std, norm_start=start
            )
            slot.value.copy_(values)
