"""What a park writes where, and what the writer brings to the path."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmkv
from tests.computed import (
    assert_parked,
    park,
)
from tests.mirror import check_pool
from tests.tiered import (
    BLOCK,
    BLOCK_BYTES,
    Moves,
    eventually,
    hot_blocks,
    is_hot,
    make_cold,
    open_tiers,
    text,
)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


def test_a_park_lands_hot_and_only_what_is_new_is_written_to_the_path(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 9)
    park(pool, "chat", ids[: 6 * BLOCK])
    assert moves.written == 0
    assert is_hot(pool, "chat")
    hot_tier, path_tier = pool.stats().tiers
    assert (hot_tier.name, hot_tier.dirty, path_tier.dirty) == ("hot", 6 * BLOCK_BYTES, 0)
    assert pool.info("chat").dirty_bytes == 6 * BLOCK_BYTES
    pool.flush()
    assert moves.written == 6 * BLOCK_BYTES == pool.stats().bytes_spilled
    assert pool.info("chat").synced
    park(pool, "chat", ids)
    pool.flush()
    assert moves.written == 9 * BLOCK_BYTES
    pool.flush()
    assert moves.written == 9 * BLOCK_BYTES
    assert pool.stats().tiers[0].dirty == 0
    assert moves.read == 0
    assert_parked(pool, "chat", ids)
    assert moves.read == 0, "it is hot"


def test_the_writer_brings_it_to_the_path_by_itself(base: Path, hot: Path) -> None:
    with open_tiers(base, hot, writes=True) as pool:
        park(pool, "chat", text(1, 4))
        eventually(lambda: pool.stats().tiers[0].dirty == 0)
        eventually(lambda: pool.info("chat").synced)
        assert is_hot(pool, "chat")
        check_pool(pool, [])


def test_what_is_durable_is_at_the_path_when_it_returns(pool: mmkv.Pool, base: Path, hot: Path, moves: Moves) -> None:
    park(pool, "chat", text(1, 3))
    grown = text(1, 5.5)
    park(pool, "chat", grown, durable=True)
    assert pool.info("chat").synced
    assert moves.written == 6 * BLOCK_BYTES
    assert pool.stats().tiers[0].dirty == 0
    make_cold(pool)
    assert_parked(pool, "chat", grown)


def test_what_the_path_lacks_is_not_evicted(pool: mmkv.Pool, moves: Moves) -> None:
    first, second = text(1, 12), text(2, 12)
    park(pool, "first", first)
    park(pool, "second", second)
    assert is_hot(pool, "first")
    assert hot_blocks(pool, "second") == [True] * 4 + [False] * 8
    assert moves.written == 8 * BLOCK_BYTES, "what finds no place goes to the path"
    assert pool.stats().hot_evictions == 0
    for name, ids in (("first", first), ("second", second)):
        assert_parked(pool, name, ids)


def test_eviction_from_the_hot_tier_moves_no_byte(pool: mmkv.Pool, moves: Moves) -> None:
    park(pool, "old", text(1, 8))
    park(pool, "new", text(2, 8))
    pool.flush()
    moves.reset()
    park(pool, "next", text(3, 6))
    assert (moves.read, moves.written) == (0, 0)
    assert pool.stats().hot_evictions == 6
    assert is_hot(pool, "new")
    assert is_hot(pool, "next")
    assert hot_blocks(pool, "old") == [True] * 2 + [False] * 6, "the end goes first"
    for seed, name, blocks in ((1, "old", 8), (2, "new", 8), (3, "next", 6)):
        assert_parked(pool, name, text(seed, blocks))
