"""A table of made-up runs: one whose figures are right by hand, and ways to break it."""

from __future__ import annotations

import csv
from pathlib import Path

from triptych.validate.table import Row

RUN = {
    "id": "lab-1",
    "source": "made up",
    "year": "2024",
    "model_name": "GPT-tiny",
    "n_layers": "4",
    "hidden": "1024",
    "ffn_hidden": "4096",
    "n_heads": "16",
    "n_kv_heads": "16",
    "vocab": "50304",
    "seq_len": "1024",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "dp": "4",
    "tp": "2",
    "pp": "1",
    "zero_stage": "1",
    "recompute": "none",
    "precision": "bf16",
    "micro_batch_size": "2",
    "global_batch_size": "32",
    "iteration_time_s": "0.2",
    "tokens_per_s_per_gpu": "",
    "tflops_per_gpu": "",
    "tflops_kind": "",
    "peak_mem_gb_per_gpu": "",
    "notes": "",
}


def run(**cells: object) -> Row:
    """The run with some cells changed."""
    return Row({**RUN, **{name: str(value) for name, value in cells.items()}})


def write(path: Path, *rows: Row) -> Path:
    """A table of these rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(RUN))
        writer.writeheader()
        writer.writerows({name: row.text(name) for name in RUN} for row in rows)
    return path
