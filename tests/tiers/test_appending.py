"""Rows that are appended in place."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import mmkv
from tests.computed import (
    UNIFORM,
    assert_holds,
    assert_parked,
    make_slot,
    park,
)
from tests.crashed import crash
from tests.tiered import (
    BLOCK,
    Moves,
    eventually,
    make_cold,
    open_tiers,
    text,
)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


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
