"""A file system that is full: what makes room works, at the cost of a reserve; all else says so, and loses nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import medium as medium_module
from mmkv.catalog import Catalog
from mmkv.reserve import Reserve, headroom
from mmkv.unit_table import Bad, put_bad
from tests.computed import UNIFORM, assert_parked, ids_of, make_slot, park
from tests.mirror import check_pool

Mounted = Callable[..., Path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Mounts small file systems of their own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    places: list[Path] = []

    def mounted(*, mib: int, block_bytes: int | None = None) -> Path:
        """A tmpfs, or an ext4 with blocks of that size."""
        place = tmp_path / f"fs{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "mmkv-test", str(place)]
        if block_bytes is not None:
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("there is no mkfs.ext4")
            image = tmp_path / f"image{len(places)}"
            with image.open("wb") as file:
                file.truncate(mib << 20)
            made = ["mkfs.ext4", "-q", "-b", str(block_bytes), "-m", "0", str(image)]
            subprocess.run(made, check=True, capture_output=True)
            command = ["mount", "-o", "loop", str(image), str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mounted
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, *, but: int = 0) -> Path:
    """Fill a file system, to the last block save so many bytes."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 0
        try:
            while True:
                size += file.write(bytes(1024))
        except OSError:
            pass
    os.truncate(filler, max(0, size - but))
    os.sync()
    return filler


class FullConnection:
    """An SQLite connection whose writes fail for want of space, as long as there is a reserve."""

    def __init__(self, real: sqlite3.Connection, reserve: Path, at: str) -> None:
        self._real, self._reserve, self._at = real, reserve, at
        self._writes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """Fail, or execute."""
        if statement.startswith("BEGIN"):
            self._writes = statement == "BEGIN IMMEDIATE"
        if self._writes and statement.startswith(self._at) and self._reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._real.execute(statement, *arguments)


@pytest.fixture
def full(path: Path) -> Iterator[mmkv.Pool]:
    """A pool with five conversations whose catalog finds no space."""
    with mmkv.Pool.open(path, UNIFORM, capacity="8MiB") as pool:
        for number in range(5):
            park(pool, f"c{number}", ids_of((number, 600)))
        pool._housekeeping.stop()  # type: ignore[union-attr]
        pool.flush()
        catalog = pool._catalog
        with catalog._lock:
            catalog._db = FullConnection(catalog._db, path / "catalog.sqlite3-reserve", "COMMIT")  # type: ignore[assignment]
        yield pool


def test_what_makes_room_works_without_any(full: mmkv.Pool) -> None:
    for call in (
        lambda: full.drop("c0"),
        lambda: full.pin("c1"),
        lambda: full.unpin("c1"),
        lambda: full.resize("3MiB"),
        full.flush,
        # What is in quarantine must stay there.
        lambda: put_bad(full._catalog, [Bad("blocks", 1 << 20, 0, "k", 1.0)]),
    ):
        call()
        assert full._catalog._reserve.path.stat().st_size == 256 << 10
    assert full.conversations() == ["c1", "c2", "c3", "c4"]
    full._catalog._db = full._catalog._db._real  # type: ignore[attr-defined]
    for number in range(1, 5):
        assert_parked(full, f"c{number}", ids_of((number, 600)))
    check_pool(full, [])


def test_what_takes_more_pages_is_pool_full(full: mmkv.Pool) -> None:
    def fork_for_ever() -> None:
        for number in itertools.count():
            full.fork("c4", f"fork {number}")

    with pytest.raises(mmkv.PoolFull, match="free some space"):
        fork_for_ever()
    assert full._catalog._reserve.path.exists()
    # What goes makes room for what comes.
    for number in range(20):
        full.drop(f"fork {number}")
    full.fork("c4", "fork 0")
    park(full, "c4", ids_of((4, 900)))
    full._catalog._db = full._catalog._db._real  # type: ignore[attr-defined]
    assert_parked(full, "c4", ids_of((4, 900)))
    assert_parked(full, "fork 0", ids_of((4, 600)))
    check_pool(full, [])


