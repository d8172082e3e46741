"""What a serving engine does that costs time or memory: its features, not its name.

`TRIPTYCH` describes our own engine; `engines.py` describes others in the same words. Each number
belongs to a feature, never to a model or a run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Features of a serving engine."""

    name: str
    kernels: float = 8.0  # of a layer besides its products, attention and collectives
    host_s: float = 5e-4  # between two steps, of the host alone
    sequence_s: float = 5e-6  # of the host for each sequence of a step: sampling, tokens to text
    eager_s: float = 0.0  # of the host for each kernel; 0: captured graphs launch them
    chunk_tokens: int = 8192  # most tokens of a step
    is_chunked: bool = True  # prompts run in one step with decodes, cut where they are long
    max_batch: int = 256  # most sequences of a step
    memory_share: float = 0.9  # of a device, for weights, work space and cache
    shares_rest: bool = False  # takes that share of what weights and work space leave instead
    workspace_bytes: float = 2e9  # of the runtime, graphs, communicators
    reserves_output: bool = False  # cache for a whole answer is set aside with its prompt
    flash: int = 3  # generation of attention kernels for prompts
    decode_rate: float = 0.75  # of the memory's rate, attained by attention over cached tokens
    grouped_heads: float = 32.0  # query heads that read their common keys and values once
    weight_rate: float = 1.0  # the same for weights, over what additions attain
    narrow_cache: bool = False  # keys and values in fp8 where weights are
    fp8_rate: float = 0.9  # of fp8 products against the sheet's ratio: scales and casts
    one_shot_s: float = 6e-6  # an all-reduce through peers' memory; 0: the library's ring only
    lag_steps: float = 1.0  # from a prompt's arrival to its first step, when others come with it
    request_s: float = 2e-3  # to read a prompt and to send its first token
    token_s: float = 0.0  # of the process that streams answers, for each token that it sends on


# Assumed, not measured: our engine has not run on GPUs.
TRIPTYCH = Engine(
    name="triptych", kernels=14.0, host_s=1.5e-3, sequence_s=2e-5, flash=2, token_s=4e-5
)
