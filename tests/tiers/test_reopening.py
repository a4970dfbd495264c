"""What of a hot tier is still true after a restart, another boot, or a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mmkv
from tests.computed import (
    assert_parked,
    park,
)
from tests.crashed import crash, idle_writers
from tests.tiered import (
    Moves,
    hot_blocks,
    open_tiers,
    text,
)
from tests.tiers.left import DIRTY, GROWN, KEPT, assert_as_left, assert_fallen_back, leave

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


def another_boot(monkeypatch: pytest.MonkeyPatch, boot: str = "another boot") -> None:
    for module in ("mmkv.opening", "mmkv.pool", "mmkv.warming"):
        monkeypatch.setattr(f"{module}.boot_id", lambda: boot)


def test_a_hot_directory_of_this_boot_is_taken_up_again(base: Path, hot: Path, moves: Moves) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    moves.reset()
    # Not even its place needs to be said.
    with idle_writers(), mmkv.Pool.open(base, min_free_ram=0) as pool:
        assert_as_left(pool)
        assert moves.read == 0


def test_after_another_boot_only_what_was_flushed_is_served(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    another_boot(monkeypatch)
    with open_tiers(base, hot) as pool:
        assert_fallen_back(pool)


def test_after_another_boot_what_was_closed_is_all_there(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tiers(base, hot) as pool:
        leave(pool)
    another_boot(monkeypatch)
    shutil.rmtree(hot)
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)


def gone(hot: Path) -> None:
    shutil.rmtree(hot)


def emptied(hot: Path) -> None:
    shutil.rmtree(hot / "layers")


def truncated(hot: Path) -> None:
    os.truncate(hot / "layers" / "0001.kv", 4096)


def unclaimed(hot: Path) -> None:
    (hot / "hot.json").unlink()


def garbled(hot: Path) -> None:
    (hot / "hot.json").write_text('{"uuid": ')


def copied(hot: Path) -> None:
    # As a backup of the hot directory would come back: the same bytes in other files.
    shutil.copytree(hot, hot.with_name("copy"))
    shutil.rmtree(hot)
    hot.with_name("copy").rename(hot)


@pytest.mark.parametrize("harm", [gone, emptied, truncated, unclaimed, garbled, copied])
def test_a_hot_directory_that_is_not_what_it_was_is_made_anew(
    base: Path, hot: Path, harm: Callable[[Path], None]
) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    harm(hot)
    with open_tiers(base, hot) as pool:
        assert_fallen_back(pool)


def test_a_hot_directory_that_is_gone_does_not_keep_the_pool_from_being_opened(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    shutil.rmtree(hot)
    with mmkv.Pool.open(base) as pool:
        assert len(pool.stats().tiers) == 1
        assert_parked(pool, "kept", KEPT)
        assert pool.conversations() == ["kept"]


def test_an_older_generation_of_the_hot_directory_is_not_trusted(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    older = (hot / "hot.json").read_text()
    with open_tiers(base, hot) as pool:
        park(pool, "kept", text(3, 2))
    (hot / "hot.json").write_text(older)
    with open_tiers(base, hot) as pool:
        assert not any(hot_blocks(pool, "kept"))
        assert_parked(pool, "kept", text(3, 2))
        assert_parked(pool, "dirty", DIRTY)


def test_a_copy_of_a_pool_and_its_hot_directory_made_while_it_is_open(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    other_base, other_hot = base.with_name("copy"), hot.with_name("copy")
    shutil.copytree(base, other_base)
    shutil.copytree(hot, other_hot)
    # The original goes on: the same hot numbers hold other bytes from here on.
    pool.drop("dirty")
    park(pool, "new", text(5, 3))
    with open_tiers(other_base, other_hot) as copy:
        assert_fallen_back(copy)
    crash(pool)
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", GROWN)
        assert_parked(pool, "new", text(5, 3))
        assert "dirty" not in pool
    with open_tiers(other_base, other_hot) as copy:
        assert_as_left(copy)


def test_a_copy_of_a_pool_does_not_take_up_the_hot_directory_of_the_original(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    other = base.with_name("copy")
    shutil.copytree(base, other)
    pool.drop("dirty")
    park(pool, "new", text(5, 3))
    crash(pool)
    with mmkv.Pool.open(other) as copy:
        assert copy.conversations() == ["kept"]
        assert_parked(copy, "kept", KEPT)
    with pytest.raises(ValueError, match="is the hot tier of another pool"):
        open_tiers(other, hot)
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", GROWN)
        assert_parked(pool, "new", text(5, 3))
