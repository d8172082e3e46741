"""What would lower the memory of the largest rank: the cure of its largest term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.report.text import gib

CURES: Mapping[str, str] = {
    "weights": "zero=3, more tensor ranks (tp) or more stages (pp)",
    "gradients": "zero=2 or 3, more tensor ranks (tp) or more stages (pp)",
    "optimizer": "zero=1 to 3, or offload=optimizer",
    "activations": "recompute=full (or selective), a smaller microbatch, sequence parallelism or "
    "context ranks (cp)",
    "logits": "more tensor ranks (tp divides the vocabulary) or a smaller microbatch: the loss "
    "runs in chunks of tokens already, and recomputation would not help",
    "buffers": "a smaller bucket_bytes",
}
"""What to change, by the term of memory that it lowers. What a framework itself needs has none."""


def memory_advice(prediction: Mapping[str, Any]) -> str:
    """The main term of a prediction's memory and its cure, in one line; empty without terms.

    What a framework itself needs is left out: no plan lowers it.
    """
    terms = {k: v for k, v in (prediction.get("memory_gib") or {}).items() if k in CURES}
    if not any(terms.values()):
        return ""
    main = max(terms, key=terms.__getitem__)
    return f"most of it: {main}, {gib(terms[main])}; less with {CURES[main]}"
