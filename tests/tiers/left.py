"""What the tests of restarts leave in a pool, and what of it is there later."""

from __future__ import annotations

import mmkv
from tests.computed import assert_parked, park
from tests.mirror import check_pool
from tests.tiered import text

KEPT, DIRTY, GROWN = text(1, 3), text(2, 3), text(1, 4.5)


def leave(pool: mmkv.Pool) -> None:
    """Something that was flushed and has grown since, and something that never was."""
    park(pool, "kept", KEPT)
    pool.flush()
    park(pool, "kept", GROWN)
    park(pool, "dirty", DIRTY)


def assert_as_left(pool: mmkv.Pool) -> None:
    """All of it is there."""
    assert_parked(pool, "kept", GROWN)
    assert_parked(pool, "dirty", DIRTY)
    check_pool(pool, [])


def assert_fallen_back(pool: mmkv.Pool) -> None:
    """What was flushed is there, and the pool is as good as any."""
    assert pool.conversations() == ["kept"]
    assert_parked(pool, "kept", KEPT)
    check_pool(pool, [])
    leave(pool)
    assert_as_left(pool)
