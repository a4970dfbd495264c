"""A pool with a hot tier in RAM before its path, requirement by requirement."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.medium import medium_of
from tests.computed import (
    HYBRID,
    UNIFORM,
    Ids,
    assert_holds,
    assert_parked,
    compute,
    ids_of,
    make_slot,
    park,
)
from tests.crashed import crash, idle_writers
from tests.mirror import check_pool
from tests.tiered import BLOCK, BLOCK_BYTES, CAPACITY, Moves, eventually, hot_blocks, is_hot, open_tiers

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


@pytest.fixture
def pool(base: Path, hot: Path, moves: Moves) -> Iterator[mmkv.Pool]:
    with open_tiers(base, hot) as pool:
        yield pool
        moves.hold.set()
        check_pool(pool, [])


def text(seed: int, blocks: float) -> Ids:
    return ids_of((seed, int(blocks * BLOCK)))


def make_cold(pool: mmkv.Pool) -> None:
    """Bring everything to the path and let it go from the hot tier."""
    assert pool._hot is not None
    pool.flush()
    while pool._hot.give_back_one(even_pinned=True):
        pass
    assert pool._hot.space.allocated_bytes == 0


# Parking


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


# Taking


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


# Prefetching


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


# Who stays


def test_the_least_recently_used_goes_first_and_what_is_pinned_stays(pool: mmkv.Pool) -> None:
    for index in range(4):
        park(pool, f"{index}", text(index, 4))
    pool.flush()
    pool.pin("0")
    assert_parked(pool, "1", text(1, 4))
    park(pool, "4", text(4, 4))
    assert [is_hot(pool, name) for name in "01234"] == [True, True, False, True, True]
    park(pool, "5", text(5, 2))
    assert hot_blocks(pool, "3") == [True, True, False, False]
    for index in range(4):
        assert_parked(pool, f"{index}", text(index, 4))


def test_a_giant_does_not_flush_everything(pool: mmkv.Pool) -> None:
    for index in range(4):
        park(pool, f"{index}", text(index, 4))
    pool.flush()
    giant = text(9, 40)
    park(pool, "giant", giant)
    assert hot_blocks(pool, "giant").count(True) == 8
    assert [is_hot(pool, name) for name in "0123"] == [False, False, True, True]
    pool.flush()
    assert_parked(pool, "giant", giant)
    eventually(lambda: not pool._hot._fills)  # type: ignore[union-attr]
    assert hot_blocks(pool, "giant").count(True) == 8
    assert_parked(pool, "3", text(3, 4))


def test_nested_prefixes_and_forks_do_not_evict_each_other(pool: mmkv.Pool) -> None:
    ids = text(1, 8)
    park(pool, "whole", ids)
    pool.fork("whole", "fork")
    park(pool, "prefix", ids[: 4 * BLOCK])
    branch = np.concatenate([ids[: 6 * BLOCK], text(2, 2)])
    park(pool, "branch", branch)
    pool.flush()
    assert pool._hot is not None
    assert pool._hot.space.blocks.used == 10
    park(pool, "other", text(3, 8))
    # Room for two blocks was made; what the newest use shares stays.
    assert is_hot(pool, "prefix")
    assert is_hot(pool, "branch")
    for name, parked in (("whole", ids), ("fork", ids), ("prefix", ids[: 4 * BLOCK]), ("branch", branch)):
        assert_parked(pool, name, parked)


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
def test_what_is_larger_than_the_hot_tier_is_parked_and_taken(
    base: Path, hot: Path, layout: mmkv.Layout, moves: Moves
) -> None:
    with open_tiers(base, hot, layout, hot_capacity=200_000) as pool:
        ids = ids_of((1, 50 * BLOCK + 77))
        for length in (20 * BLOCK + 3, 30 * BLOCK, len(ids)):
            receipt = park(pool, "chat", ids[:length])
            assert_parked(pool, "chat", ids[:length])
            assert receipt.tokens == length
            check_pool(pool, [])
        pool.flush()
        assert_parked(pool, "chat", ids)
        pool.prefetch("chat").result(10)
        assert_parked(pool, "chat", ids)
        check_pool(pool, [])


# Rows that are appended in place


@pytest.mark.parametrize("synced", [False, True])
def test_appending_moves_the_new_rows_only(pool: mmkv.Pool, synced: bool) -> None:
    ids = text(1, 3)
    park(pool, "chat", ids[:700])
    if synced:
        pool.flush()
    assert park(pool, "chat", ids[:800]).tokens_written == 100
    assert pool._hot is not None
    assert pool._hot.space.blocks.used == 2
    assert_parked(pool, "chat", ids[:800])
    # Behind what it falls back to, the block is written anew once.
    assert park(pool, "chat", ids).tokens_written == len(ids) - (BLOCK if synced else 800)
    assert_parked(pool, "chat", ids)
    make_cold(pool)
    assert_parked(pool, "chat", ids)


def test_appending_while_a_match_holds_the_former_version(pool: mmkv.Pool) -> None:
    ids = text(1, 3)
    park(pool, "chat", ids[:700])
    with pool.match(ids) as match:
        assert match.tokens == 700
        park(pool, "chat", ids[:900])
        park(pool, "chat", np.concatenate([ids[:700], text(2, 1)]))
        slot = make_slot(UNIFORM, 700)
        pool.take(match, slot).result(10)
        assert_holds(slot, ids[:700])
    assert_parked(pool, "chat", np.concatenate([ids[:700], text(2, 1)]))


def test_appending_while_the_former_version_is_being_written(pool: mmkv.Pool, moves: Moves) -> None:
    ids = text(1, 3)
    park(pool, "chat", ids[:700])
    moves.hold_writes = True
    moves.hold.clear()
    flushing = threading.Thread(target=pool.flush)
    flushing.start()
    eventually(lambda: moves.waiting > 0)
    park(pool, "chat", ids[:900])
    park(pool, "chat", ids[:1000])
    moves.hold.set()
    flushing.join(10)
    assert_parked(pool, "chat", ids[:1000])
    make_cold(pool)
    assert_parked(pool, "chat", ids[:1000])


def test_appending_behind_a_fallback_leaves_it_whole(base: Path, hot: Path) -> None:
    ids = text(1, 3)
    pool = open_tiers(base, hot)
    park(pool, "chat", ids[:700])
    pool.flush()
    park(pool, "chat", ids[:900])
    park(pool, "chat", ids[:1000])
    crash(pool)
    shutil.rmtree(hot)
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "chat", ids[:700])


def test_what_a_fork_and_its_growing_origin_share_can_go_from_the_hot_tier(pool: mmkv.Pool) -> None:
    ids = text(1, 3)
    park(pool, "chat", ids[:700])
    pool.fork("chat", "fork")
    park(pool, "chat", ids[:900])
    make_cold(pool)
    assert_parked(pool, "fork", ids[:700])
    assert_parked(pool, "chat", ids[:900])


# The directory


def another_boot(monkeypatch: pytest.MonkeyPatch, boot: str = "another boot") -> None:
    for module in ("mmkv.opening", "mmkv.pool", "mmkv.warming"):
        monkeypatch.setattr(f"{module}.boot_id", lambda: boot)


KEPT, DIRTY, GROWN = text(1, 3), text(2, 3), text(1, 4.5)


def leave(pool: mmkv.Pool) -> None:
    """Something that was flushed and has grown since, and something that never was."""
    park(pool, "kept", KEPT)
    pool.flush()
    park(pool, "kept", GROWN)
    park(pool, "dirty", DIRTY)


def assert_as_left(pool: mmkv.Pool) -> None:
    assert_parked(pool, "kept", GROWN)
    assert_parked(pool, "dirty", DIRTY)
    check_pool(pool, [])


def assert_fallen_back(pool: mmkv.Pool) -> None:
    assert pool.conversations() == ["kept"]
    assert_parked(pool, "kept", KEPT)
    check_pool(pool, [])
    leave(pool)
    assert_as_left(pool)


def test_a_hot_directory_of_this_boot_is_taken_up_again(base: Path, hot: Path, moves: Moves) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    moves.reset()
    # Not even its place needs to be said.
    with idle_writers(), mmkv.Pool.open(base, min_free_ram=0) as pool:
        assert_as_left(pool)
        assert moves.read == 0


def test_after_another_boot_only_what_was_flushed_is_served(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    another_boot(monkeypatch)
    with open_tiers(base, hot) as pool:
        assert_fallen_back(pool)


def test_after_another_boot_what_was_closed_is_all_there(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tiers(base, hot) as pool:
        leave(pool)
    another_boot(monkeypatch)
    shutil.rmtree(hot)
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)


def gone(hot: Path) -> None:
    shutil.rmtree(hot)


def emptied(hot: Path) -> None:
    shutil.rmtree(hot / "layers")


def truncated(hot: Path) -> None:
    os.truncate(hot / "layers" / "0001.kv", 4096)


def unclaimed(hot: Path) -> None:
    (hot / "hot.json").unlink()


def garbled(hot: Path) -> None:
    (hot / "hot.json").write_text('{"uuid": ')


def copied(hot: Path) -> None:
    # As a backup of the hot directory would come back: the same bytes in other files.
    shutil.copytree(hot, hot.with_name("copy"))
    shutil.rmtree(hot)
    hot.with_name("copy").rename(hot)


@pytest.mark.parametrize("harm", [gone, emptied, truncated, unclaimed, garbled, copied])
def test_a_hot_directory_that_is_not_what_it_was_is_made_anew(
    base: Path, hot: Path, harm: Callable[[Path], None]
) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    harm(hot)
    with open_tiers(base, hot) as pool:
        assert_fallen_back(pool)


def test_a_hot_directory_that_is_gone_does_not_keep_the_pool_from_being_opened(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    shutil.rmtree(hot)
    with mmkv.Pool.open(base) as pool:
        assert len(pool.stats().tiers) == 1
        assert_parked(pool, "kept", KEPT)
        assert pool.conversations() == ["kept"]


def test_an_older_generation_of_the_hot_directory_is_not_trusted(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    older = (hot / "hot.json").read_text()
    with open_tiers(base, hot) as pool:
        park(pool, "kept", text(3, 2))
    (hot / "hot.json").write_text(older)
    with open_tiers(base, hot) as pool:
        assert not any(hot_blocks(pool, "kept"))
        assert_parked(pool, "kept", text(3, 2))
        assert_parked(pool, "dirty", DIRTY)


def test_a_copy_of_a_pool_and_its_hot_directory_made_while_it_is_open(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    other_base, other_hot = base.with_name("copy"), hot.with_name("copy")
    shutil.copytree(base, other_base)
    shutil.copytree(hot, other_hot)
    # The original goes on: the same hot numbers hold other bytes from here on.
    pool.drop("dirty")
    park(pool, "new", text(5, 3))
    with open_tiers(other_base, other_hot) as copy:
        assert_fallen_back(copy)
    crash(pool)
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", GROWN)
        assert_parked(pool, "new", text(5, 3))
        assert "dirty" not in pool
    with open_tiers(other_base, other_hot) as copy:
        assert_as_left(copy)


def test_a_copy_of_a_pool_does_not_take_up_the_hot_directory_of_the_original(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    other = base.with_name("copy")
    shutil.copytree(base, other)
    pool.drop("dirty")
    park(pool, "new", text(5, 3))
    crash(pool)
    with mmkv.Pool.open(other) as copy:
        assert copy.conversations() == ["kept"]
        assert_parked(copy, "kept", KEPT)
    with pytest.raises(ValueError, match="is the hot tier of another pool"):
        open_tiers(other, hot)
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", GROWN)
        assert_parked(pool, "new", text(5, 3))


def test_a_hot_directory_belongs_to_one_pool_at_a_time(tmp_path: Path, base: Path, hot: Path) -> None:
    other = tmp_path / "other"
    pool = open_tiers(base, hot)
    leave(pool)
    with pytest.raises(mmkv.PoolLocked):
        open_tiers(other, hot)
    crash(pool)
    with pytest.raises(ValueError, match="is the hot tier of another pool"):
        open_tiers(other, hot)
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)
    with open_tiers(other, hot) as second:
        park(second, "its own", text(7, 2))
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)
    with open_tiers(other, hot) as second:
        assert_parked(second, "its own", text(7, 2))


def test_another_hot_directory_and_capacity(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    moved = hot.with_name("moved")
    with open_tiers(base, moved) as pool:
        assert_as_left(pool)
        assert pool.stats().tiers[0].directory == str(moved)
    assert not list((hot / "layers").iterdir()), "the RAM of the former one is given back"


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_smaller_hot_capacity_is_kept_to_at_once(base: Path, hot: Path, close: bool, pinned: bool) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    park(pool, "large", text(4, 8))
    if pinned:
        pool.pin("large")
    if close:
        pool.close()
    else:
        crash(pool)
    for blocks in (12, 3, 16):
        with open_tiers(base, hot, hot_capacity=blocks * BLOCK_BYTES) as pool:
            tier = pool.stats().tiers[0]
            assert tier.capacity == blocks * BLOCK_BYTES
            assert tier.allocated <= tier.capacity
            assert sum(file.stat().st_blocks for file in (hot / "layers").iterdir()) * 512 <= tier.capacity
            assert_as_left(pool)
            assert_parked(pool, "large", text(4, 8))


def test_a_hot_tier_is_given_up(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    with mmkv.Pool.open(base, hot=False) as pool:
        assert len(pool.stats().tiers) == 1
        assert_as_left(pool)
    assert not list((hot / "layers").iterdir()), "its RAM is given back"
    with mmkv.Pool.open(base) as pool:
        assert len(pool.stats().tiers) == 1
        assert_as_left(pool)


@pytest.mark.skipif(medium_of("/var/tmp").in_ram, reason="/var/tmp is in RAM")
def test_a_hot_directory_on_a_disk_is_refused(base: Path, tmp_path: Path) -> None:
    if medium_of(tmp_path).in_ram:
        pytest.skip("no disk")
    with pytest.raises(ValueError, match="not in RAM"):
        open_tiers(base, tmp_path / "hot")
    assert not (tmp_path / "hot").exists()
    with mmkv.Pool.open(base, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", KEPT)


def test_hot_directories_that_are_something_else_are_refused(ram_path: Path, base: Path, hot: Path) -> None:
    hot.mkdir(mode=0o700)
    (hot / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        open_tiers(base, hot)
    (hot / "thesis.txt").unlink()
    hot.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        open_tiers(base, hot)
    with pytest.raises(ValueError, match="the directory of the pool itself"):
        open_tiers(ram_path / "pool", ram_path / "pool")
    with pytest.raises(ValueError, match="needs a limit"):
        open_tiers(base, ram_path / "fresh", hot_capacity=None)
    with pytest.raises(ValueError, match="there is no hot tier"):
        mmkv.Pool.open(base, UNIFORM, capacity=CAPACITY, hot_capacity="1MiB")
    assert not base.exists()


def test_a_hot_file_system_that_is_full_to_the_last_page_can_be_closed_and_opened(base: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        hot = mounted / "hot"
        pool = open_tiers(base, hot, hot_capacity="4MiB")
        park(pool, "large", text(1, 40))
        assert_parked(pool, "large", text(1, 40))
        assert pool._hot is not None
        assert 0 < pool._hot.space.allocated_bytes < 512 << 10
        with (mounted / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        pool.close()
        with open_tiers(base, hot, hot_capacity="4MiB") as pool:
            assert_parked(pool, "large", text(1, 40))
            park(pool, "next", text(2, 5))
            assert_parked(pool, "next", text(2, 5))
            check_pool(pool, [])
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


# Quotas


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
def test_neither_tier_takes_more_than_its_capacity_over_restarts(base: Path, hot: Path, layout: mmkv.Layout) -> None:
    for restart in range(4):
        pool = open_tiers(base, hot, layout, capacity=1 << 20, hot_capacity=300_000)
        for index in range(6):
            park(pool, f"{restart} {index}", text(10 * restart + index, 5.3))
            hot_tier, path_tier = pool.stats().tiers
            assert hot_tier.allocated <= 300_000
            assert path_tier.allocated <= 1 << 20
        files = [*(base / "layers").iterdir(), base / "tokens.kv"]
        assert sum(file.stat().st_blocks for file in files) * 512 <= (1 << 20) + 4096 * len(files)
        assert sum(file.stat().st_blocks for file in (hot / "layers").iterdir()) * 512 <= 300_000
        check_pool(pool, [])
        if restart % 2:
            pool.close()
        else:
            crash(pool)


def test_short_ram_stops_growth_and_gives_segments_back(
    pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, moves: Moves
) -> None:
    park(pool, "old", text(1, 6))
    pool.flush()
    free = 100 << 20
    for module in ("mmkv.hot", "mmkv.space"):
        monkeypatch.setattr(f"{module}.available_ram", lambda: free)
    hot = pool._hot
    assert hot is not None
    before = hot.space.allocated_bytes
    hot.space.min_free_ram = 100 << 20
    park(pool, "new", text(2, 6))
    assert hot.space.allocated_bytes <= before
    assert_parked(pool, "new", text(2, 6))
    # What the path lacks stays, however short RAM is.
    free = 0
    for _ in range(30):
        pool._relieve_ram()
    assert hot.space.blocks.used == hot_blocks(pool, "new").count(True)
    pool.flush()
    for _ in range(30):
        pool._relieve_ram()
    assert hot.space.allocated_bytes == 0
    for seed, name in ((1, "old"), (2, "new")):
        assert_parked(pool, name, text(seed, 6))
    free = 1 << 40
    assert_parked(pool, "old", text(1, 6))
    eventually(lambda: is_hot(pool, "old"))


# Swaps, pages, readers, children


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
@pytest.mark.parametrize("cold", [False, True])
def test_a_swap(base: Path, hot: Path, layout: mmkv.Layout, cold: bool) -> None:
    with open_tiers(base, hot, layout, hot_capacity=250_000) as pool:
        leaving, arriving = text(1, 4.2), text(2, 5.1)
        park(pool, "b", arriving)
        if cold:
            make_cold(pool)
        slot = make_slot(layout, len(arriving))
        compute(slot, leaving)
        for transfer in pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b"):
            transfer.result(10)
        assert_holds(slot, arriving)
        assert_parked(pool, "a", leaving)
        check_pool(pool, [])


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_swap_whose_park_fails_puts_the_slot_back(
    base: Path, hot: Path, cold: bool, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hot tier holds half of what leaves, so that its rows lie in both.
    pool = open_tiers(base, hot, hot_capacity=6 * BLOCK_BYTES)
    leaving, arriving = text(1, 10.5), text(2, 9)
    park(pool, "a", leaving[: 4 * BLOCK + 9])
    park(pool, "b", arriving)
    if cold:
        make_cold(pool)
    slot = make_slot(UNIFORM, len(leaving))
    compute(slot, leaving)
    moves = Moves(base, monkeypatch)

    def fail(piece: Any) -> None:
        if piece.layer == layer:
            raise OSError(5, "Input/output error")

    moves.fail_write = fail
    parking, take = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    with pytest.raises(mmkv.TransferError, match=f"layer {layer}"):
        parking.result(10)
    with pytest.raises(mmkv.TransferError, match=rf"nothing could be taken|layer {layer}"):
        take.result(10)
    moves.fail_write = None
    assert_holds(slot, leaving)
    check_pool(pool, [])
    assert_parked(pool, "a", leaving[: 4 * BLOCK + 9])
    assert_parked(pool, "b", arriving)
    pool.close()


@pytest.mark.parametrize("opaque", [False, True])
def test_paged_slots(base: Path, hot: Path, opaque: bool) -> None:
    page = 16
    layout = mmkv.Layout(
        [mmkv.Layer({"k": mmkv.Plane("uint8", (8,))})] * 2,
        model="paged",
        **({"opaque_page_tokens": page} if opaque else {}),
    )
    rng = np.random.default_rng(1)
    tokens, pages = 900, 80
    arrays = [{"k": rng.integers(0, 256, (pages, page, 8), dtype=np.uint8)} for _ in range(2)]
    table = rng.permutation(pages)[: -(-tokens // page)]
    with open_tiers(base, hot, layout, hot_capacity=60_000) as pool:
        ids = ids_of((1, tokens))
        for length in (300, 611, tokens):
            slot = mmkv.PagedSlot(layout, arrays, table, page, opaque=opaque)
            pool.park("chat", slot, ids[:length]).result(10)
            for cold in (False, True):
                if cold:
                    make_cold(pool)
                target = [{"k": np.zeros((pages, page, 8), dtype=np.uint8)} for _ in range(2)]
                other = rng.permutation(pages)[: len(table)]
                pool.take("chat", mmkv.PagedSlot(layout, target, other, page, opaque=opaque)).result(10)
                for mine, theirs in zip(arrays, target, strict=True):
                    expected = mine["k"][table].reshape(-1, 8)[:length]
                    assert (theirs["k"][other].reshape(-1, 8)[:length] == expected).all()
            check_pool(pool, [])


def test_a_reader_beside_the_owner(pool: mmkv.Pool, base: Path) -> None:
    park(pool, "chat", KEPT)
    with mmkv.Pool.open(base, readonly=True) as reader:
        assert reader.conversations() == ["chat"]
        assert (reader.info("chat").hot_bytes, reader.info("chat").dirty_bytes) == (3 * BLOCK_BYTES, 3 * BLOCK_BYTES)
        with reader.match(GROWN) as match:
            assert match.tokens == len(KEPT)
        pool.flush()
        assert reader.info("chat").dirty_bytes == 0
        park(pool, "chat", GROWN)
        with reader.match(GROWN) as match:
            assert match.tokens == len(GROWN)


FORKED = """
import gc, os, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import mmkv
from pathlib import Path
from tests.computed import *
from tests.tiered import open_tiers
pool = open_tiers(Path(sys.argv[1]), Path(sys.argv[2]), hot_capacity="64MiB")
park(pool, "chat", ids_of((1, 1500)))
places = sorted((buffer.address, buffer.bytes) for buffer in pool._hot.between._maps.values())
child = os.fork()
if child == 0:
    try:
        pool.take("chat", make_slot(UNIFORM, 1500))
    except mmkv.PoolClosed:
        pass
    # What the child maps now may lie where the hot files are in the parent.
    arrays = [np.ones(size // 4, dtype=np.uint8) for _, size in places for _ in range(4)]
    pool.__dict__.clear()
    del pool
    gc.collect()
    total = sum(int(array.sum()) for array in arrays)
    print("child", total == sum(len(array) for array in arrays), flush=True)
    os._exit(0)
print("status", os.waitpid(child, 0)[1], flush=True)
park(pool, "chat", ids_of((1, 2500)))
pool.flush()
assert_parked(pool, "chat", ids_of((1, 2500)))
pool.close()
with open_tiers(Path(sys.argv[1]), Path(sys.argv[2])) as pool:
    assert_parked(pool, "chat", ids_of((1, 2500)))
print("fine", flush=True)
"""


def test_a_forked_child_has_no_pool_and_does_its_parent_no_harm(base: Path, hot: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, base, hot],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["child True", "status 0", "fine"], done.stderr


def test_threads_and_descriptors_are_given_back(base: Path, hot: Path, no_threads_left: None) -> None:
    def descriptors() -> set[str]:
        gc.collect()
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {name for name in found if name.startswith((str(base), str(hot)))}

    for _ in range(3):
        with open_tiers(base, hot, writes=True) as pool:
            leave(pool)
            assert_as_left(pool)
        assert not descriptors()
    with Path("/proc/self/maps").open() as maps:
        assert str(hot) not in maps.read()


def test_a_hot_directory_in_use_is_named_with_its_owner(base: Path, hot: Path) -> None:
    error = f"the hot directory at {hot} is owned by process {os.getpid()}: close the pool that uses it there, or give"
    with open_tiers(base, hot) as pool:
        with pytest.raises(mmkv.PoolLocked, match=error) as caught:
            open_tiers(base.with_name("other"), hot)
        assert caught.value.pid == os.getpid()
        assert not base.with_name("other").exists(), "what is refused leaves nothing"
        park(pool, "chat", text(1, 1.5))
        assert_parked(pool, "chat", text(1, 1.5))


def test_a_hot_directory_of_somebody_elses_is_left_alone(base: Path, hot: Path) -> None:
    hot.mkdir(mode=0o700)
    (hot / "thesis.txt").write_text("dear reader")
    base.mkdir(mode=0o700)
    with pytest.raises(ValueError, match=r"holds 'thesis\.txt', which is not of a hot tier"):
        open_tiers(base, hot)
    assert [path.name for path in hot.iterdir()] == ["thesis.txt"]
    assert list(base.iterdir()) == []
    # What was there before stays.
    open_tiers(base, hot.with_name("own")).close()
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        open_tiers(base, hot)
    mmkv.Pool.open(base).close()


def test_a_new_hot_directory_that_becomes_none_goes_again(base: Path, hot: Path) -> None:
    with pytest.raises(ValueError, match="a capacity of 5 bytes is too small"):
        open_tiers(base, hot, hot_capacity=5)
    assert not base.exists()
    assert not hot.exists()
