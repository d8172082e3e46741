"""CPU seconds of a training step: Triptych against DDP, ZeroRedundancyOptimizer and FSDP2.

Same module (the library's Llama with one attention function), same loss function, same fused AdamW
and clipping, same global batch with accumulation. Both live in the same processes and take turns,
so that noise of the machine hits both; CPU seconds are of all threads, summed over the ranks.

Sharded modes are compared with the peer that does the same work: ZeRO-2 and FSDP2 that keeps
parameters from forward to backward, ZeRO-3 and FSDP2 that does not; gradients scattered in each
micro-batch, or whole until the last one (`reduce_last`).

    python benchmarks/step_time.py [--pairs 15] [--only ZeRO-3] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from triptych.plan.plan import Plan
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.engine import Engine, MicroBatch, OptimizerSettings
from triptych.runtime.mesh import Mesh
from triptych.runtime.tensor.loss import Vocabulary, cross_entropy

RANKS, SEQUENCES, LENGTH, MICROBATCH = 2, 8, 256, 2
SETTINGS = OptimizerSettings(weight_decay=0.0)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def microbatches(step: int, rank: int) -> list[MicroBatch]:
    """This rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG["vocab_size"], (SEQUENCES, LENGTH + 1), generator=generator)
    share = SEQUENCES // RANKS
    mine = ids[rank * share : (rank + 1) * share]
    return [MicroBatch(part[:, :-1], part[:, 1:]) for part in mine.split(MICROBATCH)]


def triptych_step(zero: int, accumulation: str = "auto") -> Callable[[int], float]:
    """A step of our engine."""
    plan = Plan.uniform(
        CONFIG["num_hidden_layers"],
        dp=RANKS,
        zero=zero,
        microbatch=MICROBATCH,
        accumulation=accumulation,
    )
    engine = Engine.build(plan, CONFIG, Mesh.create(plan), optimizer=SETTINGS)
    rank = dist.get_rank()
    return lambda step: engine.step(microbatches(step, rank), 1e-4).loss


def _library_model() -> Any:
    settings = {k: v for k, v in CONFIG.items() if k != "model_type"}
    config = transformers.LlamaConfig(**settings)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="triptych")


def _peer_step(
    model: Any,
    losses: Callable[[Any, MicroBatch, float], torch.Tensor],
    sync: Callable[[bool], Any],
    make_optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> Callable[[int], float]:
    """Accumulation, clipping and fused AdamW around a wrapped module, as its documentation says."""
    optimizer = make_optimizer(
        model.parameters(), betas=SETTINGS.betas, weight_decay=0.0, fused=True, lr=1e-4
    )
    rank = dist.get_rank()

    def step(index: int) -> float:
        parts = microbatches(index, rank)
        total = torch.zeros(())
        for number, part in enumerate(parts):
            with sync(number == len(parts) - 1):
                # Both wrappers average over ranks.
                loss = losses(model, part, RANKS / (SEQUENCES * LENGTH))
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / RANKS

    return step


class _WithLoss(torch.nn.Module):
    """The library's model and our loss as one module, so that wrappers see one forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        alone = Communicator("tensor", (0,), 0, None, Counters())
        self.vocabulary = Vocabulary(0, CONFIG["vocab_size"], alone)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        head = self.model.lm_head.weight
        return cross_entropy(hidden.flatten(0, 1), head, labels.flatten(), self.vocabulary, scale)


def ddp_step(make_optimizer: Callable[..., Any] = torch.optim.AdamW) -> Callable[[int], float]:
    """DistributedDataParallel with gradients as bucket views."""
    model = DistributedDataParallel(_WithLoss(_library_model()), gradient_as_bucket_view=True)

    class Sync:
        def __init__(self, last: bool) -> None:
            self.last, self.context = last, model.no_sync()

        def __enter__(self) -> None:
            if not self.last:
                self.context.__enter__()

        def __exit__(self, *error: Any) -> None:
            if not self.last:
                self.context.__exit__(*error)

    return _peer_step(model, lambda m, p, s: m(p.input_ids, p.labels, s), Sync, make_optimizer)


def zero_redundancy_step() -> Callable[[int], float]:
    """DDP with torch's ZeroRedundancyOptimizer around the same AdamW: ZeRO-1."""
    return ddp_step(partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW))


