"""Several threads on one pool."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mmkv
from tests.computed import (
    HYBRID,
    UNIFORM,
    assert_parked,
    computed,
    ids_of,
    park,
)
from tests.cramped import small_pool
from tests.mirror import check_pool
from tests.pool.conftest import CAPACITY


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
