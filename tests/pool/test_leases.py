"""What a lease keeps, and one conversation that leaves its slot while another arrives."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    UNIFORM,
    assert_holds,
    assert_parked,
    compute,
    computed,
    ids_of,
    make_slot,
    park,
    rows,
)
from tests.cramped import small_pool
from tests.mirror import check_pool


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
