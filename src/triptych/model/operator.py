"""One operator of a layer: what it computes, moves and keeps, per token of one sequence.

What a tensor-parallel group of `t` ranks divides is said by `split`:

    none      nothing: every rank holds and computes all of it (router, latent down-projections)
    column    weight columns, hence the output features, by t
    row       weight rows, hence the input features, by t
    heads     attention heads by t (key/value heads at most down to one head a rank)
    vocab     rows of the vocabulary by t
    sequence  tokens, and only with sequence parallelism; weights are replicated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gemm", "attention", "memory"]
Split = Literal["none", "column", "row", "heads", "vocab", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, per token. Fields that do not apply to its kind are zero.

    A gemm multiplies a row of `k` by a `k` x `n` weight; `weight_elements` are weight and bias of
    one copy. Routed experts are one gemm of which a token visits `tokens_factor` (top-k) of
    `copies` (experts). `elements` (moved by the forward pass, reads and writes, for memory-bound
    operators) and `saved` (kept for the backward pass, in 16-bit elements: a fp32 value counts
    two, a byte of dropout mask a half) already contain `tokens_factor`.
    """

    name: str
    kind: Kind
    split: Split = "none"
    k: int = 0
    n: int = 0
    weight_elements: int = 0
    tokens_factor: int = 1
    copies: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0  # of queries and keys
    value_dim: int = 0  # of values
    window: int | None = None
    chunk: int | None = None
    softcapped: bool = False
    dropout: bool = False  # of attention weights
    elements: float = 0.0
    saved: float = 0.0

    @property
    def is_written_out(self) -> bool:
        """True for attention that no fused kernel does: its scores exist as matrices."""
        return self.softcapped or self.dropout

    @property
    def parameters(self) -> int:
        """Trainable elements, all copies together."""
        return self.weight_elements * self.copies

    @property
    def active_parameters(self) -> int:
        """Trainable elements that one token uses."""
        return self.weight_elements * min(self.tokens_factor, self.copies)

    def forward_flops(self, sequence_length: int, causal: bool = True) -> float:
        """Forward FLOPs per token: 2kn of a gemm, 2 x context x head width of each attention half.

        Source: Narayanan et al. 2021 (PTD-P), appendix; `causal` counts the lower triangle only.
        """
        if self.kind == "gemm":
            return 2.0 * self.k * self.n * self.tokens_factor
        if self.kind == "attention":
            context = self.average_context(sequence_length, causal)
            return 2.0 * self.heads * (self.head_dim + self.value_dim) * context
        return 0.0

    def average_context(self, sequence_length: int, causal: bool = True) -> float:
        """Tokens that a query attends to, averaged over the sequence; chunks are sequences."""
        chunk = min(self.chunk or sequence_length, sequence_length)
        count, rest = divmod(sequence_length, chunk)
        seen = count * chunk * average_context(chunk, self.window, causal)
        seen += rest * average_context(rest, self.window, causal) if rest else 0.0
        return seen / sequence_length


def average_context(sequence_length: int, window: int | None, causal: bool) -> float:
    """Tokens that a query attends to, averaged over the sequence (a triangle counts s/2).

    With a window w < s the triangle is cut at w: w - w^2 / (2s).
    """
    reach = min(window or sequence_length, sequence_length)
    if not causal:
        return float(reach)
    return reach - reach * reach / (2.0 * sequence_length)


def attention_operator(*, heads: int, kv_heads: int, **fields: Any) -> Operator:
    """A fused attention kernel: it keeps queries, keys, values, what it made, and statistics."""
    width = fields["head_dim"] + fields["value_dim"]
    return Operator(
        name="attention",
        kind="attention",
        split="heads",
        heads=heads,
        kv_heads=kv_heads,
        saved=float((heads + kv_heads) * width + 2 * heads),
        **fields,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A layer as a graph that was read off its module, where no description covers it.

    `flows` are pairs of places: who writes what who reads. Place 0 is what the layer before hands
    over, place i + 1 is `operators[i]`; the last flow leads back to 0, the next layer's input.
    """

    operators: tuple[Operator, ...]
    flows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The operators in front of the first layer and behind the last one, read off modules."""

    embedding: tuple[Operator, ...]
    head: tuple[Operator, ...]
