"""CPU seconds of a training step: Triptych against DDP and FSDP2 on two gloo ranks.

Same module (the library's Llama with one attention function), same loss function, same fused AdamW
and clipping, same global batch with accumulation. Both live in the same processes and take turns,
so that noise of the machine hits both; CPU seconds are of all threads, summed over the ranks.

    python benchmarks/step_time.py [--pairs 15] [--json]
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
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


def triptych_step(zero: int) -> Callable[[int], float]:
    """A step of our engine."""
    plan = Plan.uniform(CONFIG["num_hidden_layers"], dp=RANKS, zero=zero, microbatch=MICROBATCH)
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
) -> Callable[[int], float]:
    """Accumulation, clipping and fused AdamW around a wrapped module, as its documentation says."""
    optimizer = torch.optim.AdamW(
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


def ddp_step() -> Callable[[int], float]:
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

    return _peer_step(model, lambda m, p, s: m(p.input_ids, p.labels, s), Sync)


def fsdp2_step() -> Callable[[int], float]:
    """FSDP2 at its cheapest: parameters stay gathered, gradients reduce on the last micro-batch."""
    model = _WithLoss(_library_model())
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    class Sync:
        def __init__(self, last: bool) -> None:
            model.set_requires_gradient_sync(last)

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


def compare(pairs: int) -> list[dict[str, Any]]:
    """Ratios of interleaved pairs for each of our modes against each peer."""
    rows = []
    peers = {"DDP": ddp_step, "FSDP2": fsdp2_step}
    for zero, peer in ((0, "DDP"), (1, "DDP"), (1, "FSDP2")):
        ours, theirs = triptych_step(zero), peers[peer]()
        for warm in range(2):
            cpu_seconds(ours, warm), cpu_seconds(theirs, warm)
        found = []
        for index in range(pairs):
            order = (ours, theirs) if index % 2 == 0 else (theirs, ours)
            spent = {id(step): cpu_seconds(step, index) for step in order}
            found.append((spent[id(ours)], spent[id(theirs)]))
        rows.append(_row(f"ZeRO-{zero}", peer, found))
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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 1 if child == 0 else 0
        store = dist.FileStore(f"{folder}/store", RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        rows = compare(options.pairs)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        low, high = row["interval_95"]
        print(
            f"{row['claim']:38} against {row['peer']:24} {row['ours']:.3f} / {row['theirs']:.3f} "
            f"CPU s, ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
