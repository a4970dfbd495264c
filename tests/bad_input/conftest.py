"""Pools with one conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mmkv
from tests.bad_input.whole import CAPACITY, IDS
from tests.computed import (
    UNIFORM,
    assert_parked,
    park,
)
from tests.mirror import check_pool


@pytest.fixture
def pool(pool_dir: Path) -> Iterator[mmkv.Pool]:
    """A pool with one conversation, which is whole after the test."""
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        yield pool
        assert_parked(pool, "chat", IDS)
        check_pool(pool, [])


@pytest.fixture
def closed(pool_dir: Path) -> Path:
    """The directory of a closed pool with one conversation."""
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
    return pool_dir
