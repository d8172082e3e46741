"""Serving as values: what is asked for, and how a model is split and run to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.plan.plan import even_split
from triptych.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorkload:
    """Requests of `input_tokens` and answers of `output_tokens` tokens each.

    They arrive at `rate` a second, or `concurrency` users each send the next one when they have
    their answer; with neither, all are there at once. Users who send `rounds` requests each begin
    together. Objectives are mean seconds.
    """

    input_tokens: float
    output_tokens: float
    rate: float | None = None
    concurrency: float | None = None
    rounds: float | None = None  # None: without end
    streams: bool = True  # tokens go to the users one by one
    ttft_s: float | None = None  # to the first token
    tpot_s: float | None = None  # from one token to the next

    @property
    def tokens(self) -> float:
        """Tokens of a request and its answer."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Layers by pipeline stage, ranks that share each layer, copies of all that.

    `batch` is the most sequences of a replica that run at once, `chunk` the most tokens of a step.
    """

    layers: tuple[int, ...]
    tensor: int
    replicas: int
    batch: int
    chunk: int
    weights: str = "bf16"  # of products
    cache: str = "bf16"  # keys and values
    wide_attention: bool = False  # its products stay in 16 bit where others do not

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.tensor * self.pp * self.replicas

    @property
    def wide_bytes(self) -> float:
        """Bytes of a weight that is not narrowed: embedding, head, norms."""
        return max(2.0, DTYPE_BYTES[self.weights])

    @property
    def is_even(self) -> bool:
        """True if stages differ by a layer at most, the first ones larger."""
        return self.layers == even_split(sum(self.layers), self.pp)

    def short(self) -> str:
        """The plan in a line, as `--fix` reads it."""
        layers = "" if self.is_even else f",layers={'+'.join(map(str, self.layers))}"
        words = f"tp={self.tensor},pp={self.pp},replicas={self.replicas}{layers}"
        dtypes = f"weights={self.weights},cache={self.cache}"
        return f"{words},batch={self.batch},chunk={self.chunk},{dtypes}"

    def to_json(self) -> dict[str, Any]:
        """The resolved plan."""
        return {
            "short": self.short(),
            "tp": self.tensor,
            "pp": self.pp,
            "replicas": self.replicas,
            "layers": list(self.layers),
            "batch": self.batch,
            "chunk": self.chunk,
            "weights": self.weights,
            "cache": self.cache,
        }
