"""One owner, whatever happens to the files around it; and room that is less than the capacity."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv import space as space_module
from mmkv.catalog import Catalog
from mmkv.medium import Medium
from mmkv.store.files import PoolFile
from tests.computed import UNIFORM, assert_parked, ids_of, make_slot, park


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def opened(path: Path, capacity: str = "4MiB") -> mmkv.Pool:
    return mmkv.Pool.open(path, UNIFORM, capacity=capacity, min_free_ram=0)


def test_who_deletes_the_lock_file_lets_no_second_owner_in(path: Path) -> None:
    with opened(path):
        (path / "lock").unlink()
        with pytest.raises(mmkv.PoolLocked, match="lock file was deleted"):
            opened(path)
    opened(path).close()


def test_a_child_that_inherited_the_descriptors_does_not_keep_the_pool(path: Path) -> None:
    pool = opened(path)
    for fd in pool._opened.lock._fds:  # type: ignore[union-attr]
        os.set_inheritable(fd, True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        pool.close()
        opened(path).close()
    finally:
        child.communicate(b"\n")


def test_creators_that_race_make_one_pool(path: Path) -> None:
    errors: list[BaseException] = []
    pools: list[mmkv.Pool] = []
    start = threading.Barrier(8)

    def create() -> None:
        start.wait()
        try:
            pools.append(opened(path / "deeper" / "pool"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pools) == 1
    assert {type(error) for error in errors} == {mmkv.PoolLocked}
    pools[0].close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_catalog_that_is_gone_is_missed_at_once(path: Path, suffix: str, how: str) -> None:
    with opened(path) as pool, mmkv.Pool.open(path, readonly=True) as reader:
        park(pool, "a", ids_of((1, 600)))
        match = pool.match(ids_of((1, 600)))
        file = path / f"catalog.sqlite3{suffix}"
        kept = file.rename(path / "kept")
        if how == "replaced":
            file.write_bytes(kept.read_bytes())
        for call in (
            lambda: park(pool, "b", ids_of((2, 600))),
            lambda: pool.take("a", make_slot(UNIFORM, 700)),
            lambda: pool.take(match, make_slot(UNIFORM, 700)),
            lambda: pool.match(ids_of((1, 600))),
            lambda: pool.drop("a"),
            lambda: pool.fork("a", "b"),
            lambda: pool.pin("a"),
            lambda: pool.resize("5MiB"),
            lambda: pool.info("a"),
            lambda: "a" in pool,
            lambda: reader.match(ids_of((1, 600))),
            reader.conversations,
        ):
            with pytest.raises(mmkv.PoolCorrupt, match="deleted or replaced"):
                call()
        kept.rename(file)
        assert pool.conversations() == reader.conversations() == ["a"]
        park(pool, "b", ids_of((2, 600)))
        match.close()


def test_a_pool_whose_catalog_is_gone_is_closed_all_the_same(path: Path) -> None:
    pool = opened(path)
    park(pool, "a", ids_of((1, 600)))
    kept = (path / "catalog.sqlite3").rename(path / "kept")
    with pytest.raises(mmkv.PoolCorrupt, match="deleted or replaced"):
        pool.close()
    kept.rename(path / "catalog.sqlite3")
    opened(path).close()


def test_a_pool_that_shrinks_while_a_segment_is_allocated_stays_within_its_capacity(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, "8MiB") as pool:
        smallest = pool._space.geometry.smallest_capacity
        allocate = space_module._allocate

        def shrunk(files: Any, segment: int) -> None:
            allocate(files, segment)
            monkeypatch.setattr(space_module, "_allocate", allocate)
            pool.resize(smallest)

        monkeypatch.setattr(space_module, "_allocate", shrunk)
        park(pool, "a", ids_of((1, 600)))
        assert pool._space.allocated_bytes <= smallest


def no_room_after(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    """A file system with room for so many segments of each file."""
    allocate = PoolFile.allocate

    def refused(self: PoolFile, segment: int) -> None:
        if segment >= segments:
            raise mmkv.PoolFull(f"no room on the file system of {self.path} ({os.strerror(errno.ENOSPC)})")
        allocate(self, segment)

    monkeypatch.setattr(PoolFile, "allocate", refused)


def test_a_file_system_smaller_than_the_capacity_is_used_as_far_as_it_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room_after(monkeypatch, 2)
    with opened(path, "64MiB") as pool:
        for number in range(40):
            park(pool, f"c{number}", ids_of((number, 600)))
        assert pool.stats().evictions > 0
        assert "c39" in pool
        assert_parked(pool, "c39", ids_of((39, 600)))
        for name in pool.conversations():
            pool.pin(name)
        with pytest.raises(mmkv.PoolFull, match="nothing can be dropped for it: no room on the file system"):
            park(pool, "one more", ids_of((99, 600)))


def test_no_more_is_dropped_than_growth_leaves_wanting(path: Path) -> None:
    layer = mmkv.Layer({"k": mmkv.Plane("int8", (512,))}, {"s": mmkv.State("float32", (8,))})
    with mmkv.Pool.open(path, mmkv.Layout([layer], "large blocks"), capacity="4MiB", min_free_ram=0) as pool:
        assert pool._housekeeping is not None
        pool._housekeeping._chores = ()
        space = pool._space
        while space.blocks.free or space.may_grow("blocks"):
            park(pool, f"chat {len(pool)}", ids_of((len(pool), 500)))
        assert space.may_grow("checkpoints")
        # One conversation has the block; the records find room in a segment more.
        space.release(pool._room.reserve("many", 1, space.records.free + 4, (), tail_apart=False))
        assert pool._room.evictions == 1


def test_a_failed_growth_leaves_no_space_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, "64MiB") as pool:
        allocate = PoolFile.allocate

        def last_refuses(self: PoolFile, segment: int) -> None:
            if self is pool._space.files("blocks")[-1]:
                raise mmkv.PoolFull("none")
            allocate(self, segment)

        monkeypatch.setattr(PoolFile, "allocate", last_refuses)
        with pytest.raises(mmkv.PoolFull):
            park(pool, "a", ids_of((1, 600)))
        assert pool._space.allocated_bytes == 0
        assert sum(file.stat().st_blocks for file in (path / "layers").iterdir()) == 0


def test_growth_needs_no_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(path) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            assert pool._space.grow("blocks", pool._lock) == 0
        park(pool, "a", ids_of((1, 600)))


def test_a_park_when_the_main_thread_has_ended(path: Path) -> None:
    code = f"""
        import threading, mmkv
        layout = mmkv.Layout([mmkv.Layer({{"k": mmkv.Plane("int8", (64,))}})] * 3, "m")
        pool = mmkv.Pool.open({str(path)!r}, layout, capacity="8MiB", min_free_ram=0)
        slot = mmkv.Slot.allocate(layout, 700)
        def later():
            threading.main_thread().join()
            print(pool.park("a", slot, range(600)).result().tokens)
        threading.Thread(target=later).start()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout == "600\n", done.stderr