def test_the_reserve_takes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve(tmp_path / "catalog")
    assert not reserve.give_up()
    real = os.statvfs(tmp_path)

    def left(size: int) -> None:
        free = os.statvfs_result((*real[:4], size // real.f_frsize, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: free)

    for free, held in [(0, 0), (100 << 10, 64 << 10), (0, 64 << 10), (64 << 10, 128 << 10), (1 << 30, 256 << 10)]:
        left(free)
        reserve.keep()
        assert (reserve.path.stat().st_size if reserve.path.exists() else 0) == held
        assert not held or reserve.path.stat().st_blocks * 512 >= held
    assert reserve.give_up()
    assert not reserve.path.exists()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.open(tmp_path / "none", os.O_RDONLY))
    reserve.keep()
    assert reserve.path.stat().st_size == 0


@pytest.mark.parametrize("mib", [1, 2])
def test_a_pool_that_fills_its_file_system_goes_on(mounted: Mounted, mib: int) -> None:
    place = mounted(mib=mib)
    with mmkv.Pool.open(place / "pool", UNIFORM, capacity="64MiB" if mib > 1 else "16MiB", min_free_ram=0) as pool:
        for number in range(60):
            park(pool, f"c{number}", ids_of((number, 600)))
        assert pool.stats().evictions > 0
        assert_parked(pool, "c59", ids_of((59, 600)))
        check_pool(pool, [])
        assert os.statvfs(place).f_bavail > 0


@pytest.mark.parametrize("block_bytes", [None, 1024], ids=["tmpfs", "ext4 of small blocks"])
def test_a_file_system_that_others_fill_is_got_out_of(mounted: Mounted, block_bytes: int | None) -> None:
    place = mounted(mib=8, block_bytes=block_bytes)
    path = place / "pool"
    ids = {f"c{number}": ids_of((number, 600)) for number in range(12)}
    pool = mmkv.Pool.open(path, UNIFORM, capacity="4MiB", min_free_ram=0)
    for name, each in ids.items():
        park(pool, name, each)
    filler = fill(place)

    def fork_for_ever() -> None:
        for number in itertools.count():
            pool.fork("c1", f"fork {number}")

    with pytest.raises(mmkv.PoolFull, match="free some space"):
        fork_for_ever()
    pool.drop("fork 0")
    pool.drop("c0")
    pool.flush()
    park(pool, "c0", ids["c0"])
    pool.resize(pool._space.geometry.smallest_capacity * 3)
    pool.close()
    for _ in range(3):
        with mmkv.Pool.open(path) as pool:
            kept = [name for name in pool.conversations() if name in ids]
            for name in kept:
                assert_parked(pool, name, ids[name])
            pool.drop(pool.conversations()[0])
    filler.unlink()
    with mmkv.Pool.open(path, capacity="4MiB") as pool:
        park(pool, "more", ids_of((99, 3000)))
        check_pool(pool, [])


def test_small_blocks_have_no_log_whose_index_is_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmkv.Pool.open(path, UNIFORM, capacity="4MiB") as pool:
        park(pool, "chat", ids_of((1, 600)))
        # As a crash leaves it.
        shutil.copytree(path, path.parent / "moved", ignore=shutil.ignore_patterns("*-shm"))
    monkeypatch.setattr(medium_module.Medium, "has_safe_maps", False)
    for place in (path, path.parent / "moved"):
        with mmkv.Pool.open(place) as pool:
            assert not list(place.glob("catalog.sqlite3-[ws]*"))
            assert_parked(pool, "chat", ids_of((1, 600)))
            with mmkv.Pool.open(place, readonly=True) as reader:
                assert reader.conversations() == ["chat"]
                pool.drop("chat")
                assert reader.conversations() == []


def test_a_reader_maps_no_index_without_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mmkv.Pool.open(path, UNIFORM, capacity="4MiB").close()
    monkeypatch.setattr(medium_module.Medium, "has_safe_maps", False)
    mmkv.Pool.open(path, readonly=True).close()
    real = os.statvfs(path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 8, *real[5:])))
    with pytest.raises(mmkv.PoolFull, match="free some space"):
        mmkv.Pool.open(path, readonly=True)
    monkeypatch.undo()
    monkeypatch.setattr(medium_module.Medium, "has_safe_maps", False)
    mmkv.Pool.open(path).close()
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 8, *real[5:])))
    # It has no log any more.
    mmkv.Pool.open(path, readonly=True).close()


