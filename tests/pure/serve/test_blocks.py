"""The block pool alone."""

from __future__ import annotations

from triptych.serve.core.blocks import BlockPool, extend_hashes


def hashes_of(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, salt)
    return hashes


def test_a_hash_covers_all_tokens_before_it_and_only_full_blocks() -> None:
    one, two = hashes_of([1] * 11), hashes_of([2, *[1] * 10])
    assert len(one) == 2 and not set(one) & set(two)
    assert hashes_of([1] * 8) == one
    assert one[0] != one[1] and not set(one) & set(hashes_of([1] * 11, b"salt"))


def test_hashes_are_extended_as_if_made_at_once() -> None:
    tokens = list(range(25))
    hashes = hashes_of(tokens[:9])
    extend_hashes(hashes, tokens, 4)
    assert hashes == hashes_of(tokens) and len(hashes) == 6


def test_the_block_released_longest_ago_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    names = hashes_of(list(range(16)))
    table = pool.allocate(4)
    for block, name in zip(table, names, strict=True):
        pool.name(block, name)
    pool.release(table[:2])
    pool.release(table[2:])
    assert pool.find(names) == table
    assert pool.allocate(1) + pool.allocate(3) == [table[1], table[0], table[3], table[2]]
    assert pool.find(names) == []


def test_a_shared_block_is_free_after_its_last_release_only() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_a_cached_block_that_is_hit_is_free_no_longer() -> None:
    pool, (name, *_) = BlockPool(2), hashes_of([5] * 4)
    (block,) = pool.allocate(1)
    pool.name(block, name)
    pool.release([block])
    assert (pool.num_free, pool.find([name])) == (2, [block])
    pool.share(block)
    assert pool.num_free == 1 and pool.allocate(1) != [block]


def test_the_first_block_of_a_content_keeps_its_name() -> None:
    pool, (name, *_) = BlockPool(2), hashes_of([5] * 4)
    first, second = pool.allocate(2)
    pool.name(first, name)
    pool.name(second, name)
    assert pool.find([name]) == [first]
    pool.release([second])
    assert pool.blank == [second]
