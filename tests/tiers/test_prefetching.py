"""What is brought before it is taken, and who goes first."""

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


def test_a_prefetch_brings_a_conversation(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    park(pool, "other", text(2, 1))
    make_cold(pool)
    transfer = pool.prefetch("chat")
    assert list(transfer) == [0, 1, 2]
    receipt = transfer.result(10)
    assert (receipt.tokens, receipt.bytes) == (len(ids), 5 * BLOCK_BYTES)
    assert is_hot(pool, "chat")
    assert pool.conversations() == ["other", "chat"], "it counts as a use"
    moves.reset()
    assert_parked(pool, "chat", ids)
    assert pool.prefetch("chat").result(10).bytes == 0
    assert moves.read == 0
    with pytest.raises(mmkv.ConversationNotFound):
        pool.prefetch("nobody")


def test_a_use_by_prefetch_outlives_the_process(base: Path, hot: Path) -> None:
    with open_tiers(base, hot) as pool:
        for name in ("a", "b"):
            park(pool, name, text(ord(name), 1))
        pool.prefetch("a").result(10)
        assert pool.conversations() == ["b", "a"]
    with open_tiers(base, hot) as pool:
        assert pool.conversations() == ["b", "a"]


def test_a_prefetch_is_cancelled(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    transfer = pool.prefetch("chat")
    assert transfer.cancel()
    moves.hold.set()
    with pytest.raises(mmkv.TransferCancelled):
        transfer.result(10)
    check_pool(pool, [])
    assert not any(hot_blocks(pool, "chat"))
    assert pool.stats().leases == 0
    assert_parked(pool, "chat", ids)


def test_a_take_that_joined_a_prefetch_keeps_it_from_being_cancelled(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    transfer = pool.prefetch("chat")
    slot = make_slot(UNIFORM, len(ids))
    take = pool.take("chat", slot)
    transfer.cancel()
    moves.hold.set()
    take.result(10)
    assert_holds(slot, ids)
    assert moves.read == 5 * BLOCK_BYTES
    eventually(lambda: is_hot(pool, "chat"))


def test_a_take_after_a_prefetch_was_cancelled_reads_for_itself(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    transfer = pool.prefetch("chat")
    eventually(lambda: moves.waiting == 1)
    (fill,) = pool._hot._fills  # type: ignore[union-attr]
    transfer.cancel()
    # The lane that holds the piece sees it only afterwards; who asks now must not be drawn into it.
    assert fill._is_cancelled()
    slot = make_slot(UNIFORM, len(ids))
    take = pool.take("chat", slot)
    moves.hold.set()
    take.result(10)
    assert_holds(slot, ids)
    eventually(lambda: is_hot(pool, "chat"))


def test_places_that_change_while_a_take_looks_for_room_are_held_as_they_are(
    pool: mmkv.Pool, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = pool._hot
    assert hot is not None
    ids = text(1, 5)
    park(pool, "chat", ids)
    make_cold(pool)
    moves.hold.clear()
    prefetch = pool.prefetch("chat")
    eventually(lambda: moves.waiting == 1)
    real = hot._reserve_cold
    slots: list[Any] = []

    def reserve(*arguments: Any, **options: Any) -> Any:
        # The prefetch fails meanwhile, and another take begins to bring the same blocks to other places.
        monkeypatch.setattr(hot, "_reserve_cold", real)
        prefetch.cancel()
        moves.hold.set()
        with pytest.raises(mmkv.TransferCancelled):
            prefetch.result(10)
        eventually(lambda: not hot._fills)
        moves.hold.clear()
        slots.append(make_slot(UNIFORM, len(ids)))
        slots.append(pool.take("chat", slots[0]))
        return real(*arguments, **options)

    monkeypatch.setattr(hot, "_reserve_cold", reserve)
    slot = make_slot(UNIFORM, len(ids))
    take = pool.take("chat", slot)
    moves.hold.set()
    take.result(10)
    slots[1].result(10)
    assert_holds(slot, ids)
    assert_holds(slots[0], ids)
    check_pool(pool, [])


def test_a_prefetch_yields_to_takes(pool: mmkv.Pool, moves: Moves) -> None:
    early, late = text(1, 4), text(2, 4)
    park(pool, "early", early)
    park(pool, "late", late)
    make_cold(pool)
    moves.hold.clear()
    prefetch = pool.prefetch("early")
    eventually(lambda: moves.waiting == 1)
    slot = make_slot(UNIFORM, len(late))
    take = pool.take("late", slot)
    eventually(lambda: moves.waiting == 2)
    moves.hold.set()
    take.result(10)
    prefetch.result(10)
    assert_holds(slot, late)
    # The prefetch may finish its layer, but begins no other while the take reads.
    mine = pool._ledger.conversations["late"].version.extents[0].first * BLOCK * 16
    reads = [(piece.layer, piece.file_offset >= mine) for piece in moves.pieces]
    last_of_take = max(index for index, (_, of_take) in enumerate(reads) if of_take)
    assert all(of_take or layer == 0 for layer, of_take in reads[:last_of_take])
    assert is_hot(pool, "early")


def test_a_prefetch_does_not_wait_for_who_grows_the_tier(pool: mmkv.Pool) -> None:
    ids = text(1, 4)
    park(pool, "chat", ids)
    make_cold(pool)
    hot = pool._hot
    assert hot is not None
    done = threading.Event()

    def grow() -> None:
        with hot.space._growing:
            started.set()
            # As growth does: its own lock first, the pool's for the bookkeeping.
            proceed.wait(10)
            with pool._lock:
                done.set()

    started, proceed = threading.Event(), threading.Event()
    growing = threading.Thread(target=grow)
    growing.start()
    started.wait(10)
    prefetching = threading.Thread(target=lambda: pool.prefetch("chat").result(10))
    prefetching.start()
    prefetching.join(0.1)
    proceed.set()
    assert done.wait(5), "whoever waits for growth holds the pool's lock"
    growing.join(10)
    prefetching.join(10)
    assert is_hot(pool, "chat")


def test_rewarming_is_by_recency_and_evicts_nothing(base: Path, hot: Path) -> None:
    with open_tiers(base, hot) as pool:
        for index in range(6):
            park(pool, f"{index}", text(index, 4))
        make_cold(pool)
        assert_parked(pool, "0", text(0, 4))
        make_cold(pool)
    with open_tiers(base, hot, rewarm=True) as pool:
        eventually(lambda: pool._rewarming is not None and not pool._rewarming.is_alive())
        assert [name for name in "012345" if is_hot(pool, name)] == ["0", "3", "4", "5"]
        assert pool.stats().hot_evictions == 0
        assert pool.conversations() == ["1", "2", "3", "4", "5", "0"], "no use"
        check_pool(pool, [])
