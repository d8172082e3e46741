"""A rank of an engine, made from a model and a plan: weights, memory, worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from triptych.errors import CheckpointError
from triptych.model.model import Model
from triptych.plan.families import family_of
from triptych.plan.plan import Plan, Precision
from triptych.runtime.mesh import Mesh
from triptych.serve.core.limits import Limits
from triptych.serve.engine import llama
from triptych.serve.engine.cache import Heads, Pool
from triptych.serve.engine.executor import follow
from triptych.serve.engine.grammars import Grammars
from triptych.serve.engine.llama import LlamaStage
from triptych.serve.engine.sampler import Sampler
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.stage import ModelStage, Stage
from triptych.serve.engine.suitable import require_suitable
from triptych.serve.engine.worker import Route, Worker


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank has after loading; the same limits on all."""

    worker: Worker
    limits: Limits
    model: Model
    source: ModelSource
    grammars: Grammars
    block_bytes: int  # of keys and values, on the rank that has the largest


def load_rank(
    source: ModelSource,
    plan: Plan | None,
    settings: EngineSettings,
    processes: int,
    *,
    strict: bool = False,
) -> Rank:
    """Loads this rank's part of a model and makes room for keys and values; collective.

    Raises InputError if model, plan and settings do not fit.
    """
    model = source.model()
    plan = serving_plan(plan, source, model, processes)
    context = settings.model_context(model.max_position)
    mesh = Mesh.create(plan, kv_heads=model.kv_heads, strict=strict)
    loaded = ModelStage(source.config, model, plan, mesh)
    source.load(loaded.shards)
    context = min(context, _steady_context(loaded.module.causal_lm) or context)
    heads = loaded.heads()
    num_blocks, block_bytes = _agreed_blocks(heads, loaded.dtype, settings, context, mesh)
    limits = settings.limits(num_blocks, context, len(plan.stages), mesh.device)
    stage: Stage = loaded
    if settings.kernels and llama.suits(loaded):
        stage = LlamaStage(loaded, limits.token_budget)
    pool = Pool(heads, num_blocks, settings.block_size, loaded.dtype, mesh.device, settings.kernels)
    route, grammars = Route.of(plan), Grammars(_tokenizer(source), source.end_tokens())
    sampler = None
    if mesh.rank == route.sampler:
        sampler = Sampler(model.vocab, _unknown(source, model), grammars.guide)
    hidden = (model.hidden, loaded.dtype)
    worker = Worker(stage, mesh, route, limits, pool, hidden, sampler)
    return Rank(worker, limits, model, source, grammars, block_bytes)


def follow_rank(
    folder: Path, plan: Plan, settings: EngineSettings, *, strict: bool = False
) -> None:
    """The life of a rank other than 0."""
    rank = load_rank(ModelSource.open(folder), plan, settings, plan.world_size, strict=strict)
    follow(rank.worker)


def serving_plan(plan: Plan | None, source: ModelSource, model: Model, processes: int) -> Plan:
    """The plan as far as it matters without training; raises PlanError if it does not fit."""
    if plan is None:
        precision = Precision(parameter=source.dtype(), master=source.dtype())
        plan = Plan.uniform(model.num_layers, precision=precision)
    require_suitable(plan, model, processes)
    return plan.with_(zero=0, sequence_parallel=False, recompute="none", schedule="1f1b")


def _agreed_blocks(
    heads: dict[int, Heads],
    dtype: torch.dtype,
    settings: EngineSettings,
    context: int,
    mesh: Mesh,
) -> tuple[int, int]:
    """The blocks that every rank has room for, and the bytes of one at most; collective."""
    elements = sum(each.elements for each in heads.values())
    block_bytes = elements * settings.block_size * dtype.itemsize
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world.size))
    found = settings.blocks(block_bytes, context, mesh.device, ranks_here)
    agreed = mesh.world.all_reduce(torch.tensor([-found, block_bytes]), maximum=True).tolist()
    return -int(agreed[0]), int(agreed[1])


def _steady_context(causal_lm: Any) -> int | None:
    """Up to where rotary frequencies do not follow the longest position in the batch.

    Dynamic and LongRoPE frequencies change with it; requests that share a step would share those
    of the longest.
    """
    config = causal_lm.config
    family = family_of(config.model_type)
    if family.rotary is None:
        return None
    rotary = causal_lm.get_submodule(f"{family.trunk}.{family.rotary}")
    kinds = (
        {rotary.rope_type} if isinstance(rotary.rope_type, str) else {*rotary.rope_type.values()}
    )
    if not kinds & {"dynamic", "longrope"}:
        return None
    table = config.rope_parameters
    return int(table.get("original_max_position_embeddings") or config.max_position_embeddings)


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    try:
        return source.tokenizer()
    except CheckpointError:
        return None


def _unknown(source: ModelSource, model: Model) -> list[int]:
    """Rows of the vocabulary that are no token: they are never chosen."""
    tokenizer = _tokenizer(source)
    if tokenizer is None:
        return []
    known = set(tokenizer.get_vocab().values())
    return [row for row in range(model.vocab) if row not in known]
