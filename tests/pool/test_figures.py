"""What a pool says of itself."""

from __future__ import annotations

import time

import mmkv
from tests.computed import UNIFORM, assert_parked, ids_of, park
from tests.pool.conftest import CAPACITY


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
