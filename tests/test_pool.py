"""What the pool promises, one promise a test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    ONLY_STATES,
    UNIFORM,
    assert_holds,
    assert_parked,
    assert_untouched,
    compute,
    computed,
    ids_of,
    make_slot,
    park,
    rows,
)
from tests.mirror import check_pool

CAPACITY = 8 << 20
BLOCK = 512


@pytest.fixture
def pool(pool_dir: Path) -> Iterator[mmkv.Pool]:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        yield pool
        check_pool(pool, [])


@pytest.fixture
def hybrid(pool_dir: Path) -> Iterator[mmkv.Pool]:
    with mmkv.Pool.open(pool_dir, HYBRID, capacity=CAPACITY, checkpoints=2) as pool:
        yield pool
        check_pool(pool, [])


def on_disk(pool: mmkv.Pool) -> bool:
    return not pool._opened.medium.in_ram


def matched(pool: mmkv.Pool, ids: Any, namespace: str = "") -> int:
    with pool.match(ids, namespace=namespace) as match:
        return match.tokens


# What moves


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 3000])
def test_a_take_gives_what_was_parked(pool: mmkv.Pool, xp: ModuleType, tokens: int) -> None:
    ids = ids_of((1, tokens))
    receipt = park(pool, "chat", ids, xp=xp)
    assert (receipt.tokens, receipt.tokens_written) == (tokens, tokens)
    assert receipt.bytes == tokens * UNIFORM.token_bytes
    assert_parked(pool, "chat", ids, xp=xp)
    if xp is np:
        in_ram = pool._opened.medium.in_ram
        assert set(receipt.path.split("+")) <= ({"posix"} if in_ram else {"posix", "posix-direct"})


REPORTED = mmkv.Layer(
    {"k": mmkv.Plane("int8", (4, 128)), "v": mmkv.Plane("uint8", (4, 64)), "s": mmkv.Plane("float16", (24,))}
)
LATENT = mmkv.Layer({"c_kv": mmkv.Plane("bfloat16", (512,)), "k_pe": mmkv.Plane("bfloat16", (64,))})
ODD = mmkv.Layer({"k": mmkv.Plane("float8_e4m3fn", (3, 5)), "v": mmkv.Plane("float8_e5m2", (16,))})
ATTENTION = mmkv.Layer({"k": mmkv.Plane("float16", (8,))})
RECURRENT = mmkv.Layer({}, {"s": mmkv.State("float32", (64,))})

MIXED = mmkv.Layout([REPORTED, LATENT, ODD], model="mixed")
DEEP = mmkv.Layout([RECURRENT, RECURRENT, RECURRENT, ATTENTION] * 12, model="12 of 48 layers with planes")


@pytest.mark.parametrize("layout", [MIXED, DEEP, HYBRID, ONLY_STATES], ids=lambda layout: layout.model)
def test_layouts_of_real_models_come_back(pool_dir: Path, xp: ModuleType, layout: mmkv.Layout) -> None:
    ids = ids_of((1, 700), (2, 600))
    with mmkv.Pool.open(pool_dir, layout, capacity="64MiB") as pool:
        park(pool, "chat", ids[:700], xp=xp)
        park(pool, "chat", ids, xp=xp)
        assert_parked(pool, "chat", ids, xp=xp)
        slot = make_slot(layout, 800, xp, fill=1)
        pool.take("chat", slot, tokens=700).result(30)
        assert_holds(slot, ids[:700], fill=1)


@pytest.mark.parametrize("former", [1, 500, 512, 1000, 1024, 2000])
@pytest.mark.parametrize("new", [1, 383, 1024])
def test_growth_moves_what_is_new_and_at_most_a_block(pool: mmkv.Pool, former: int, new: int) -> None:
    ids = ids_of((1, former + new))
    park(pool, "chat", ids[:former])
    receipt = park(pool, "chat", ids)
    assert receipt.tokens_written == (new + former % BLOCK if on_disk(pool) else new)
    assert_parked(pool, "chat", ids)


def test_an_edited_turn_moves_only_what_comes_after_it(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 3000))
    park(pool, "chat", ids)
    edited = np.concatenate([ids[:1700], ids_of((2, 900))])
    assert park(pool, "chat", edited).tokens_written == len(edited) - 1700 // BLOCK * BLOCK
    assert_parked(pool, "chat", edited)
    assert matched(pool, ids) == 1700, "of the old course nothing is left"


def test_the_same_ids_again_move_nothing(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    receipt = park(pool, "chat", ids)
    assert (receipt.tokens_written, receipt.bytes, receipt.path) == (0, 0, "none")


@pytest.mark.parametrize("cut", [1, 512, 600, 699])
def test_a_conversation_can_be_cut_and_go_on_otherwise(pool: mmkv.Pool, cut: int) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    assert park(pool, "chat", ids[:cut]).tokens_written == 0
    assert_parked(pool, "chat", ids[:cut])
    other = np.concatenate([ids[:cut], ids_of((2, 300))])
    park(pool, "chat", other)
    assert_parked(pool, "chat", other)


def test_conversations_of_many_turns_stay_in_few_extents(pool_dir: Path) -> None:
    texts = {name: ids_of((seed, 40 * 190)) for seed, name in enumerate("abc")}
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="256MiB") as pool:
        for turn in range(1, 41):
            for name, ids in texts.items():
                park(pool, name, ids[: turn * 190])
            # Turns are seconds apart, and housekeeping comes round meanwhile.
            pool._keep_spare()
        for name, ids in texts.items():
            assert_parked(pool, name, ids)
            assert pool.info(name).extents <= 4


def test_what_is_appended_behind_the_ids_does_not_matter(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 900))
    slot = computed(UNIFORM, ids)
    transfer = pool.park("chat", slot, ids[:600])
    compute(slot, np.concatenate([ids[:600], ids_of((2, 300))]))
    transfer.result(30)
    assert_parked(pool, "chat", ids[:600])


# Taking


@pytest.mark.parametrize(("have", "tokens"), [(0, 1), (0, 600), (511, 513), (600, 1000), (1000, 1000), (1, 999)])
def test_only_the_rows_from_have_to_tokens_are_written(pool: mmkv.Pool, xp: ModuleType, have: int, tokens: int) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids, xp=xp)
    slot = make_slot(UNIFORM, 1200, xp, fill=0xAA)
    receipt = pool.take("chat", slot, tokens=tokens, have=have).result(30)
    assert (receipt.tokens, receipt.tokens_written) == (tokens, tokens - have)
    assert_holds(slot, ids[:tokens], have=have, fill=0xAA)


def test_what_is_around_the_arrays_is_not_touched(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    memory = np.full((900, 3, 8), 0xAA, dtype=np.uint8)
    inside = memory.reshape(3, -1)[1].view(np.int8)[: 700 * 8].reshape(700, 4, 2)
    slot = computed(UNIFORM, ids)
    arrays = [dict(layer) for layer in slot.arrays]
    arrays[1]["k"] = inside
    pool.take("chat", mmkv.Slot(UNIFORM, arrays)).result(30)
    assert (inside == slot.arrays[1]["k"]).all()
    inside[...] = np.int8(-86)
    assert (memory == 0xAA).all()


def test_layers_land_in_order_for_who_iterates(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    slot = make_slot(UNIFORM, 700)
    seen = []
    for layer in pool.take("chat", slot):
        assert (slot.arrays[layer]["k"] == computed(UNIFORM, ids).arrays[layer]["k"]).all()
        seen.append(layer)
    assert seen == [0, 1, 2]


def test_a_take_and_a_park_can_be_awaited(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))

    async def turn() -> list[mmkv.Receipt]:
        slot = make_slot(UNIFORM, 700)
        parked = await pool.park("chat", computed(UNIFORM, ids), ids)
        return [parked, *await asyncio.gather(*[_awaited(pool.take("chat", slot)) for _ in range(3)])]

    assert [receipt.tokens for receipt in asyncio.run(turn())] == [700] * 4


async def _awaited(transfer: mmkv.Transfer) -> mmkv.Receipt:
    return await transfer


def test_an_unknown_conversation_is_not_found(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 10, fill=7)
    for call in (
        lambda: pool.take("nobody", slot),
        lambda: pool.info("nobody"),
        lambda: pool.drop("nobody"),
        lambda: pool.pin("nobody"),
        lambda: pool.flush("nobody"),
        lambda: pool.fork("nobody", "b"),
    ):
        with pytest.raises(mmkv.ConversationNotFound, match="no conversation 'nobody' in the pool at"):
            call()
    assert_untouched(slot, 7)


# Matching and sharing


def test_the_longest_prefix_is_matched_and_taken(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 2000))
    park(pool, "short", ids[:600])
    park(pool, "long", ids[:1500])
    park(pool, "other", ids_of((2, 2000)))
    with pool.match(ids) as match:
        assert (match.conversation, match.tokens, match.tier) == ("long", 1500, "path")
        slot = make_slot(UNIFORM, 2000, fill=9)
        pool.take(match, slot).result(30)
        assert_holds(slot, ids[:1500], fill=9)


@pytest.mark.parametrize("common", [1, 100, 511, 512, 700])
def test_a_match_is_as_long_as_the_ids_agree(pool: mmkv.Pool, common: int) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    with pool.match(np.concatenate([ids[:common], ids_of((2, 50))])) as match:
        assert match.tokens == common


def test_no_match_has_no_tokens_and_takes_nothing(pool: mmkv.Pool) -> None:
    park(pool, "chat", ids_of((1, 600)))
    for prompt in (ids_of((2, 600)), []):
        with pool.match(prompt) as match:
            assert (match.conversation, match.tokens, match.tier) == (None, 0, None)
            slot = make_slot(UNIFORM, 10, fill=3)
            assert pool.take(match, slot).result(30).tokens == 0
            assert_untouched(slot, 3)
    assert (pool.stats().hits, pool.stats().misses) == (0, 2)


def test_a_conversation_that_begins_alike_shares_whole_blocks(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1100))
    other = np.concatenate([ids, ids_of((2, 500))])
    park(pool, "first", ids)
    used = pool.stats().used
    receipt = park(pool, "second", other)
    assert receipt.tokens_written == len(other) - 1024
    assert pool.stats().used - used == 2 * pool._space.geometry.block_bytes
    pool.drop("first")
    assert_parked(pool, "second", other)


def test_sharing_gives_the_bytes_of_who_parked_first_and_can_be_declined(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 600))
    park(pool, "first", ids, salt="first")
    park(pool, "shares", ids, salt="later")
    park(pool, "apart", ids, salt="later", share=False)
    slot = make_slot(UNIFORM, 600)
    pool.take("shares", slot, tokens=512).result(30)
    assert_holds(slot, ids[:512], salt="first", fill=0)
    assert_parked(pool, "apart", ids, salt="later")


def test_namespaces_neither_share_nor_match(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1100))
    park(pool, "a", ids, namespace="one", salt="one")
    assert matched(pool, ids) == 0
    assert matched(pool, ids, "two") == 0
    assert park(pool, "b", ids, namespace="two", salt="two").tokens_written == 1100
    assert_parked(pool, "a", ids, salt="one")
    assert_parked(pool, "b", ids, salt="two")
    assert pool.conversations(namespace="two") == ["b"]
    with pool.match(ids, namespace="one") as match:
        assert match.conversation == "a"


def test_a_conversation_stays_in_its_namespace(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 100))
    park(pool, "chat", ids, namespace="one")
    with pytest.raises(ValueError, match="'chat' is parked in namespace 'one', not 'two'"):
        park(pool, "chat", ids, namespace="two")
    assert_parked(pool, "chat", ids)


def test_a_fork_shares_every_block_and_goes_its_own_way(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    used = pool.stats().used
    pool.fork("chat", "whole")
    pool.fork("chat", "part", tokens=700)
    assert pool.stats().used == used
    goes = {"chat": 5, "whole": 6, "part": 7}
    texts = {}
    for name, seed in goes.items():
        length = 700 if name == "part" else 1300
        texts[name] = np.concatenate([ids[:length], ids_of((seed, 150))])
        park(pool, name, texts[name])
    for name, text in texts.items():
        assert_parked(pool, name, text)


def test_a_fork_of_a_match_is_as_long_as_the_match(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids, namespace="n")
    with pool.match(ids[:900], namespace="n") as match:
        pool.fork(match, "forked")
    assert pool.info("forked").namespace == "n"
    assert_parked(pool, "forked", ids[:900])


def test_a_fork_needs_a_free_name(pool: mmkv.Pool) -> None:
    park(pool, "a", ids_of((1, 100)))
    with pytest.raises(ValueError, match="'a' exists already"):
        pool.fork("a", "a")
    with pool.match(ids_of((2, 5))) as match, pytest.raises(ValueError, match="nothing to fork"):
        pool.fork(match, "b")


# States


def test_states_are_those_of_the_moment_of_the_park(hybrid: mmkv.Pool, xp: ModuleType) -> None:
    ids = ids_of((1, 900))
    slot = computed(HYBRID, ids, xp)
    transfer = hybrid.park("chat", slot, ids)
    for layer in slot.state:
        for array in layer.values():
            array[...] = 0
    transfer.result(30)
    assert_parked(hybrid, "chat", ids, xp=xp)


def test_every_park_makes_a_checkpoint_and_older_ones_go(hybrid: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    for tokens in range(100, 1001, 100):
        park(hybrid, "chat", ids[:tokens], boundary=tokens == 300)
    assert hybrid.info("chat").checkpoints == (300, 800, 900, 1000)
    for tokens in (300, 800, 900, 1000):
        slot = make_slot(HYBRID, 1000, fill=5)
        hybrid.take("chat", slot, tokens=tokens).result(30)
        assert_holds(slot, ids[:tokens], fill=5)
    assert hybrid._space.records.used == 4


def test_a_take_between_checkpoints_names_the_nearest(hybrid: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    for tokens in (200, 600, 1000):
        park(hybrid, "chat", ids[:tokens])
    slot = make_slot(HYBRID, 1000, fill=5)
    for tokens, nearest in ((100, "200"), (300, "200 and 600"), (999, "600 and 1000")):
        with pytest.raises(
            ValueError, match=f"'chat' has no checkpoint at {tokens} tokens; the nearest are at {nearest}$"
        ):
            hybrid.take("chat", slot, tokens=tokens)
        with pytest.raises(ValueError, match="no checkpoint"):
            hybrid.fork("chat", "b", tokens)
    assert_untouched(slot, 5)


def test_a_match_is_rounded_down_to_a_checkpoint(hybrid: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    for tokens in (200, 600, 1000):
        park(hybrid, "chat", ids[:tokens])
    for common, expected in ((199, 0), (200, 200), (599, 200), (999, 600), (1000, 1000)):
        with hybrid.match(np.concatenate([ids[:common], ids_of((2, 9))])) as match:
            assert match.tokens == expected
            if expected:
                slot = make_slot(HYBRID, 1000, fill=5)
                hybrid.take(match, slot).result(30)
                assert_holds(slot, ids[:expected], fill=5)


def test_checkpoints_behind_an_edited_turn_are_void(hybrid: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    for tokens in (200, 600, 1000):
        park(hybrid, "chat", ids[:tokens])
    edited = np.concatenate([ids[:700], ids_of((2, 50))])
    park(hybrid, "chat", edited)
    assert hybrid.info("chat").checkpoints == (200, 600, 750)
    slot = make_slot(HYBRID, 1000, fill=5)
    hybrid.take("chat", slot, tokens=600).result(30)
    assert_holds(slot, ids[:600], fill=5)


def test_the_number_of_older_checkpoints_is_the_pools(pool_dir: Path) -> None:
    ids = ids_of((1, 100))
    with mmkv.Pool.open(pool_dir, HYBRID, capacity=CAPACITY, checkpoints=0) as pool:
        for tokens in (10, 20, 30):
            park(pool, "chat", ids[:tokens])
        assert pool.info("chat").checkpoints == (30,)


def test_checkpoints_count_as_bytes(hybrid: mmkv.Pool) -> None:
    ids = ids_of((1, 100))
    park(hybrid, "chat", ids)
    before = hybrid.info("chat").bytes
    park(hybrid, "chat", np.concatenate([ids, ids_of((2, 5))]))
    assert hybrid.info("chat").bytes - before == hybrid._space.geometry.checkpoint_bytes


# Room


def blocks_of(pool: mmkv.Pool, blocks: int) -> int:
    return blocks * pool._space.geometry.segment_bytes


def small_pool(path: Path, blocks: int = 8) -> mmkv.Pool:
    pool = mmkv.Pool.open(path, UNIFORM, capacity="1MiB")
    assert pool._space.geometry.segment_blocks == 1
    pool.resize(blocks_of(pool, blocks))
    return pool


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


# Leases


def test_a_lease_keeps_its_version_over_a_drop(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    with pool.match(ids) as match:
        pool.drop("chat")
        assert "chat" not in pool
        park(pool, "chat", ids_of((2, 1000)))
        slot = make_slot(UNIFORM, 1000)
        pool.take(match, slot).result(30)
        assert_holds(slot, ids)
        assert pool.stats().leases == 1
    assert pool.stats().leases == 0


def test_a_lease_keeps_its_version_over_a_new_one(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    with pool.match(ids) as match:
        for seed in range(2, 6):
            newer = np.concatenate([ids[:700], ids_of((seed, 500))])
            park(pool, "chat", newer)
            park(pool, "chat", np.concatenate([newer, ids_of((seed, 100))]))
            slot = make_slot(UNIFORM, 1000)
            pool.take(match, slot).result(30)
            assert_holds(slot, ids)
            check_pool(pool, [match._version] if match._version else [])


def test_a_take_under_way_outlives_its_match(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    slot = make_slot(UNIFORM, 1000)
    with pool.match(ids) as match:
        transfer = pool.take(match, slot)
    pool.drop("chat")
    park(pool, "other", ids_of((2, 1000)))
    transfer.result(30)
    assert_holds(slot, ids)


# Swapping


@pytest.mark.parametrize(("leaving", "arriving"), [(600, 1000), (1000, 600), (1000, 1000)])
def test_a_swap_parks_one_and_takes_the_other(pool: mmkv.Pool, xp: ModuleType, leaving: int, arriving: int) -> None:
    out, into = ids_of((1, leaving)), ids_of((2, arriving))
    park(pool, "b", into, xp=xp)
    slot = compute(make_slot(UNIFORM, 1100, xp), out)
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=out, arriving="b")
    assert parked.result(30).tokens == leaving
    assert taken.result(30).tokens == arriving
    assert_parked(pool, "a", out, xp=xp)
    again = make_slot(UNIFORM, 1100, xp)
    pool.take("b", again).result(30)
    for (layer, name, _, mine), (*_, other) in zip(rows(slot), rows(again), strict=True):
        assert (mine[:arriving] == other[:arriving]).all(), f"layer {layer}, {name!r}"


def test_a_swap_takes_states_along(hybrid: mmkv.Pool) -> None:
    out, into = ids_of((1, 600)), ids_of((2, 600))
    park(hybrid, "b", into)
    slot = computed(HYBRID, out)
    for transfer in hybrid.swap(slot, leaving="a", leaving_ids=out, arriving="b"):
        transfer.result(30)
    assert_holds(slot, into)
    assert_parked(hybrid, "a", out)


def test_a_swap_to_a_match_that_has_nothing_only_parks(pool: mmkv.Pool) -> None:
    out = ids_of((1, 600))
    slot = computed(UNIFORM, out)
    with pool.match(ids_of((2, 50))) as match:
        parked, taken = pool.swap(slot, leaving="a", leaving_ids=out, arriving=match)
        assert (parked.result(30).tokens, taken.result(30).tokens) == (600, 0)
    assert_holds(slot, out)
    assert_parked(pool, "a", out)


def test_a_swap_without_room_moves_nothing(pool_dir: Path) -> None:
    with small_pool(pool_dir) as pool:
        into, out = ids_of((2, 2048)), ids_of((1, 3000))
        park(pool, "b", into)
        slot = computed(UNIFORM, out)
        with pytest.raises(mmkv.PoolFull):
            pool.swap(slot, leaving="a", leaving_ids=out, arriving="b")
        assert_holds(slot, out)
        assert pool.conversations() == ["b"]
        check_pool(pool, [])


# Several at once


def test_threads_park_and_take_at_once(pool_dir: Path) -> None:
    errors: list[BaseException] = []
    with mmkv.Pool.open(pool_dir, HYBRID, capacity=CAPACITY) as pool:

        def chat(seed: int) -> None:
            try:
                ids = ids_of((seed, 1500))
                for turn in range(1, 6):
                    park(pool, f"chat {seed}", ids[: turn * 300])
                    assert_parked(pool, f"chat {seed}", ids[: turn * 300])
                    with pool.match(ids[: turn * 300]) as match:
                        assert match.tokens == turn * 300
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        check_pool(pool, [])


def test_parks_of_one_conversation_come_one_after_the_other(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 2000))
    slot = computed(UNIFORM, ids)
    transfers = [pool.park("chat", slot, ids[:tokens]) for tokens in (500, 1000, 1500, 2000)]
    assert [transfer.result(30).tokens for transfer in transfers] == [500, 1000, 1500, 2000]
    assert_parked(pool, "chat", ids)


def test_threads_that_want_more_than_there_is_lose_nothing(pool_dir: Path) -> None:
    parked: dict[str, Any] = {}
    with small_pool(pool_dir) as pool:

        def chat(seed: int) -> None:
            for turn in range(8):
                name, ids = f"{seed}-{turn}", ids_of((seed * 100 + turn, 700))
                try:
                    park(pool, name, ids)
                    parked[name] = ids
                except mmkv.PoolFull:
                    pass

        threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pool.conversations()
        for name in pool.conversations():
            assert_parked(pool, name, parked[name])
        check_pool(pool, [])


# Figures


def test_the_figures_of_a_conversation(pool: mmkv.Pool) -> None:
    before = time.time()
    ids = ids_of((1, 1100))
    park(pool, "chat", ids)
    pool.fork("chat", "fork", 1024)
    info = pool.info("chat")
    block = pool._space.geometry.block_bytes
    assert (info.conversation, info.namespace, info.tokens, info.pinned) == ("chat", "", 1100, False)
    assert (info.bytes, info.owned_bytes) == (3 * block, block)
    assert before <= info.created <= info.parked <= time.time()
    assert info.taken is None
    assert_parked(pool, "chat", ids)
    taken = pool.info("chat").taken
    assert taken is not None
    assert taken >= info.parked
    assert "chat" in pool
    assert "nobody" not in pool
    assert len(pool) == 2


def test_the_figures_of_the_pool(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    assert_parked(pool, "chat", ids)
    pool.match(ids).close()
    stats = pool.stats()
    block = pool._space.geometry.block_bytes
    assert (stats.conversations, stats.parks, stats.takes, stats.hits, stats.failures) == (1, 1, 1, 1, 0)
    assert (stats.bytes_parked, stats.bytes_taken) == (1000 * UNIFORM.token_bytes,) * 2
    assert sum(stats.moved.values()) == 2000 * UNIFORM.token_bytes
    assert stats.moved.keys() <= {"posix", "posix-direct"}
    assert (stats.capacity, stats.used) == (CAPACITY, 2 * block)
    assert stats.used + stats.free <= stats.capacity
    assert (stats.leases, stats.transfers, stats.quarantined) == (0, 0, 0)


def test_what_a_repr_shows(pool: mmkv.Pool) -> None:
    park(pool, "chat", ids_of((1, 10)))
    assert repr(pool) == f"Pool({str(pool.path)!r}, model='uniform', 1 conversations)"
