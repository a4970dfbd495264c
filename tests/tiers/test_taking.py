"""What a take brings into the hot tier."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import mmkv
from tests.computed import (
    UNIFORM,
    assert_holds,
    assert_parked,
    make_slot,
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


def test_what_is_taken_from_the_path_becomes_hot(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    assert not any(hot_blocks(pool, "chat"))
    assert_parked(pool, "chat", ids)
    assert moves.read == 5 * BLOCK_BYTES
    eventually(lambda: is_hot(pool, "chat"))
    assert_parked(pool, "chat", ids)
    assert moves.read == 5 * BLOCK_BYTES
    assert pool.stats().bytes_promoted == 5 * BLOCK_BYTES
    with pool.match(ids) as match:
        assert match.tier == "hot"


def test_what_fails_at_one_layer_does_not_become_hot(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)

    def fail(piece: Any) -> None:
        if piece.layer == 2:
            raise OSError(5, "Input/output error")

    moves.fail_read = fail
    with pytest.raises(mmkv.TransferError, match="layer 2"):
        pool.take("chat", make_slot(UNIFORM, len(ids))).result(10)
    moves.fail_read = None
    check_pool(pool, [])
    assert not any(hot_blocks(pool, "chat"))
    assert_parked(pool, "chat", ids)


def test_two_takes_of_one_cold_conversation_read_the_path_once(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    slots = [make_slot(UNIFORM, len(ids)) for _ in range(3)]
    takes = [pool.take("chat", slot) for slot in slots]
    moves.hold.set()
    for take, slot in zip(takes, slots, strict=True):
        take.result(10)
        assert_holds(slot, ids)
    assert moves.read == 5 * BLOCK_BYTES


def test_a_take_of_a_prefix_brings_only_that(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 6)
    park(pool, "chat", ids)
    make_cold(pool)
    slot = make_slot(UNIFORM, len(ids), fill=7)
    pool.take("chat", slot, tokens=3 * BLOCK + 5, have=BLOCK + 3).result(10)
    assert_holds(slot, ids[: 3 * BLOCK + 5], have=BLOCK + 3, fill=7)
    eventually(lambda: hot_blocks(pool, "chat") == [False, True, True, True, False, False])
    assert moves.read == 3 * BLOCK_BYTES
    assert_parked(pool, "chat", ids)


def test_a_cancelled_take_leaves_nothing_under_way_when_the_pool_is_closed(base: Path, hot: Path, moves: Moves) -> None:
    ids = text(1, 5)
    pool = open_tiers(base, hot)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    take = pool.take("chat", make_slot(UNIFORM, len(ids)))
    eventually(lambda: moves.waiting == 1)
    take.cancel()
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "bytes are still on their way into the hot files"
    moves.hold.set()
    closing.join(10)
    assert not closing.is_alive()
    with open_tiers(base, hot) as again:
        assert_parked(again, "chat", ids)
        check_pool(again, [])
