"""This rank's parameters as slots: logical name, box, and who else has a part in its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.layout import Split, holders, local_box, rule_for, stages_of
from triptych.plan.plan import Plan
from triptych.plan.ranks import stages_of_rank
from triptych.runtime.build.stage import StageModule
from triptych.runtime.build.weights import initial_part
from triptych.runtime.comm import Communicator
from triptych.runtime.data.buckets import Slot
from triptych.runtime.mesh import Mesh


def collect_slots(
    stages: Iterable[StageModule], model: Model, plan: Plan, mesh: Mesh
) -> list[Slot]:
    """One slot per parameter of the stages, in the order in which the backward finishes them.

    A tied embedding is one slot, wherever in these stages it is used.
    """
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for prefix, module in stage.causal_lm.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{attribute}"
                if name == "lm_head.weight" and model.tied:
                    name = "model.embed_tokens.weight"
                places.setdefault(name, []).append((module, attribute))
                shapes.setdefault(name, tuple(parameter.shape))
    slots = [_slot(name, shapes[name], places[name], model, plan, mesh) for name in shapes]
    return slots[::-1]


def _slot(
    name: str,
    shape: tuple[int, ...],
    places: list[tuple[nn.Module, str]],
    model: Model,
    plan: Plan,
    mesh: Mesh,
) -> Slot:
    at = mesh.coordinates
    owner = holders(name, shape, model, plan.tp, at.tp)[0]
    users = stages_of(name, plan, model)
    mine = [stage for stage in users if stage in stages_of_rank(plan, at.pp)]
    return Slot(
        name=name,
        shape=shape,
        box=local_box(name, shape, model, plan.tp, at.tp),
        counted=owner == at.tp and users[0] in mine,
        before=_sum_before(name, model, plan, mesh),
        stage=mine[0] if len(mine) == 1 else None,
        places=places,
    )


def _sum_before(name: str, model: Model, plan: Plan, mesh: Mesh) -> Communicator | None:
    """The communicator over which a gradient is still partial when the backward ends."""
    rule = rule_for(name)
    if len(stages_of(name, plan, model)) > 1 and mesh.tie.size > 1:
        return mesh.tie
    if rule.split is Split.KV and mesh.copies.size > 1:
        return mesh.copies
    partial = rule.partial or plan.sequence_parallel
    if rule.split is Split.NONE and partial and mesh.tensor.size > 1:
        return mesh.tensor
    return None


def fill_initial(slots: Sequence[Slot], *, seed: int, std: float) -> None:
    """Draws first weights: the same logical tensors under every plan."""
    with torch.no_grad():
        for slot in slots:
            slot.value.copy_(initial_part(slot.name, slot.shape, slot.box, seed=seed, std=std))
