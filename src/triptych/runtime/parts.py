"""What an engine drives, made from a plan and a Hugging Face configuration.

The order matters: modules are cut and sharded, their parameters become slots of buckets, and only
then do values exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.freeze import frozen_names
from triptych.plan.layout import layer_of, stages_of
from triptych.plan.plan import Plan
from triptych.plan.ranks import stages_of_rank
from triptych.runtime.build.slots import collect_slots, fill_initial, logical_names
from triptych.runtime.build.stage import StageModule
from triptych.runtime.build.wide import widen
from triptych.runtime.build.zoo import require_fixed_rotary, skeleton
from triptych.runtime.compiled import compile_layers
from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.optimizer import OptimizerSettings, ShardedAdamW
from triptych.runtime.data.sharding import Shardings
from triptych.runtime.data.slot import Slot
from triptych.runtime.data.units import Residence, units_of
from triptych.runtime.decoder.build import write_layers
from triptych.runtime.dropout import Masks, place_dropout
from triptych.runtime.expert.balance import RouterSettings
from triptych.runtime.expert.experts import Experts
from triptych.runtime.expert.grouped import kernel_for
from triptych.runtime.mesh import Mesh
from triptych.runtime.precision import torch_dtype
from triptych.runtime.tensor.linear import Deferral


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The modules of one rank and what holds and updates their parameters.

    No gradient goes below stage `lowest_trained`; `frozen` are the logical names that do not train.
    """

    plan: Plan
    model: Model
    mesh: Mesh
    stages: Sequence[StageModule]
    deferral: Deferral
    buckets: GradientBuckets
    optimizer: ShardedAdamW
    masks: Masks
    lowest_trained: int
    frozen: Collection[str]


def make_parts(
    plan: Plan,
    config: Mapping[str, Any],
    mesh: Mesh,
    *,
    seed: int,
    optimizer: OptimizerSettings,
    freeze: Sequence[str],
    router: RouterSettings,
) -> Parts:
    """The parts of this rank, weights drawn from `seed`; raises what `Engine.build` says."""
    model = from_config(config, name=str(config.get("_name_or_path") or "model"))
    router.require_possible(plan, model)
    optimizer.require_possible(plan)
    deferral = Deferral()
    own = {i: _causal_lm(config, plan, mesh) for i in stages_of_rank(plan, mesh.coordinates.pp)}
    names = logical_names(next(iter(own.values())), model)
    frozen = frozen_names(freeze, names, model)
    stages = [
        StageModule(causal_lm, model, plan, mesh, index, deferral, router)
        for index, causal_lm in own.items()
    ]
    masks = _masks(plan, mesh, seed)
    for stage in stages:
        place_dropout(stage, model, mesh.tensor, masks)
    slots = collect_slots(stages, model, plan, mesh, frozen)
    buckets = _filled(slots, stages, plan, model, mesh, seed, optimizer)
    if plan.compile:
        compile_layers(stages, plan, model)
    write_layers(stages, plan, model, buckets, deferral)
    return Parts(
        plan=plan,
        model=model,
        mesh=mesh,
        stages=stages,
        deferral=deferral,
        buckets=buckets,
        optimizer=ShardedAdamW(buckets, plan, optimizer),
        masks=masks,
        lowest_trained=min(stages_of(name, plan, model)[0] for name in names - frozen),
        frozen=frozen,
    )


def _filled(
    slots: Sequence[Slot],
    stages: Sequence[StageModule],
    plan: Plan,
    model: Model,
    mesh: Mesh,
    seed: int,
    optimizer: OptimizerSettings,
) -> GradientBuckets:
    """Buckets that hold the first weights; under ZeRO-3 these are gathered when they are used."""
    kernel = kernel_for(mesh.device, torch_dtype(plan.precision.parameter))
    buckets = GradientBuckets(
        slots,
        Shardings.of(plan, mesh),
        units_of(stages, plan, model),
        whole=optimizer.owns_whole,
        together=_layer_of_expert if kernel is not None else None,
        bucket_bytes=plan.bucket_bytes,
        values=torch_dtype(plan.precision.parameter),
        gradients=torch_dtype(plan.precision.gradient),
        reduction=torch_dtype(plan.precision.reduction),
        device=mesh.device,
    )
    for stage in stages:
        stage.to_device(mesh.device)
    for bucket in buckets.buckets:
        with bucket.filling():
            fill_initial(bucket.slots, model, seed=seed, std=stages[0].initializer_range)
    if buckets.divides_values:
        Residence(buckets, plan, model).attach(stages)
    if kernel is not None:
        for module in (module for stage in stages for module in stage.modules()):
            if isinstance(module, Experts):
                module.group(kernel)
    return buckets


def _layer_of_expert(slot: Slot) -> int | None:
    return layer_of(slot.name) if slot.is_expert else None


def _causal_lm(config: Mapping[str, Any], plan: Plan, mesh: Mesh) -> nn.Module:
    causal_lm = skeleton(config)
    if mesh.context.size > 1:
        rule = "under context parallelism the frequencies of all ranks must be the same"
        require_fixed_rotary(causal_lm, rule, "cp=1")
    if plan.precision.parameter == "fp64":
        widen(causal_lm)
    return causal_lm


def _masks(plan: Plan, mesh: Mesh, seed: int) -> Masks:
    is_split = plan.sequence_parallel
    return Masks(
        seed,
        num_parts=mesh.tensor.size if is_split else 1,
        part_index=mesh.tensor.index if is_split else 0,
        context_size=mesh.context.size,
        device=mesh.device,
    )
