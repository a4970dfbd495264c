"""Transfers that hang, fail or are cancelled: an error at the call that owns it, and nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import mmkv
from tests import hanging
from tests.computed import (
    HYBRID,
    UNIFORM,
    Ids,
    assert_holds,
    assert_parked,
    assert_untouched,
    compute,
    computed,
    ids_of,
    make_slot,
    park,
)
from tests.mirror import check_pool

DEADLINE = 0.3


def opened(path: Path, layout: mmkv.Layout = UNIFORM) -> mmkv.Pool:
    return mmkv.Pool.open(path, layout, capacity="4MiB", deadline=DEADLINE)


@pytest.fixture
def pool(pool_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mmkv.Pool]:
    hanging.install(monkeypatch)
    pool = opened(pool_dir)
    yield pool
    store_of(pool).let_go()
    pool.close()


def store_of(pool: mmkv.Pool) -> hanging.HangingStore:
    store = pool._movers._host
    assert isinstance(store, hanging.HangingStore)
    return store


def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_a_park_that_hangs_times_out_and_its_blocks_are_in_quarantine(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    store_of(pool).hang()
    slot = computed(UNIFORM, ids)
    transfer = pool.park("chat", slot, ids)
    with pytest.raises(mmkv.TransferTimeout, match=rf"park of 'chat' was not done after {DEADLINE} s: layer 0"):
        transfer.result(10)
    stats = pool.stats()
    assert stats.quarantined == 3 * pool._space.geometry.block_bytes
    assert stats.transfers == 0
    store_of(pool).hangs = False
    # The next one goes on, and the late bytes of the first one go where nobody sees them.
    other = np.concatenate([ids[:700], ids_of((2, 500))])
    park(pool, "chat", other)
    store_of(pool).let_go()
    eventually(lambda: pool.stats().quarantined == 0)
    assert_parked(pool, "chat", other)
    assert pool.stats().failures == 1
    check_pool(pool, [])


def test_what_is_under_way_is_in_the_figures(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids)
    (tier,) = pool.stats().tiers
    assert (tier.name, tier.directory, tier.dirty) == ("path", str(pool.path), 0)
    assert (tier.capacity, tier.used, tier.fill) == (4 << 20, pool.stats().used, pool.stats().used / (4 << 20))
    store_of(pool).hang()
    take = pool.take("chat", make_slot(UNIFORM, 1500))
    parked = pool.park("other", computed(UNIFORM, ids), ids, share=False)
    stats = pool.stats()
    assert [(one.what, one.kind) for one in stats.under_way] == [
        ("take of 'chat'", "take"),
        ("park of 'other'", "park"),
    ]
    assert all((one.layers, one.layers_done) == (len(UNIFORM.layers), 0) for one in stats.under_way)
    for transfer in (take, parked):
        with pytest.raises(mmkv.TransferTimeout):
            transfer.result(10)
    stats = pool.stats()
    assert stats.under_way == ()
    assert stats.tiers[0].quarantined == stats.quarantined > 0
    assert (stats.spills, stats.promotions, stats.prefetches, stats.bytes_spilled) == (0, 0, 0, 0)


def test_a_take_that_hangs_times_out_and_keeps_its_lease(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids)
    store_of(pool).hang()
    slot = make_slot(UNIFORM, 1500, fill=1)
    transfer = pool.take("chat", slot)
    with pytest.raises(mmkv.TransferTimeout, match="take of 'chat'"):
        transfer.wait(1)
    store_of(pool).hangs = False
    pool.drop("chat")
    used = pool.stats().used
    assert used == pool.stats().quarantined == 3 * pool._space.geometry.block_bytes, "the hardware may still read them"
    park(pool, "other", ids_of((2, 1500)))
    store_of(pool).let_go()
    eventually(lambda: pool.stats().quarantined == 0)
    check_pool(pool, [])
    assert_untouched(slot, 1)


def test_a_cancelled_park_leaves_the_former_version(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    store_of(pool).hang()
    transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    assert transfer.cancel()
    store_of(pool).let_go()
    with pytest.raises(mmkv.TransferCancelled):
        transfer.result(10)
    assert_parked(pool, "chat", ids[:700])
    check_pool(pool, [])


def test_a_cancelled_park_that_hangs_is_quarantined(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    store_of(pool).hang()
    transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    transfer.cancel()
    with pytest.raises(mmkv.TransferTimeout, match="before that, park of 'chat' was cancelled"):
        transfer.result(10)
    assert pool.stats().quarantined > 0


def test_dropping_what_is_being_parked_cancels_it(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    store_of(pool).hang()
    transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    pool.drop("chat")
    store_of(pool).let_go()
    with pytest.raises(mmkv.TransferCancelled):
        transfer.result(10)
    assert len(pool) == 0
    check_pool(pool, [])
    park(pool, "chat", ids)
    assert_parked(pool, "chat", ids)


def test_what_is_being_parked_is_not_dropped_to_make_room(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids[:900])
    pool.resize(6 * pool._space.geometry.segment_bytes)
    store_of(pool).hang()
    transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    store_of(pool).hangs = False
    with pytest.raises(mmkv.PoolFull):
        park(pool, "other", ids_of((2, 12 * 512)))
    store_of(pool).let_go()
    transfer.result(10)
    assert_parked(pool, "chat", ids)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_park_that_fails_at_a_layer_leaves_the_former_version(pool: mmkv.Pool, layer: int) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    store_of(pool).fails, store_of(pool).fail_at = "write", layer
    with pytest.raises(mmkv.TransferError, match=f"layer {layer} is broken"):
        park(pool, "chat", ids)
    store_of(pool).fails = None
    assert_parked(pool, "chat", ids[:700])
    check_pool(pool, [])
    park(pool, "chat", ids)
    assert_parked(pool, "chat", ids)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_take_that_fails_leaves_the_pool_as_it_was(pool: mmkv.Pool, layer: int) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids)
    store_of(pool).fails, store_of(pool).fail_at = "read", layer
    with pytest.raises(mmkv.TransferError, match=f"layer {layer} is broken"):
        pool.take("chat", make_slot(UNIFORM, 1500)).result(10)
    store_of(pool).fails = None
    assert_parked(pool, "chat", ids)
    check_pool(pool, [])


# Swaps that fail


@pytest.fixture(params=[UNIFORM, HYBRID], ids=["uniform", "hybrid"])
def swapping(
    request: pytest.FixtureRequest, pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[mmkv.Pool, Ids, Ids, mmkv.Slot]]:
    """A pool that holds `b`, the ids of `a` and `b`, and a slot that holds `a`."""
    hanging.install(monkeypatch)
    pool = opened(pool_dir, request.param)
    leaving, arriving = ids_of((1, 1100)), ids_of((2, 1300))
    park(pool, "b", arriving)
    slot = make_slot(request.param, 1300)
    compute(slot, leaving)
    yield pool, leaving, arriving, slot
    store_of(pool).let_go()
    pool.close()


def assert_slot_begins_with(slot: mmkv.Slot, ids: Ids) -> None:
    part = make_slot(slot.layout, len(ids))
    for to, source in zip(part.arrays, slot.arrays, strict=True):
        for name in to:
            to[name][...] = source[name][: len(ids)]
    part.state = slot.state
    assert_holds(part, ids)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("former", [0, 700], ids=["new", "grown"])
def test_a_swap_whose_park_fails_puts_the_slot_back(
    swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot], layer: int, former: int
) -> None:
    pool, leaving, arriving, slot = swapping
    if former:
        park(pool, "a", leaving[:former])
    store_of(pool).fails, store_of(pool).fail_at = "write", layer
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    with pytest.raises(mmkv.TransferError):
        parked.result(10)
    with pytest.raises(mmkv.TransferError):
        taken.result(10)
    assert_slot_begins_with(slot, leaving)
    assert_parked(pool, "b", arriving)
    if former:
        assert_parked(pool, "a", leaving[:former])
    else:
        assert "a" not in pool
    check_pool(pool, [])


def test_a_swap_whose_commit_fails_puts_the_slot_back(
    swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, leaving, arriving, slot = swapping

    def full(*_: object, **__: object) -> None:
        raise mmkv.PoolFull("no room for the catalog")

    monkeypatch.setattr(pool._catalog, "put_version", full)
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    for transfer in (parked, taken):
        with pytest.raises(mmkv.MmkvError, match="no room for the catalog"):
            transfer.result(10)
    assert_slot_begins_with(slot, leaving)
    assert_parked(pool, "b", arriving)
    check_pool(pool, [])


def test_a_swap_that_moves_nothing_out_and_cannot_commit_ends(
    swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, leaving, _, slot = swapping
    park(pool, "a", leaving)

    def full(*_: object, **__: object) -> None:
        raise mmkv.PoolFull("no room for the catalog")

    monkeypatch.setattr(pool._catalog, "put_version", full)
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    for transfer in (parked, taken):
        with pytest.raises(mmkv.MmkvError, match="no room for the catalog"):
            transfer.result(10)
    assert_slot_begins_with(slot, leaving)
    assert_parked(pool, "a", leaving)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_swap_whose_take_fails_commits_the_park(swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot], layer: int) -> None:
    pool, leaving, arriving, slot = swapping
    store_of(pool).fails, store_of(pool).fail_at = "read", layer
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    assert parked.result(10).tokens == len(leaving)
    with pytest.raises(mmkv.TransferError, match=f"layer {layer} is broken"):
        taken.result(10)
    store_of(pool).fails = None
    assert_parked(pool, "a", leaving)
    assert_parked(pool, "b", arriving)
    check_pool(pool, [])


def test_a_swap_that_hangs_times_out_both_and_ends_when_let_go(
    swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot],
) -> None:
    pool, leaving, arriving, slot = swapping
    store_of(pool).hang()
    parked, taken = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    for transfer in (parked, taken):
        with pytest.raises(mmkv.TransferTimeout):
            transfer.result(10)
    store_of(pool).let_go()
    eventually(lambda: pool.stats().quarantined == 0)
    assert_slot_begins_with(slot, leaving)
    assert_parked(pool, "b", arriving)
    check_pool(pool, [])


def test_a_swap_without_room_holds_nothing_when_it_says_so(
    swapping: tuple[mmkv.Pool, Ids, Ids, mmkv.Slot],
) -> None:
    pool, leaving, _, slot = swapping
    pool.resize(pool._space.geometry.smallest_capacity + pool._space.geometry.segment_bytes)
    store_of(pool).hang()
    with pytest.raises(mmkv.PoolFull):
        pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    assert (pool.stats().leases, pool.stats().transfers) == (0, 0)
    pool.drop("b")
    assert pool.stats().used == 0
    assert_slot_begins_with(slot, leaving)


# Closing


def test_closing_waits_for_what_is_under_way(pool_dir: Path) -> None:
    ids = ids_of((1, 3000))
    with opened(pool_dir) as pool:
        transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    assert transfer.result(0).tokens == 3000
    with opened(pool_dir) as pool:
        assert_parked(pool, "chat", ids)


def test_closing_does_not_wait_for_the_quarantined_but_keeps_the_lock_for_them(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging.install(monkeypatch)
    pool = opened(pool_dir)
    ids = ids_of((1, 700))
    store_of(pool).hang()
    transfer = pool.park("chat", computed(UNIFORM, ids), ids)
    pool.close()
    with pytest.raises(mmkv.TransferTimeout):
        transfer.result(0)
    with pytest.raises(mmkv.PoolLocked):
        opened(pool_dir)
    store_of(pool).let_go()

    def free() -> bool:
        try:
            opened(pool_dir).close()
        except mmkv.PoolLocked:
            return False
        return True

    eventually(free)
    with opened(pool_dir) as again:
        assert len(again) == 0
        check_pool(again, [])