def test_an_io_error_of_a_full_file_system_is_pool_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as pool:
        park(pool, "a", ids_of((1, 600)))
        with pytest.raises(mmkv.PoolFull, match="free some space"), pool._catalog._errors():
            raise _sqlite_error("SQLITE_FULL")
        with pytest.raises(mmkv.MmkvError, match="cannot be used"), pool._catalog._errors():
            raise _sqlite_error("SQLITE_IOERR_WRITE")
        monkeypatch.setattr("mmkv.connection._is_full", lambda path, least: True)
        with pytest.raises(mmkv.PoolFull, match="free some space"), pool._catalog._errors():
            raise _sqlite_error("SQLITE_IOERR_WRITE")


def _sqlite_error(name: str) -> Exception:
    error = sqlite3.OperationalError(name)
    error.sqlite_errorcode = getattr(sqlite3, name)
    return error


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"path": b"pool"}, TypeError, "path must be text or a path, not b'pool'"),
        ({"path": "po\0ol"}, ValueError, "null character"),
        ({"deadline": "x"}, TypeError, "deadline must be seconds or None, not 'x'"),
        ({"deadline": float("nan")}, ValueError, "nan"),
        ({"max_idle": True}, TypeError, "max_idle must be seconds or None, not True"),
        ({"path": None}, TypeError, "path must be text or a path, not None"),
        ({"hot": b"hot"}, TypeError, "hot must be text or a path"),
        ({"hot": True}, TypeError, "hot must be text or a path, not True"),
    ],
)
def test_arguments_of_open(path: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"path": path, "layout": UNIFORM, "capacity": "4MiB"} | arguments
    with pytest.raises(error, match=text):
        mmkv.Pool.open(**given)


