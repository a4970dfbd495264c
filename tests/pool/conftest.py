"""The pools of these tests, which are whole after each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mmkv
from tests.computed import HYBRID, UNIFORM
from tests.mirror import check_pool

CAPACITY = 8 << 20


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
