"""Who makes room, and what a capacity means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mmkv
from tests.computed import HYBRID, assert_parked, ids_of, park
from tests.cramped import blocks_of, small_pool
from tests.mirror import check_pool

BLOCK = 512


def test_the_least_recently_used_make_room_and_no_more_than_needed(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        texts = {name: ids_of((seed, 1024)) for seed, name in enumerate("abcd")}
        for name, ids in texts.items():
            park(pool, name, ids)
        assert_parked(pool, "a", texts["a"])
        park(pool, "e", ids_of((9, 1000)))
        assert pool.conversations() == ["c", "d", "a", "e"]
        assert pool.stats().evictions == 1
        park(pool, "f", ids_of((10, 1537)))
        assert pool.conversations() == ["a", "e", "f"], "four blocks more than free took two"
        check_pool(pool, [])
        assert_parked(pool, "a", texts["a"])


def test_what_others_hold_as_well_does_not_count_for_making_room(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        shared = ids_of((1, 2048))
        park(pool, "old", shared)
        park(pool, "alone", ids_of((3, 1536)))
        park(pool, "fork", np.concatenate([shared, ids_of((2, 512))]))
        park(pool, "new", ids_of((4, 1536)))
        assert pool.conversations() == ["old", "fork", "new"], "without the oldest one no block more is free"
        assert_parked(pool, "old", shared)


def test_pinned_leased_and_parking_conversations_stay(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        texts = {name: ids_of((seed, 1024)) for seed, name in enumerate("abcd")}
        for name, ids in texts.items():
            park(pool, name, ids)
        pool.pin("a")
        with pool.match(texts["b"]):
            park(pool, "e", ids_of((9, 1024)))
            assert pool.conversations() == ["a", "b", "d", "e"]
            with pytest.raises(mmkv.PoolFull, match="no room for 'f': it needs"):
                park(pool, "f", ids_of((10, 2049)))
            assert pool.conversations() == ["a", "b", "d", "e"], "a full pool drops nothing in vain"
        pool.unpin("a")
        park(pool, "f", ids_of((10, 4096)))
        assert pool.conversations() == ["f"]


def test_a_conversation_larger_than_the_pool_is_pool_full_at_once(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        ids = ids_of((1, 4000))
        park(pool, "chat", ids)
        with pytest.raises(mmkv.PoolFull):
            park(pool, "huge", ids_of((2, 8 * BLOCK + 1)))
        assert_parked(pool, "chat", ids)
        check_pool(pool, [])


def test_growth_without_room_leaves_the_former_version(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        ids = ids_of((1, 5000))
        park(pool, "chat", ids[:4000])
        with pytest.raises(mmkv.PoolFull):
            park(pool, "chat", ids)
        assert_parked(pool, "chat", ids[:4000])
        check_pool(pool, [])


def test_resizing_up_makes_room_without_moving_a_byte(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        ids = ids_of((1, 4096))
        park(pool, "chat", ids)
        extents = pool._ledger.conversations["chat"].version.extents
        pool.resize(blocks_of(pool, 16))
        park(pool, "other", ids_of((2, 4096)))
        assert pool._ledger.conversations["chat"].version.extents == extents
        assert pool.stats().evictions == 0
        assert_parked(pool, "chat", ids)


def test_resizing_down_gives_space_back_and_drops_the_oldest(pool_dir: Path) -> None:
    with small_pool(pool_dir, 16) as pool:
        texts = {name: ids_of((seed, 1536)) for seed, name in enumerate("abcde")}
        for name, ids in texts.items():
            park(pool, name, ids)
        pool.drop("b")
        pool.resize(blocks_of(pool, 12))
        assert pool.stats().evictions == 0, "what was free is enough"
        pool.resize(blocks_of(pool, 7))
        assert pool.conversations() == ["d", "e"]
        assert pool.stats().allocated <= blocks_of(pool, 7)
        check_pool(pool, [])
        for name in "de":
            assert_parked(pool, name, texts[name])


def test_resizing_below_what_must_stay_is_pool_full_and_changes_nothing(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        texts = {name: ids_of((seed, 1024)) for seed, name in enumerate("abcd")}
        for name, ids in texts.items():
            park(pool, name, ids)
        pool.pin("a")
        with pool.match(texts["b"]), pytest.raises(mmkv.PoolFull, match="pinned, leased or being parked"):
            pool.resize(blocks_of(pool, 3))
        assert pool.conversations() == ["c", "d", "a", "b"] or len(pool) == 4
        assert pool.stats().capacity == blocks_of(pool, 8)


def test_a_capacity_below_one_segment_is_refused(pool: mmkv.Pool) -> None:
    with pytest.raises(ValueError, match="a capacity of 1 bytes is less than this pool's segments take"):
        pool.resize(1)
    with pytest.raises(ValueError, match="capacity must be"):
        pool.resize("all")


def test_states_and_blocks_make_way_for_each_other(pool_dir: Path) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))}, {"s": mmkv.State("uint8", (4096,))})], "m")
    with mmkv.Pool.open(pool_dir, layout, capacity="256KiB", checkpoints=100) as pool:
        ids = ids_of((1, 60))
        for tokens in range(1, 60):
            try:
                park(pool, "many", ids[:tokens])
            except mmkv.PoolFull:
                break
        park(pool, "long", ids_of((2, 15 * BLOCK)))
        assert pool.conversations() == ["long"]
        park(pool, "many", ids)
        check_pool(pool, [])
        assert_parked(pool, "many", ids)


def test_space_does_not_go_to_and_fro_between_blocks_and_checkpoints(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, HYBRID, capacity="1MiB", checkpoints=0) as pool:
        geometry = pool._space.geometry
        assert (geometry.segment_blocks, geometry.segment_checkpoints) == (1, 2)
        for name in "ab":
            park(pool, name, ids_of((ord(name), 10)))
            pool.pin(name)
        pool.resize(5 * geometry.segment_bytes + geometry.state_segment_bytes)
        # There is room for three blocks more, or for two and a checkpoint.
        with pytest.raises(mmkv.PoolFull):
            park(pool, "c", ids_of((3, 3 * BLOCK)))
        park(pool, "c", ids_of((3, 2 * BLOCK)))
        check_pool(pool, [])
