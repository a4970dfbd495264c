"""Who stays in the hot tier, and what neither tier takes more than."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    UNIFORM,
    assert_parked,
    ids_of,
    park,
)
from tests.crashed import crash
from tests.mirror import check_pool
from tests.tiered import (
    BLOCK,
    Moves,
    eventually,
    hot_blocks,
    is_hot,
    open_tiers,
    text,
)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


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