@pytest.mark.parametrize("logged", [False, True], ids=["made there", "moved there"])
def test_no_opening_dies_of_small_blocks(mounted: Mounted, tmp_path: Path, logged: bool) -> None:
    place = mounted(mib=8, block_bytes=1024)
    where = tmp_path / "made" if logged else place / "pool"
    with mmkv.Pool.open(where, UNIFORM, capacity="1MiB", min_free_ram=0) as pool:
        park(pool, "chat", ids_of((1, 600)))
    if logged:
        shutil.copytree(where, place / "pool")
    code = """
        import sys, mmkv
        for readonly in (True, False):
            try:
                with mmkv.Pool.open(sys.argv[1], readonly=readonly) as pool:
                    print(len(pool))
            except mmkv.PoolFull:
                print("full")
    """
    for free in (12, 30):
        filler = fill(place, but=free << 10)
        command = [sys.executable, "-c", textwrap.dedent(code), str(place / "pool")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) <= {"1", "full"}
        filler.unlink()


def test_headroom_is_a_part_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert headroom(tmp_path) == 16 << 20
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((real[0], 4096, 512, *real[3:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    assert headroom(tmp_path) == 128 << 10


def test_growth_leaves_the_catalog_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmkv.Pool.open(path, UNIFORM, capacity="64MiB", min_free_ram=0) as pool:
        real = os.statvfs(path)
        free = pool._space.segment_bytes("blocks") + pool._catalog.headroom
        too_few = os.statvfs_result((*real[:4], free // real.f_frsize - 1, *real[5:]))
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: too_few)
            with pytest.raises(mmkv.PoolFull, match="are the catalog's; free some space"):
                park(pool, "a", ids_of((1, 600)))
        assert pool._space.allocated_bytes == 0
        pool._room._refused_until = 0
        park(pool, "a", ids_of((1, 600)))


def test_a_log_that_is_full_is_written_back(path: Path) -> None:
    with mmkv.Pool.open(path, UNIFORM, capacity="4MiB") as pool:
        park(pool, "a", ids_of((1, 600)))
        pool._housekeeping.stop()  # type: ignore[union-attr]
        log = path / "catalog.sqlite3-wal"
        assert log.stat().st_size > 0
        real = pool._catalog._db
        # Not even the reserve is enough.
        pool._catalog._db = FullConnection(real, path, "COMMIT")  # type: ignore[assignment]
        with pytest.raises(mmkv.PoolFull):
            pool.fork("a", "b")
        pool._catalog._db = real
        assert log.stat().st_size == 0
        assert pool.take("a", make_slot(UNIFORM, 700)).result().tokens == 600


def test_a_request_is_put_on_a_full_file_system(path: Path) -> None:
    with mmkv.Pool.open(path, UNIFORM, capacity="4MiB") as pool:
        park(pool, "a", ids_of((1, 600)))
        other = Catalog(path / "catalog.sqlite3")
        other._db = FullConnection(other._db, path / "catalog.sqlite3-reserve", "COMMIT")  # type: ignore[assignment]
        other.add_request("drop", "a")
        other._db = other._db._real  # type: ignore[attr-defined]
        other.close()
        deadline = time.monotonic() + 5
        while "a" in pool:
            assert time.monotonic() < deadline
            time.sleep(0.02)
