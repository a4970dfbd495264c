"""Pools on shared file systems, and catalogs that lie elsewhere. The system is made to say that a disk is NFS."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mmkv
from mmkv import medium as medium_module
from mmkv.catalog import Catalog
from mmkv.errors import MmkvError, PoolCorrupt
from mmkv.medium import Medium, boot_id, medium_of
from tests.computed import UNIFORM, assert_parked, ids_of, park

CAPACITY = "4MiB"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes directories that lie on a file system of a type, as far as the system tells."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(boot_id())
    lines = ["1 0 0:1 / / rw - ext4 /dev/x rw"]
    monkeypatch.setattr(medium_module, "_PROC", proc)

    def mount(name: str, fs_type: str, options: str = "rw") -> Path:
        place = tmp_path / name
        place.mkdir(mode=0o700)
        lines.append(f"{len(lines) + 1} 1 0:{len(lines) + 1} / {place} rw,relatime - {fs_type} server:/x {options}")
        (proc / "self/mountinfo").write_text("\n".join(lines) + "\n")
        return place

    (proc / "self/mountinfo").write_text(lines[0] + "\n")
    return mount


@pytest.fixture
def nfs(mount: Callable[..., Path]) -> Path:
    return mount("nfs", "nfs4", "rw,vers=4.2,local_lock=none")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    place = tmp_path / "local"
    place.mkdir(mode=0o700)
    return place


def journal_of(file: Path) -> str:
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as db:
        mode = db.execute("PRAGMA journal_mode").fetchone()[0]
    db.close()
    return str(mode)


def use(pool: mmkv.Pool) -> None:
    """Park, grow, match and drop."""
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    park(pool, "chat", ids)
    park(pool, "other", ids_of((2, 100)))
    pool.drop("other")
    assert_parked(pool, "chat", ids)


# Journals


def test_on_a_shared_file_system_there_is_no_log(nfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: set[int] = set()
    begin = Catalog.transaction

    @contextlib.contextmanager
    def transaction(self: Catalog, **options: bool) -> Iterator[sqlite3.Connection]:
        with begin(self, **options) as db:
            levels.add(db.execute("PRAGMA synchronous").fetchone()[0])
            yield db

    monkeypatch.setattr(Catalog, "transaction", transaction)
    with mmkv.Pool.open(nfs / "pool", UNIFORM, capacity=CAPACITY) as pool:
        use(pool)
        names = {file.name for file in (nfs / "pool").iterdir()}
        assert not {"catalog.sqlite3-wal", "catalog.sqlite3-shm"} & names
    assert levels == {2}, "every transaction is synced"
    assert journal_of(nfs / "pool/catalog.sqlite3") == "delete"


def test_a_pool_that_comes_to_another_medium_gets_its_journal(nfs: Path, local: Path) -> None:
    with mmkv.Pool.open(local / "pool", UNIFORM, capacity=CAPACITY) as pool:
        use(pool)
        assert journal_of(local / "pool/catalog.sqlite3") == "wal"
    shutil.copytree(local / "pool", nfs / "pool", copy_function=shutil.copy2)
    with mmkv.Pool.open(nfs / "pool") as pool:
        assert_parked(pool, "chat", ids_of((1, 1500)))
    assert journal_of(nfs / "pool/catalog.sqlite3") == "delete"
    shutil.rmtree(local / "pool")
    shutil.copytree(nfs / "pool", local / "pool")
    with mmkv.Pool.open(local / "pool") as pool:
        assert_parked(pool, "chat", ids_of((1, 1500)))
    assert journal_of(local / "pool/catalog.sqlite3") == "wal"


def test_readers_follow_the_owner(nfs: Path) -> None:
    with mmkv.Pool.open(nfs / "pool", UNIFORM, capacity=CAPACITY) as pool:
        with mmkv.Pool.open(nfs / "pool", readonly=True) as reader:
            assert len(reader) == 0
            use(pool)
            assert reader.conversations() == ["chat"]
        with pytest.raises(mmkv.PoolLocked):
            mmkv.Pool.open(nfs / "pool")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_reader_that_may_not_write_follows_too(nfs: Path) -> None:
    with mmkv.Pool.open(nfs / "pool", UNIFORM, capacity=CAPACITY) as pool:
        (nfs / "pool").chmod(0o500)
        with mmkv.Pool.open(nfs / "pool", readonly=True) as reader:
            (nfs / "pool").chmod(0o700)
            use(pool)
            assert reader.conversations() == ["chat"]


def test_what_is_no_catalog_keeps_its_journal(local: Path) -> None:
    file = local / "other.db"
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE x (y)")
    db.close()
    before = file.read_bytes()
    with pytest.raises(PoolCorrupt, match="not a catalog"):
        Catalog(file)
    assert file.read_bytes() == before


# Locks


@pytest.mark.parametrize(
    ("fs_type", "options", "locks"),
    [
        ("ext4", "rw", True),
        ("tmpfs", "rw", True),
        ("nfs4", "rw,local_lock=none", True),
        ("nfs", "rw,vers=3,local_lock=none", True),
        ("nfs", "rw,vers=3,nolock,local_lock=all", False),
        ("nfs", "rw,local_lock=flock", False),
        ("nfs", "rw,local_lock=posix", True),
        ("lustre", "rw,flock", True),
        ("lustre", "rw,localflock", False),
        ("wekafs", "rw", True),
        ("cifs", "rw,nobrl", False),
        ("smb3", "rw", True),
        ("ceph", "rw", True),
        ("9p", "rw", False),
        ("virtiofs", "rw", False),
        ("beegfs", "rw", False),
        ("fuse", "rw", False),
        ("fuse.glusterfs", "rw", False),
    ],
)
def test_whose_locks_reach_other_hosts(fs_type: str, options: str, locks: bool) -> None:
    assert Medium(Path("/x"), fs_type, Path("/x"), tuple(options.split(",")), 4096).locks_across_hosts is locks


def test_an_owner_hears_of_locks_that_do_not_reach(
    mount: Callable[..., Path], nfs: Path, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = mount("fuse", "fuse.sshfs")
    with mmkv.Pool.open(place / "pool", UNIFORM, capacity=CAPACITY):
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"{place / 'pool'} lies on fuse.sshfs, whose locks do not reach other hosts" in record.getMessage()
        mmkv.Pool.open(place / "pool", readonly=True).close()
    for fine in (nfs, local):
        mmkv.Pool.open(fine / "pool", UNIFORM, capacity=CAPACITY).close()
    assert caplog.records == [record]


# A catalog elsewhere


def test_a_catalog_elsewhere(nfs: Path, local: Path) -> None:
    path, file = nfs / "pool", local / "pool.sqlite3"
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file) as pool:
        use(pool)
        assert journal_of(file) == "wal"
        with mmkv.Pool.open(path, readonly=True, catalog=str(file)) as reader:
            assert reader.conversations() == ["chat"]
    assert sorted(entry.name for entry in path.iterdir()) == ["layers", "lock", "pool.json", "tokens.kv"]
    assert file.stat().st_mode & 0o777 == 0o600
    with mmkv.Pool.open(path, UNIFORM, catalog=file) as pool:
        assert_parked(pool, "chat", ids_of((1, 1500)))
    text = (path / "pool.json").read_text()
    assert json.loads(text)["catalog"] == "elsewhere"
    assert str(local) not in text


def test_without_it_the_error_says_to_give_it(tmp_path: Path, local: Path) -> None:
    path, file = tmp_path / "pool", local / "catalog"
    mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file).close()
    for options in ({}, {"readonly": True}, {"layout": UNIFORM, "capacity": CAPACITY}):
        with pytest.raises(ValueError, match=r"lies elsewhere: say where, with catalog=FILE"):
            mmkv.Pool.open(path, **options)


def test_a_catalog_is_not_looked_for_where_it_is_not(tmp_path: Path, local: Path) -> None:
    path = tmp_path / "pool"
    mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY).close()
    for options in ({}, {"readonly": True}):
        with pytest.raises(ValueError, match=f"lies in its directory, not at {local / 'catalog'}"):
            mmkv.Pool.open(path, catalog=local / "catalog", **options)
    assert not list(local.iterdir())


def test_a_catalog_of_another_pool_is_refused(tmp_path: Path, local: Path) -> None:
    for name in ("one", "two"):
        with mmkv.Pool.open(tmp_path / name, UNIFORM, capacity=CAPACITY, catalog=local / name) as pool:
            park(pool, "chat", ids_of((1, 10)))
    for options in ({}, {"readonly": True}):
        with pytest.raises(PoolCorrupt, match="belongs to another pool"):
            mmkv.Pool.open(tmp_path / "one", catalog=local / "two", **options)
    with pytest.raises(ValueError, match="may be the catalog of another one"):
        mmkv.Pool.open(tmp_path / "three", UNIFORM, capacity=CAPACITY, catalog=local / "two")
    assert not (tmp_path / "three/pool.json").exists()
    with mmkv.Pool.open(tmp_path / "two", catalog=local / "two") as pool:
        assert_parked(pool, "chat", ids_of((1, 10)))


def test_a_catalog_that_is_lost(tmp_path: Path, local: Path) -> None:
    path, file = tmp_path / "pool", local / "catalog"
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file) as pool:
        park(pool, "chat", ids_of((1, 10)))
    with pytest.raises(PoolCorrupt, match=f"has lost its catalog, which is not at {local / 'other'}"):
        mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=local / "other")
    with pytest.raises(PoolCorrupt, match="other is missing"):
        mmkv.Pool.open(path, readonly=True, catalog=local / "other")
    assert not (local / "other").exists()


def test_an_interrupted_creation_is_finished(tmp_path: Path, local: Path) -> None:
    path, file = tmp_path / "pool", local / "catalog"
    mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file).close()
    file.unlink()
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file) as pool:
        use(pool)


def test_places_that_are_refused(tmp_path: Path, local: Path) -> None:
    path = tmp_path / "pool"
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (local / "link").symlink_to(tmp_path / "target")
    (tmp_path / "alias").symlink_to(path)
    path.mkdir(mode=0o700)
    for file, text in {
        path / "c": "lie within the pool",
        path / "layers/c": "lie within the pool",
        tmp_path / "alias/c": "lie within the pool",
        local: "is a directory",
        tmp_path / "missing/c": "missing does not exist: make it for the catalog",
        open_to_all / "c": "can be written by others",
        local / "link": "may be the catalog of another one",
    }.items():
        with pytest.raises(ValueError, match=text):
            mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file)
    assert not list(path.iterdir())
    with pytest.raises(TypeError):
        mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=5)


def test_a_link_in_the_catalogs_place_is_refused(tmp_path: Path, local: Path) -> None:
    path, file = tmp_path / "pool", local / "catalog"
    mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, catalog=file).close()
    file.rename(local / "moved")
    file.symlink_to(local / "moved")
    with pytest.raises(PoolCorrupt, match="symbolic link"):
        mmkv.Pool.open(path, catalog=file)


def test_a_description_names_no_path(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY).close()
    file = path / "pool.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "catalog": "/etc/shadow"}))
    with pytest.raises(PoolCorrupt, match="its catalog is '/etc/shadow'"):
        mmkv.Pool.open(path)


def test_a_catalog_in_ram_of_a_pool_on_a_disk_is_told(
    tmp_path: Path, mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = mount("ram", "tmpfs")
    mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity=CAPACITY, catalog=place / "c").close()
    assert "is in RAM: the pool at" in caplog.text


@pytest.fixture
def cut_short(nfs: Path) -> Path:
    """A pool on a shared file system whose owner was killed in the middle of a transaction."""
    with mmkv.Pool.open(nfs / "pool", UNIFORM, capacity=CAPACITY) as pool:
        use(pool)
    file = nfs / "pool/catalog.sqlite3"
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN IMMEDIATE")
    # More than the cache holds, so that it is in the file before it is committed.
    db.executemany(
        "INSERT INTO requests (action, argument, created) VALUES ('x', ?, 0)", [("y" * 1000,) for _ in range(500)]
    )
    shutil.copytree(nfs / "pool", nfs / "cut")
    db.execute("ROLLBACK")
    db.close()
    assert (nfs / "cut/catalog.sqlite3-journal").stat().st_size > 0
    return nfs / "cut"


def test_a_transaction_that_was_cut_short_is_rolled_back(cut_short: Path) -> None:
    with mmkv.Pool.open(cut_short) as pool:
        assert_parked(pool, "chat", ids_of((1, 1500)))
        assert pool._catalog.requests() == []
    assert not (cut_short / "catalog.sqlite3-journal").exists()


def test_a_reader_does_not_see_it(cut_short: Path) -> None:
    with pytest.raises(MmkvError, match="cannot be used"):
        mmkv.Pool.open(cut_short, readonly=True)


def test_the_system_is_made_to_say_so(nfs: Path, tmp_path: Path) -> None:
    assert medium_of(nfs / "pool").shared
    assert not medium_of(tmp_path).shared