def fsdp2_step(reshard: bool, each: bool) -> Callable[[int], float]:
    """FSDP2: parameters released after the forward or not, gradients reduced each micro-batch or
    on the last.
    """
    model = _WithLoss(_library_model())
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    class Sync:
        def __init__(self, last: bool) -> None:
            model.set_requires_gradient_sync(last or each)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...

    return _peer_step(model, lambda m, p, s: m(p.input_ids, p.labels, s), Sync)


def cpu_seconds(step: Callable[[int], float], index: int) -> float:
    """CPU seconds of one step over all ranks and threads."""
    dist.barrier()
    began = time.process_time()
    step(index)
    spent = torch.tensor([time.process_time() - began], dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


Make = Callable[[], Callable[[int], float]]

CLAIMS: tuple[tuple[str, Make, str, Make], ...] = (
    ("ZeRO-0", partial(triptych_step, 0), "DDP", ddp_step),
    ("ZeRO-1", partial(triptych_step, 1), "DDP", ddp_step),
    (
        "ZeRO-1",
        partial(triptych_step, 1),
        "DDP + ZeroRedundancyOptimizer",
        zero_redundancy_step,
    ),
    (
        "ZeRO-2",
        partial(triptych_step, 2),
        "FSDP2, kept after forward",
        partial(fsdp2_step, reshard=False, each=True),
    ),
    (
        "ZeRO-2 reduce_last",
        partial(triptych_step, 2, "reduce_last"),
        "FSDP2, kept, no_sync",
        partial(fsdp2_step, reshard=False, each=False),
    ),
    (
        "ZeRO-3",
        partial(triptych_step, 3),
        "FSDP2, resharded",
        partial(fsdp2_step, reshard=True, each=True),
    ),
    (
        "ZeRO-3 reduce_last",
        partial(triptych_step, 3, "reduce_last"),
        "FSDP2, resharded, no_sync",
        partial(fsdp2_step, reshard=True, each=False),
    ),
)
"""Ours, and the peer that does the same work."""


def compare(pairs: int, only: str) -> list[dict[str, Any]]:
    """Ratios of interleaved pairs for each of our modes against each peer."""
    rows = []
    for claim, make_ours, peer, make_theirs in CLAIMS:
        if only not in claim:
            continue
        ours, theirs = make_ours(), make_theirs()
        for warm in range(2):
            cpu_seconds(ours, warm), cpu_seconds(theirs, warm)
        found = []
        for index in range(pairs):
            order = (ours, theirs) if index % 2 == 0 else (theirs, ours)
            spent = {id(step): cpu_seconds(step, index) for step in order}
            found.append((spent[id(ours)], spent[id(theirs)]))
        rows.append(_row(claim, peer, found))
    return rows


def _row(claim: str, peer: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    """Geometric mean of the pairs' ratios with its 95 % interval (normal, over log ratios)."""
    logs = [math.log(ours / theirs) for ours, theirs in found]
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "claim": f"training step, {claim}, {RANKS} ranks",
        "peer": f"{peer} (torch {torch.__version__})",
        "metric": "CPU s per step",
        "ours": statistics.median(ours for ours, _ in found),
        "theirs": statistics.median(theirs for _, theirs in found),
        "ratio": math.exp(mean),
        "interval_95": [math.exp(mean - half), math.exp(mean + half)],
        "pairs": len(found),
        "better": "lower",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the claim's name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 1 if child == 0 else 0
        store = dist.FileStore(f"{folder}/store", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        rows = compare(options.pairs, options.only)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        low, high = row["interval_95"]
        print(
            f"{row['claim']:42} against {row['peer']:44} {row['ours']:.3f} / {row['theirs']:.3f} "
            f"CPU s, ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
