"""SmolLM2-135M fine-tuned by us under a hybrid plan and by plain `transformers`: perplexity.

Both train the same weights on the same samples with the same AdamW. The other side is one process
with the library's own model, whose documents run one at a time: it knows neither packing nor plans.
Held-out perplexity before and after must be equal within 1 %.

    python benchmarks/fine_tune.py [--model DIR] [--data DIR] [--out DIR] [--only chat] [--json]

`--out` keeps the sides: what is there already is not run again. Files: examples/smollm2.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sides.rows import show
from triptych.api import train
from triptych.plan.share import Share
from triptych.train.data import EvaluationData
from triptych.train.folder import RunFolder
from triptych.train.job import Job
from triptych.train.job_file import read_job
from triptych.train.job_parts import evaluation_data, learning_rate, training_data
from triptych.train.samples import IGNORED
from triptych.train.text import read_data

JOBS = {"text": "shakespeare.toml", "chat": "chat.toml"}
EXAMPLES = Path(__file__).parents[1] / "examples" / "smollm2"
TOLERANCE = 0.01

Document = tuple[torch.Tensor, torch.Tensor]  # inputs and labels, [1, tokens] each


def job_of(kind: str, model: Path, data: Path, out: Path) -> tuple[Path, list[str], Job]:
    """The example's job with the files where they are."""
    path = EXAMPLES / JOBS[kind]
    found = read_job(path)
    named = {"data.train": found.data.train, "data.eval": found.data.eval}
    changes = [f"run.folder={out / kind}", f"model.path={model}"]
    for key, names in named.items():
        moved = [str(data / Path(n).relative_to(Path("shakespeare").absolute())) for n in names]
        changes.append(f"{key}={json.dumps(moved)}")
    return path, changes, read_job(path, changes)


def our_perplexities(kind: str, model: Path, data: Path, out: Path) -> list[float]:
    """Before and after, of a run under the job's plan."""
    path, changes, _ = job_of(kind, model, data, out)
    if not (out / kind / "done").is_file():
        train(path, changes)
        (out / kind / "done").touch()
    lines = map(json.loads, (out / kind / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return [math.exp(losses[0]), math.exp(losses[-1])]


def their_perplexities(kind: str, model: Path, data: Path, out: Path) -> list[float]:
    """Before and after, of the library's model in one process."""
    kept = out / kind / "transformers.json"
    if not kept.is_file():
        _, _, job = job_of(kind, model, data, out)
        kept.write_text(json.dumps(plain(job, model)))
    found: list[float] = json.loads(kept.read_text())
    return found


def plain(job: Job, folder: Path) -> list[float]:
    """The plain loop: AdamW with two groups, clipping, the same rates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    share = Share(microbatch=job.train.global_batch)
    data, _ = read_data(RunFolder(Path(job.run.folder or "")))
    training, rate = training_data(job, data, share), learning_rate(job)
    held_out = evaluation_data(job, data, share)
    assert held_out is not None
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    settings = job.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": rest, "weight_decay": 0.0}],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    before = perplexity(model, held_out)
    model.train()
    for step in range(1, job.train.steps + 1):
        rows = documents(training.microbatches((step - 1) * job.train.global_batch))
        batch = list(rows)
        tokens = sum(int((labels != IGNORED).sum()) for _, labels in batch)
        for document in batch:
            (summed_loss(model, document) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step)
        optimizer.step()
        optimizer.zero_grad()
    return [before, perplexity(model, held_out)]


def documents(batches: Sequence[Any]) -> Iterator[Document]:
    """Each document of micro-batches by itself; those without a label are left out."""
    for arrays in batches:
        for row, (ids, labels) in enumerate(zip(arrays.input_ids, arrays.labels, strict=True)):
            lengths = arrays.documents[row] if arrays.documents else (len(ids),)
            edges = [0, *accumulate(lengths)]
            for start, stop in pairwise(edges):
                if (labels[start:stop] != IGNORED).any():
                    yield tuple(torch.from_numpy(x[start:stop])[None] for x in (ids, labels))


def summed_loss(model: Any, document: Document) -> torch.Tensor:
    """The summed cross-entropy of a document."""
    ids, labels = document
    logits = model(input_ids=ids).logits[0]
    return torch.nn.functional.cross_entropy(
        logits, labels[0], ignore_index=IGNORED, reduction="sum"
    )


@torch.no_grad()
def perplexity(model: Any, held_out: EvaluationData) -> float:
    """Over all tokens of the evaluation."""
    model.eval()
    found = [document for batch in held_out.batches() for document in documents(batch)]
    tokens = sum(int((labels != IGNORED).sum()) for _, labels in found)
    return math.exp(sum(float(summed_loss(model, each)) for each in found) / tokens)


def compare(kind: str, model: Path, data: Path, out: Path) -> list[dict[str, Any]]:
    """A row each for before and after."""
    ours = our_perplexities(kind, model, data, out)
    theirs = their_perplexities(kind, model, data, out)
    return [
        {
            "claim": f"held-out perplexity {when} fine-tuning, {kind}",
            "peer": "transformers + AdamW, one process",
            "metric": "perplexity",
            "ours": mine,
            "theirs": other,
            "ratio": mine / other,
            "better": "lower",
        }
        for when, mine, other in zip(("before", "after"), ours, theirs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("smollm2"))
    parser.add_argument("--data", type=Path, default=Path("shakespeare"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        places = [p.absolute() for p in (options.model, options.data)]
        out = (options.out or Path(temporary)).absolute()
        kinds = [kind for kind in JOBS if options.only in kind]
        rows = [row for kind in kinds for row in compare(kind, *places, out)]
    show(rows, options.json)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    if worst > TOLERANCE:
        raise SystemExit(f"perplexities differ by {worst:.2%}")


if __name__ == "__main__":
    main()
