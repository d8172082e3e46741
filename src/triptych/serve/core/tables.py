"""What a rank knows of the slots, and the rows of a step as arrays: the other end of a `Step`.

Arrays are whole numbers on the host, one numpy call for all decodes of a step; no loop over tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.serve.core.limits import Limits
from triptych.serve.core.step import Step

Ints = NDArray[np.int32]


class Rows(NamedTuple):
    """The rows (tokens) of a step, decodes first, then each chunk's; shapes in brackets.

    Row r of slot s at position p writes its key and value at `cache[r]` and attends to positions
    0 .. p of the table of s. Decode rows take the last sampled token of their slot: no rank needs
    to know it when the step is planned.
    """

    tokens: Ints  # [rows]; 0 for decodes
    positions: Ints  # [rows]
    cache: Ints  # [rows] index of the row's position in the cache: block x block size + offset
    starts: Ints  # [slots in the step + 1] first row of each
    slots: Ints  # [slots in the step]
    lengths: Ints  # [slots in the step] positions that the last row of each attends to
    samples: Ints  # [samples] slots that get a token
    sample_rows: Ints  # [samples] row whose logits each is drawn from


class Tables:
    """Block tables, prompts and lengths of all slots.

    `blocks` [slots, blocks of the longest request] may be handed to a kernel as it is.
    """

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.block_size
        self.blocks = np.zeros((limits.max_running, limits.blocks(limits.context)), np.int32)
        self.sizes = np.zeros(limits.max_running, np.int32)  # blocks of each table
        self.lengths = np.zeros(limits.max_running, np.int32)  # positions computed
        self.prompts: dict[int, tuple[int, Ints]] = {}  # slot: first position, tokens

    def apply(self, step: Step) -> Rows:
        """Takes in a step and returns its rows. `step.copies` are to be done before they run."""
        self._change(step)
        decodes = np.array(step.decodes, np.int32)
        at = self.lengths[decodes]
        positions, tokens = [at], [np.zeros(len(decodes), np.int32)]
        cache = [self._cache(decodes, at)]
        self.lengths[decodes] = at + 1
        for slot, start, num_tokens, samples in step.chunks:
            first, prompt = self.prompts[slot]
            at = np.arange(start, start + num_tokens, dtype=np.int32)
            positions.append(at)
            tokens.append(prompt[start - first : start - first + num_tokens])
            cache.append(self._cache(slot, at))
            self.lengths[[slot, *samples]] = start + num_tokens
            if samples:
                del self.prompts[slot]
        parts = np.concatenate(tokens), np.concatenate(positions), np.concatenate(cache)
        return Rows(*parts, *self._spans(step, decodes))

    def _cache(self, slots: Ints | int, positions: Ints) -> Ints:
        """Where positions of a slot, or one of each of several, are in the cache."""
        block, offset = np.divmod(positions, self.block_size)
        found: Ints = self.blocks[slots, block] * self.block_size + offset
        return found

    def _spans(self, step: Step, decodes: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        chunks, num_decodes = step.chunks, len(decodes)
        slots = np.concatenate([decodes, np.array([c.slot for c in chunks], np.int32)])
        starts = np.arange(len(slots) + 1, dtype=np.int32)
        if chunks:
            sizes = np.array([chunk.num_tokens for chunk in chunks], np.int32)
            starts[num_decodes + 1 :] = num_decodes + np.cumsum(sizes)
        # Each slot samples from its last row, and continuations of a prompt from that of its slot.
        samples = [slot for chunk in chunks for slot in chunk.samples]
        sources = [starts[num_decodes + i + 1] - 1 for i, c in enumerate(chunks) for _ in c.samples]
        sampled = np.concatenate([decodes, np.array(samples, np.int32)])
        rows = np.concatenate([starts[:num_decodes], np.array(sources, np.int32)])
        return starts, slots, self.lengths[slots], sampled, rows

    def _change(self, step: Step) -> None:
        for slot in step.released:
            self.prompts.pop(slot, None)
        for start in step.started:
            self.blocks[start.slot, : len(start.blocks)] = start.blocks
            self.sizes[start.slot] = len(start.blocks)
            self.lengths[start.slot] = start.computed
            self.prompts[start.slot] = (start.computed, np.array(start.tokens, np.int32))
        for fork in step.forks:
            self.blocks[fork.slot] = self.blocks[fork.parent]
            self.sizes[fork.slot] = self.sizes[fork.parent]
        if step.appended:
            slots, blocks = np.array(step.appended, np.int32).T
            self.blocks[slots, self.sizes[slots]] = blocks
            self.sizes[slots] += 1
        for slot, position, _, target in step.copies:
            self.blocks[slot, position] = target
