"""The hot directory: where it may be, whose it is, and how large."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import mmkv
from mmkv.medium import medium_of
from tests.computed import (
    UNIFORM,
    assert_parked,
    park,
)
from tests.crashed import crash
from tests.mirror import check_pool
from tests.tiered import (
    BLOCK_BYTES,
    CAPACITY,
    open_tiers,
    text,
)
from tests.tiers.left import KEPT, assert_as_left, leave

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


def test_a_hot_directory_belongs_to_one_pool_at_a_time(tmp_path: Path, base: Path, hot: Path) -> None:
    other = tmp_path / "other"
    pool = open_tiers(base, hot)
    leave(pool)
    with pytest.raises(mmkv.PoolLocked):
        open_tiers(other, hot)
    crash(pool)
    with pytest.raises(ValueError, match="is the hot tier of another pool"):
        open_tiers(other, hot)
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)
    with open_tiers(other, hot) as second:
        park(second, "its own", text(7, 2))
    with open_tiers(base, hot) as pool:
        assert_as_left(pool)
    with open_tiers(other, hot) as second:
        assert_parked(second, "its own", text(7, 2))


def test_another_hot_directory_and_capacity(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    moved = hot.with_name("moved")
    with open_tiers(base, moved) as pool:
        assert_as_left(pool)
        assert pool.stats().tiers[0].directory == str(moved)
    assert not list((hot / "layers").iterdir()), "the RAM of the former one is given back"


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_smaller_hot_capacity_is_kept_to_at_once(base: Path, hot: Path, close: bool, pinned: bool) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    park(pool, "large", text(4, 8))
    if pinned:
        pool.pin("large")
    if close:
        pool.close()
    else:
        crash(pool)
    for blocks in (12, 3, 16):
        with open_tiers(base, hot, hot_capacity=blocks * BLOCK_BYTES) as pool:
            tier = pool.stats().tiers[0]
            assert tier.capacity == blocks * BLOCK_BYTES
            assert tier.allocated <= tier.capacity
            assert sum(file.stat().st_blocks for file in (hot / "layers").iterdir()) * 512 <= tier.capacity
            assert_as_left(pool)
            assert_parked(pool, "large", text(4, 8))


def test_a_hot_tier_is_given_up(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    leave(pool)
    crash(pool)
    with mmkv.Pool.open(base, hot=False) as pool:
        assert len(pool.stats().tiers) == 1
        assert_as_left(pool)
    assert not list((hot / "layers").iterdir()), "its RAM is given back"
    with mmkv.Pool.open(base) as pool:
        assert len(pool.stats().tiers) == 1
        assert_as_left(pool)


@pytest.mark.skipif(medium_of("/var/tmp").in_ram, reason="/var/tmp is in RAM")
def test_a_hot_directory_on_a_disk_is_refused(base: Path, tmp_path: Path) -> None:
    if medium_of(tmp_path).in_ram:
        pytest.skip("no disk")
    with pytest.raises(ValueError, match="not in RAM"):
        open_tiers(base, tmp_path / "hot")
    assert not (tmp_path / "hot").exists()
    with mmkv.Pool.open(base, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", KEPT)


def test_hot_directories_that_are_something_else_are_refused(ram_path: Path, base: Path, hot: Path) -> None:
    hot.mkdir(mode=0o700)
    (hot / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        open_tiers(base, hot)
    (hot / "thesis.txt").unlink()
    hot.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        open_tiers(base, hot)
    with pytest.raises(ValueError, match="the directory of the pool itself"):
        open_tiers(ram_path / "pool", ram_path / "pool")
    with pytest.raises(ValueError, match="needs a limit"):
        open_tiers(base, ram_path / "fresh", hot_capacity=None)
    with pytest.raises(ValueError, match="there is no hot tier"):
        mmkv.Pool.open(base, UNIFORM, capacity=CAPACITY, hot_capacity="1MiB")
    assert not base.exists()


def test_a_hot_file_system_that_is_full_to_the_last_page_can_be_closed_and_opened(base: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        hot = mounted / "hot"
        pool = open_tiers(base, hot, hot_capacity="4MiB")
        park(pool, "large", text(1, 40))
        assert_parked(pool, "large", text(1, 40))
        assert pool._hot is not None
        assert 0 < pool._hot.space.allocated_bytes < 512 << 10
        with (mounted / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        pool.close()
        with open_tiers(base, hot, hot_capacity="4MiB") as pool:
            assert_parked(pool, "large", text(1, 40))
            park(pool, "next", text(2, 5))
            assert_parked(pool, "next", text(2, 5))
            check_pool(pool, [])
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_hot_directory_in_use_is_named_with_its_owner(base: Path, hot: Path) -> None:
    error = f"the hot directory at {hot} is owned by process {os.getpid()}: close the pool that uses it there, or give"
    with open_tiers(base, hot) as pool:
        with pytest.raises(mmkv.PoolLocked, match=error) as caught:
            open_tiers(base.with_name("other"), hot)
        assert caught.value.pid == os.getpid()
        assert not base.with_name("other").exists(), "what is refused leaves nothing"
        park(pool, "chat", text(1, 1.5))
        assert_parked(pool, "chat", text(1, 1.5))


def test_a_hot_directory_of_somebody_elses_is_left_alone(base: Path, hot: Path) -> None:
    hot.mkdir(mode=0o700)
    (hot / "thesis.txt").write_text("dear reader")
    base.mkdir(mode=0o700)
    with pytest.raises(ValueError, match=r"holds 'thesis\.txt', which is not of a hot tier"):
        open_tiers(base, hot)
    assert [path.name for path in hot.iterdir()] == ["thesis.txt"]
    assert list(base.iterdir()) == []
    # What was there before stays.
    open_tiers(base, hot.with_name("own")).close()
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        open_tiers(base, hot)
    mmkv.Pool.open(base).close()


def test_a_new_hot_directory_that_becomes_none_goes_again(base: Path, hot: Path) -> None:
    with pytest.raises(ValueError, match="a capacity of 5 bytes is too small"):
        open_tiers(base, hot, hot_capacity=5)
    assert not base.exists()
    assert not hot.exists()
