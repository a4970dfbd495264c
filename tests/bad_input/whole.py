"""The conversation that bad input must not harm."""

from __future__ import annotations

from pathlib import Path

import mmkv
from tests.computed import (
    UNIFORM,
    assert_parked,
    ids_of,
)
from tests.mirror import check_pool

CAPACITY = 4 << 20
IDS = ids_of((1, 1000))


def assert_whole(path: Path) -> None:
    """The pool can be opened, and its conversation is there."""
    with mmkv.Pool.open(path, UNIFORM) as pool:
        assert_parked(pool, "chat", IDS)
        check_pool(pool, [])
