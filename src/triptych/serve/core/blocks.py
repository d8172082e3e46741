"""Paged key-value blocks: reference counts, reuse of equal prefixes, eviction of the oldest.

Every block is in exactly one place:

    held      some block tables contain it: its count is their number
    blank     free, content worthless
    cached    free, content known by its hash; taken again on a hit, evicted when blanks run out
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

from triptych.serve.core.budget import Allowance


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: bytes = b""
) -> None:
    """Appends the hashes of the full blocks of `tokens` that `hashes` does not have yet.

    A block's hash covers its tokens and all tokens before it. 128 bits of BLAKE2b: nobody finds a
    prompt that collides with another one's.
    """
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else blake2b(salt, digest_size=16).digest()
        content = array("q", tokens[start : start + block_size]).tobytes()
        hashes.append(blake2b(content, digest_size=16, key=parent).digest())


class BlockPool:
    """The blocks 0 .. num_blocks - 1 of one key-value cache.

    With an `allowance` no more of them are held than it says, whatever else is free.
    """

    def __init__(self, num_blocks: int, allowance: Allowance | None = None) -> None:
        self.allowance = allowance
        self.counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}
        self.blank = list(range(num_blocks - 1, -1, -1))
        self.cached: dict[int, None] = {}  # free blocks with content, released longest ago first

    @property
    def num_free(self) -> int:
        """Blocks that may be taken now."""
        free = len(self.blank) + len(self.cached)
        return free if self.allowance is None else min(free, self.allowance.num_free)

    @property
    def num_returns(self) -> int:
        """Times that a model beside this one gave something back."""
        return 0 if self.allowance is None else self.allowance.num_returns

    def allocate(self, count: int) -> list[int]:
        """Free blocks for new content, held once each. There must be so many.

        Blank ones first, then the cached ones that were released longest ago.
        """
        blank, cached = self.blank, self.cached
        rest = max(0, len(blank) - count)
        found = blank[rest:][::-1]
        del blank[rest:]
        for block in list(islice(cached, count - len(found))):
            del cached[block]
            self._forget(block)
            found.append(block)
        for block in found:
            self.counts[block] = 1
        if self.allowance is not None:
            self.allowance.take(count)
        return found

    def share(self, block: int) -> None:
        """Holds a block once more; a cached one is free no longer."""
        if self.counts[block] == 0:
            del self.cached[block]
            if self.allowance is not None:
                self.allowance.take(1)
        self.counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one hold of each block of a table; its last blocks are the first to evict."""
        counts, num_free = self.counts, 0
        for block in reversed(blocks):
            counts[block] -= 1
            if counts[block] == 0:
                num_free += 1
                if self.hashes[block] is None:
                    self.blank.append(block)
                else:
                    self.cached[block] = None
        if self.allowance is not None and num_free:
            self.allowance.give(num_free)

    def name(self, block: int, content: bytes) -> None:
        """Makes a full block findable. The first block of some content keeps the name."""
        if self.hashes[block] is None and content not in self.by_hash:
            self.hashes[block] = content
            self.by_hash[content] = block

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. Nothing is held yet."""
        found = []
        for content in hashes:
            block = self.by_hash.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def _forget(self, block: int) -> None:
        content = self.hashes[block]
        if content is not None:
            del self.by_hash[content]
            self.hashes[block] = None
