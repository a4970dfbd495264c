"""Pools that are full soon."""

from __future__ import annotations

from pathlib import Path

import mmkv
from tests.computed import UNIFORM


def blocks_of(pool: mmkv.Pool, blocks: int) -> int:
    """Bytes of so many segments."""
    return blocks * pool._space.geometry.segment_bytes


def small_pool(path: Path, blocks: int = 8) -> mmkv.Pool:
    """A pool that holds a few blocks, each a segment of its own."""
    pool = mmkv.Pool.open(path, UNIFORM, capacity="1MiB")
    assert pool._space.geometry.segment_blocks == 1
    pool.resize(blocks_of(pool, blocks))
    return pool
