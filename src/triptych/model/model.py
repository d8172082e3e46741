"""What a language model is made of: an embedding, a list of blocks, a head.

Widths are in elements, windows and positions in tokens. Counting (parameters, FLOPs,
activation bytes) is in `count.py` and `operators.py`; reading is in `hf.py` and `catalogue.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triptych.model.operator import Captured, Ends

HeadNorm = Literal["shared", "per head", "joint", "unweighted"]
"""A norm of each head with weights that all share (Qwen 3), of its own (Cohere) or without any
(Llama 4), or one norm over all heads together (OLMo 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2 2024, sec. 2.1): the low-rank widths."""

    query_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope_dim: int  # per head, without rotary
    rope_dim: int  # per head, rotary, one shared key
    value_dim: int  # per head


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention (MHA and MQA are its ends), or latent attention if `latent`."""

    query_heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # a norm on queries and one on keys
    qk_norm_kind: HeadNorm = "shared"
    rotary: bool = True  # positions enter by rotating queries and keys
    sinks: bool = False  # one learned logit per query head (GPT-OSS)
    window: int | None = None  # sliding window in tokens; None: full causal
    chunk: int | None = None  # tokens see those of their own chunk of so many only (Llama 4)
    tempered: bool = False  # queries are scaled by their position (Llama 4)
    latent: Latent | None = None
    softcapped: bool = False  # scores are bent to c x tanh(scores / c)
    dropout: bool = False  # of attention weights

    @property
    def query_width(self) -> int:
        """Elements of all query heads together."""
        return self.query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads together (as many again for the values)."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense feed-forward layer: gated (three matrices, SwiGLU) or plain (two)."""

    width: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: `top_k` of `count` routed experts a token, plus shared ones."""

    count: int
    top_k: int
    width: int  # of one routed expert
    shared_width: int = 0  # of all shared experts together
    shared_gate: bool = False  # one more product weighs the shared experts (Qwen 2 MoE)
    gated: bool = True
    bias: bool = False  # on the router and on every routed expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer layer.

    `norms` is 1 where attention and MLP share one (Falcon-7B), 4 where both also have one on
    their output (Gemma 2 and 3).
    """

    attention: Attention
    mlp: Mlp | Experts
    norms: int = 2  # norms of `hidden` elements in the layer
    norm_bias: bool = False  # LayerNorm rather than RMSNorm
    output_norms: bool = False  # two norms stand behind the branches, not before (OLMo 2)
    captured: Captured | None = None  # read off a module: what counts instead of what is above

    @property
    def ends_in_norm(self) -> bool:
        """True if each branch has a norm on its output."""
        return self.norms >= 4 or self.output_norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only language model, counted exactly unless `unreliable` says why not.

    `family` is the Hugging Face `model_type`; `unreliable` lists features that the
    description does not cover, so that a prediction can be marked.
    """

    name: str
    family: str
    hidden: int
    blocks: tuple[Block, ...]
    vocab: int
    tied: bool
    max_position: int
    learned_positions: bool = False
    position_offset: int = 0  # rows of the position table before position 0 (OPT: 2)
    final_norm_bias: bool = False
    embedding_norm: bool = False
    dropout: bool = False  # both residual branches end in dropout: one mask byte an element
    ends: Ends | None = None  # read off modules: what counts instead of what is above
    unreliable: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.blocks)

    @property
    def query_heads(self) -> int:
        """Query heads of the first block."""
        return self.blocks[0].attention.query_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the first block."""
        return self.blocks[0].attention.kv_heads

    @property
    def experts(self) -> Experts | None:
        """The first mixture of experts in the model, if there is one."""
        return next((b.mlp for b in self.blocks if isinstance(b.mlp, Experts)), None)
