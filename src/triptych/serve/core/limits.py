"""The sizes that a scheduler keeps to. There is ONE context limit, and this is it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.errors import InputError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of the key-value pool and of a step.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        model_context: longest prompt plus answer that the model can take, in tokens.
        max_running: sequences that run at once (a request counts `n` times).
        max_waiting: requests that wait at once; further ones are refused.
        token_budget: tokens computed in one step, decodes included.
        growth_tokens: room left for each running sequence when another one starts. Less means more
            preemption (0: a tenth of the throughput lost to it in a full pool), more means fewer
            that run.
        stages: pipeline stages; as many steps are in flight.
        steps_ahead: 1 plans a step before the tokens of its predecessor are known, 0 never does.
        ahead_below_s: while steps last so long or longer, none is planned ahead: the ranks wait for
            the host a little, and a request that comes meanwhile is in the very next step.
        overlap_chunks: whether the next chunk of a prompt may be in flight behind the last one.
            Otherwise a request is in one batch at a time, and a long prompt alone in a pipeline
            uses one stage at a time.
        prefix_reuse: whether full blocks of equal prefixes are shared.

    Raises:
        InputError: with all broken rules.

    """

    num_blocks: int
    block_size: int = 16
    model_context: int
    max_running: int = 256
    max_waiting: int = 4096
    token_budget: int = 2048
    growth_tokens: int = 32
    stages: int = 1
    steps_ahead: int = 1
    ahead_below_s: float = math.inf
    overlap_chunks: bool = False
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        problems = _too_small(self)
        if self.token_budget <= self.max_running:
            problems.append(
                Problem(
                    f"token budget {self.token_budget}, running limit {self.max_running}",
                    "a step holds a token of every running sequence and prefill besides",
                    f"token budget {self.max_running + 1} or more",
                )
            )
        if self.steps_ahead not in (0, 1):
            problems.append(Problem(f"{self.steps_ahead} steps ahead", "0 or 1 step ahead"))
        if problems:
            raise InputError(problems)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together: what is enforced and advertised."""
        return min(self.model_context, self.num_blocks * self.block_size)

    @property
    def depth(self) -> int:
        """Steps that are planned and not yet completed, at most."""
        return self.stages + self.steps_ahead

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)


def _too_small(limits: Limits) -> list[Problem]:
    names = ("num_blocks", "block_size", "model_context", "max_running", "max_waiting", "stages")
    return [
        Problem(f"{name} = {value}", "at least 1", "a whole number from 1")
        for name in names
        if (value := getattr(limits, name)) < 1
    ]
