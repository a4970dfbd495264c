"""A pool with a hot tier, which is whole after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mmkv
from tests.mirror import check_pool
from tests.tiered import Moves, open_tiers


@pytest.fixture
def pool(base: Path, hot: Path, moves: Moves) -> Iterator[mmkv.Pool]:
    with open_tiers(base, hot) as pool:
        yield pool
        moves.hold.set()
        check_pool(pool, [])
