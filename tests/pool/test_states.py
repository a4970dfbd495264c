"""States, which are of one moment: checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    assert_holds,
    assert_parked,
    assert_untouched,
    computed,
    ids_of,
    make_slot,
    park,
)
from tests.pool.conftest import CAPACITY


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