def test_seconds_may_be_of_numpy(path: Path) -> None:
    mmkv.Pool.open(path, UNIFORM, capacity="4MiB", deadline=np.int64(5), max_idle=np.float32(900)).close()


def test_a_file_to_import_that_is_no_text(path: Path) -> None:
    with opened(path) as pool, pytest.raises(TypeError, match="file must be text or a path, not b'chat'"):
        pool.import_file(b"chat")  # type: ignore[arg-type]


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/p\xff"))
    with opened(path) as pool:
        park(pool, "a", ids_of((1, 600)))
    with Catalog(path / "catalog.sqlite3", readonly=True).snapshot() as db:
        assert db.execute("SELECT count(*) FROM conversations").fetchone() == (1,)


@pytest.mark.parametrize("ids", [None, {1, 2}, iter([1, 2]), {1: 2}], ids=lambda ids: type(ids).__name__)
def test_ids_without_an_order(path: Path, ids: Any) -> None:
    with opened(path) as pool:
        with pytest.raises(TypeError, match=f"sequence of integers, not {type(ids).__name__}"):
            pool.match(ids)
        assert ["a"] not in pool


def test_a_lock_file_that_is_deleted_on_a_shared_file_system_is_missed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Medium(path, "nfs4", path.parent, (), 4096)
    with opened(path) as pool:
        pool.park("a", make_slot(UNIFORM, 700), ids_of((1, 600))).result()
    monkeypatch.setattr("mmkv.directory.medium_of", lambda _: shared)
    pool = opened(path)
    kept = (path / "lock").rename(path.parent / "kept")
    (path / "lock").touch()
    for call in (
        lambda: park(pool, "b", ids_of((2, 600))),
        lambda: pool.take("a", make_slot(UNIFORM, 700)),
        lambda: pool.drop("a"),
    ):
        with pytest.raises(mmkv.PoolCorrupt, match="another process may own it"):
            call()
    kept.rename(path / "lock")
    park(pool, "b", ids_of((2, 600)))
    pool.close()


def test_a_reader_in_the_process_of_the_owner_leaves_it_its_locks(path: Path) -> None:
    # The byte of a write-ahead log's index that every connection locks: who finds it free cuts the index.
    code = """
        import fcntl, sys
        with open(sys.argv[1], "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)
            except BlockingIOError:
                print("locked")
    """
    with opened(path) as pool:
        park(pool, "a", ids_of((1, 600)))
        mmkv.Pool.open(path, readonly=True).close()
        index = path / "catalog.sqlite3-shm"
        command = [sys.executable, "-c", textwrap.dedent(code), str(index)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "locked\n"


def test_a_creator_that_comes_second_finds_the_pool_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    listed = Path.iterdir

    def late(self: Path) -> Any:
        """Another process creates the pool between two looks at the directory."""
        if self == path:
            monkeypatch.setattr(Path, "iterdir", listed)
            pools.append(opened(path))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", late)
    with pytest.raises(mmkv.PoolLocked):
        opened(path)
    pools[0].close()
