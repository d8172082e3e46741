"""Small models, all legal plans of each on some ranks, and one plan run with our runtime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (  # noqa: F401  (lazy modules: loaded once here, not once a rank)
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)

from triptych.cluster.cluster import Cluster
from triptych.measure.drift import MESSAGE_BYTES, Pace, mean_pace, pace
from triptych.measure.watch import Place, Watch
from triptych.model.hf import from_config
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.share import Share
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload
from triptych.runtime.engine import Engine, MicroBatch
from triptych.runtime.mesh import Mesh
from triptych.search.pins import Pins
from triptych.search.search import Question

WORKLOAD = Workload(sequence_length=128, global_batch=8)
MICROBATCHES = (1, 4)
PINNED = {"precision": "fp32", "recompute_every": "1"}
RECOMPUTES = ("none", "full")
MOST_CHUNKS = 2
TIMED_STEPS = 3
LEARNING_RATE = 1e-4
MARK = "the step whose peak counts"


def llama(hidden: int, layers: int, vocab: int) -> dict[str, Any]:
    """The configuration of a Llama with heads of 32, or of 64 from 256 on."""
    heads = hidden // (64 if hidden > 256 else 32)
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": round(hidden * 2.75 / 32) * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }


MODELS: Mapping[str, dict[str, Any]] = {
    "deep": llama(128, 12, 2048),
    "wide": llama(384, 2, 2048),
    "vocabulary": llama(128, 4, 16384),
    "experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 192,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
}
"""Deep and narrow, wide and shallow, a large vocabulary, grouped queries with experts."""


def plans(name: str, cluster: Cluster) -> Iterator[Plan]:
    """Every legal plan of one of the models, pinned as above."""
    model = from_config(MODELS[name], name)
    question = Question(model=model, cluster=cluster, workload=WORKLOAD, pins=Pins.read(PINNED))
    return legal_plans(question, MICROBATCHES)


def legal_plans(question: Question, microbatches: Sequence[int]) -> Iterator[Plan]:
    """Every legal uniform plan in the search's own space that runs here, layers even."""
    space, model = question.space(), question.model
    for degrees in space.degrees():
        for base in space.settings(degrees):
            if base.recompute not in RECOMPUTES or base.microbatch not in microbatches:
                continue
            for chunks in space.chunks(degrees):
                if chunks > MOST_CHUNKS:
                    continue
                for schedule in space.schedules(degrees, base.microbatch, chunks):
                    for sharding in space.shardings(degrees):
                        stages = space.stages(degrees, chunks, None)
                        plan = base.with_(
                            stages=stages, chunks=chunks, schedule=schedule, **sharding._asdict()
                        )
                        asked = model, question.cluster, question.workload
                        if not verify(plan, *asked) and not unrunnable(plan, model):
                            yield plan


class Ran(NamedTuple):
    """What one rank saw of a run: seconds of each timed step, and the machine's pace."""

    steps_s: list[float]
    pace: Pace


def run(
    config: Mapping[str, Any],
    plan: Plan | str,
    workload: Workload = WORKLOAD,
    steps: int = TIMED_STEPS,
    message_bytes: int = MESSAGE_BYTES,
) -> Ran:
    """Trains a few steps under a plan, the machine's pace measured before and after them, with
    messages of so many bytes.
    """
    step = _step(config, plan, workload)
    step()
    world = dist.get_world_size()
    place = Place(rank=dist.get_rank(), world=world, per_node=world, device=torch.device("cpu"))
    watch = Watch(place)
    before, found = pace(watch, message_bytes), []
    for _ in range(steps):
        watch.together()
        start_s = time.perf_counter()
        step()
        found.append(time.perf_counter() - start_s)
    return Ran(found, mean_pace([before, pace(watch, message_bytes)]))


def peak_bytes(config: Mapping[str, Any], text: str, workload: Workload = WORKLOAD) -> int:
    """The most bytes of tensors that are alive in the third step, by the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step = _step(config, text, workload)
        step(), step()
        with record_function(MARK):
            step()
    return _peak_of(watched)


def _step(config: Mapping[str, Any], asked: Plan | str, workload: Workload) -> Callable[[], object]:
    """A training step of our runtime on this rank, under a plan or its short form."""
    model = from_config(config, "model")
    plan = parse_plan(asked, model) if isinstance(asked, str) else asked
    mesh = Mesh.create(plan, kv_heads=model.kv_heads)
    engine = Engine.build(plan, config, mesh)
    rows = batch(plan, mesh, workload, model.vocab)
    return lambda: engine.step(rows, LEARNING_RATE)


def batch(plan: Plan, mesh: Mesh, workload: Workload, vocab: int) -> list[MicroBatch]:
    """This rank's micro-batches of a global batch of random tokens."""
    draws = torch.Generator().manual_seed(0)
    shape = (workload.global_batch, workload.sequence_length + 1)
    ids = torch.randint(vocab, shape, generator=draws)
    chunks = Share.of(plan, mesh.coordinates).chunks(workload.global_batch)
    return [MicroBatch(ids[list(rows), :-1], ids[list(rows), 1:]) for rows in chunks]


def _peak_of(watched: Any) -> int:
    """The most bytes of tensors that were alive in the marked step."""
    events = watched.profiler.kineto_results.events()
    (mark,) = (event for event in events if event.name() == MARK)
    first_ns, last_ns = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    live = peak = 0
    memory = (event for event in events if event.name() == "[memory]")
    for event in sorted(memory, key=lambda e: e.start_ns()):
        live += event.nbytes()
        if first_ns <= event.start_ns() <= last_ns:
            peak = max(peak, live)
    return peak


def step_s(ranks: list[Ran]) -> float:
    """Seconds of a step: the median of steps, each as long as its slowest rank's."""
    slowest = [max(one) for one in zip(*(rank.steps_s for rank in ranks), strict=True)]
    return statistics.median(slowest)
