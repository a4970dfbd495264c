"""Pools from somebody else: an error at little cost, and not one file outside touched."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from mmkv.layout import Plane
from tests.computed import UNIFORM, assert_parked, ids_of, park

CAPACITY = 4 << 20
IDS = ids_of((1, 3000))
_MAGIC = bytes.fromhex("d9d505f920a163d7")

_TWICE = (
    "INSERT INTO extents SELECT version, 0, 7, first, 1 FROM extents WHERE ordinal = 0 LIMIT 1;"
    "UPDATE versions SET tokens = tokens + 512, hashes = CAST(hashes || zeroblob(8) AS BLOB)"
)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """The directory of a closed pool with one conversation."""
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
    return tmp_path / "pool"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A directory that has nothing to do with any pool, and is as it was after the test."""
    directory = tmp_path / "precious"
    (directory / "layers").mkdir(parents=True)
    for name in ("letter.txt", "layers/0000.kv", "layers/0001.kv"):
        (directory / name).write_bytes(b"irreplaceable\n" * 5000)
    return directory


def picture(directory: Path) -> dict[str, Any]:
    """All names under a directory, with their bytes."""
    return {str(file): file.read_bytes() if file.is_file() else None for file in sorted(directory.rglob("*"))}


def run_sql(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path / "catalog.sqlite3", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def refuse(path: Path, text: str, **options: Any) -> None:
    started = time.monotonic()
    for readonly in (True, False):
        with pytest.raises(mmkv.PoolCorrupt, match=text):
            mmkv.Pool.open(path, readonly=readonly, **options)
    assert time.monotonic() - started < 5


def journal_naming(database: Path, other: Path) -> bytes:
    """A rollback journal of a database, of one page, that ends with the name of a super-journal."""
    page, nonce = database.read_bytes()[:4096], 12345
    head = _MAGIC + struct.pack(">IIIII", 1, nonce, database.stat().st_size // 4096, 512, 4096)
    sample = sum(page[at] for at in range(4096 - 200, 0, -200))
    name = os.fsencode(other)
    end = struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + _MAGIC
    return head.ljust(512, b"\0") + struct.pack(">I", 1) + page + struct.pack(">I", (nonce + sample) % (1 << 32)) + end


def test_a_journal_that_names_a_file_elsewhere(closed: Path, precious: Path) -> None:
    run_sql(closed, "PRAGMA journal_mode = DELETE")
    journal = closed / "catalog.sqlite3-journal"
    before = picture(precious)
    journal.write_bytes(journal_naming(closed / "catalog.sqlite3", precious / "letter.txt"))
    refuse(closed, "names another journal")
    assert picture(precious) == before
    # So SQLite alone would have treated it.
    sqlite3.connect(closed / "catalog.sqlite3").execute("SELECT * FROM properties").fetchall()
    assert not (precious / "letter.txt").exists()


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm", "-reserve"])
def test_a_link_beside_the_catalog(closed: Path, precious: Path, suffix: str) -> None:
    (closed / f"catalog.sqlite3{suffix}").unlink(missing_ok=True)
    (closed / f"catalog.sqlite3{suffix}").symlink_to(precious / "letter.txt")
    before = picture(precious)
    refuse(closed, "is a symbolic link")
    assert picture(precious) == before


def test_a_pipe_beside_the_catalog(closed: Path) -> None:
    os.mkfifo(closed / "catalog.sqlite3-wal")
    refuse(closed, "not a plain file")


def test_layers_that_lie_elsewhere(closed: Path, precious: Path) -> None:
    shutil.rmtree(closed / "layers")
    (closed / "layers").symlink_to(precious / "layers")
    before = picture(precious)
    refuse(closed, "is a symbolic link")
    assert picture(precious) == before


@pytest.mark.parametrize("name", ["tokens.kv", "layers/0000.kv", "pool.json", "lock"])
def test_a_file_that_lies_elsewhere(closed: Path, precious: Path, name: str) -> None:
    (closed / name).unlink()
    (closed / name).symlink_to(precious / "letter.txt")
    before = picture(precious)
    with pytest.raises(mmkv.MmkvError):
        mmkv.Pool.open(closed)
    assert picture(precious) == before


def test_a_lock_that_is_a_pipe(closed: Path) -> None:
    (closed / "lock").unlink()
    os.mkfifo(closed / "lock")
    with pytest.raises(mmkv.PoolCorrupt, match="lock is not a plain file"):
        mmkv.Pool.open(closed)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER UPDATE ON properties BEGIN DELETE FROM versions; END",
        "CREATE VIEW v AS SELECT 1",
        "CREATE INDEX i ON extents (abs(first))",
        "CREATE TABLE more (a)",
        "ALTER TABLE requests ADD COLUMN a DEFAULT (randomblob(1000000000))",
        "ALTER TABLE extents ADD COLUMN a AS (zeroblob(1000000000))",
        "CREATE VIRTUAL TABLE v USING dbstat",
        "CREATE VIRTUAL TABLE v USING fts5(a)",
    ],
)
def test_a_catalog_of_other_tables(closed: Path, statement: str) -> None:
    try:
        run_sql(closed, statement)
    except sqlite3.OperationalError as error:
        pytest.skip(str(error))
    refuse(closed, "does not hold the tables of a catalog")


def test_pages_that_hold_each_other(closed: Path) -> None:
    """Billions of rows in a small file: every level of a tree has the next one for all its children."""
    db = sqlite3.connect(closed / "catalog.sqlite3", isolation_level=None)
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("BEGIN")
    db.executemany("INSERT INTO extents VALUES (1000, 0, ?, 1, 1)", [(n,) for n in range(30_000)])
    db.execute("COMMIT")
    size = db.execute("PRAGMA page_size").fetchone()[0]
    (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'extents'").fetchone()
    db.close()
    data = bytearray((closed / "catalog.sqlite3").read_bytes())

    def children(page: int) -> list[int]:
        start = (page - 1) * size
        cells = struct.unpack_from(">H", data, start + 3)[0]
        return [start + 8, *(start + at for at in struct.unpack_from(f">{cells}H", data, start + 12))]

    leaves = [struct.unpack_from(">I", data, at)[0] for at in children(root)]
    levels = [root, *leaves[:4]]
    for page, child in itertools.pairwise(levels):
        for at in children(page):
            struct.pack_into(">I", data, at, child)
        if child != levels[-1]:
            data[(child - 1) * size : child * size] = data[(root - 1) * size : root * size]
    (closed / "catalog.sqlite3").write_bytes(data)
    refuse(closed, "more rows than its")


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("UPDATE segments SET number = (1 << 40) - 1 WHERE number = 0", "lists segment|truncated"),
        (_TWICE, "overlap"),
        ("UPDATE properties SET value = '9223372036854775807' WHERE key = 'capacity'", "capacity"),
        ("UPDATE versions SET hashes = zeroblob(300000000)", "too big|hashes"),
    ],
)
def test_numbers_that_cannot_be(closed: Path, statement: str, text: str) -> None:
    run_sql(closed, *statement.split(";"))
    refuse(closed, text)


def test_a_segment_far_out_in_a_sparse_file(closed: Path) -> None:
    """A file of many TB costs its maker nothing, and must cost its reader nothing either."""
    geometry = json.loads((closed / "pool.json").read_text())["sizes"]
    number = (1 << 31) // geometry["segment_blocks"]
    run_sql(closed, f"UPDATE segments SET number = {number} WHERE number = 0")
    for file in [closed / "tokens.kv", *closed.glob("layers/*")]:
        try:
            os.truncate(file, 1 << 43)
        except OSError:
            pytest.skip("the file system has no files as large")
    refuse(closed, "lists segment")


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        ("int8", (2,) * 100_000, "dimensions"),
        ("int8", (10**4000,) * 60, "a size of more than"),
        ("i4," * 1000, (1,), "unknown"),
        ("(2,3)f4", (1,), "unknown"),
        ("int8", (1 << 20, 1 << 20), "larger than"),
    ],
)
def test_planes_that_would_take_for_ever(dtype: str, shape: tuple[int, ...], text: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=text):
        Plane(dtype, shape)
    assert time.monotonic() - started < 1


def test_requests_that_are_none(closed: Path) -> None:
    with mmkv.Pool.open(closed) as pool:
        db = sqlite3.connect(closed / "catalog.sqlite3", isolation_level=None, timeout=10)
        for argument in ("x'ff00'", "17", "'nobody'", "'chat'"):
            db.execute(f"INSERT INTO requests (action, argument, created) VALUES ('drop', {argument}, 0)")
        db.close()
        deadline = time.monotonic() + 10
        while "chat" in pool:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# The hot tier, which a catalog names


@pytest.fixture
def warm(ram_path: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A closed pool with a hot tier, and the directory of that."""
    path, hot = tmp_path / "pool", ram_path / "hot"
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, hot=hot, hot_capacity=CAPACITY) as pool:
        if pool._opened.hot is None or not pool._opened.hot.medium.in_ram:
            pytest.skip("there is no tmpfs")
        park(pool, "chat", IDS)
    return path, hot


def _tell(directory: Path, **changes: object) -> None:
    catalog = Catalog(directory / "catalog.sqlite3")
    value = catalog.get_property("hot") or {"capacity": CAPACITY}
    catalog.set_property("hot", {**value, **changes})
    catalog.close()


@pytest.mark.parametrize("place", ["precious", "missing", "/proc/self", "/dev", "/\ud800", "/a\0b", "/x/" + "y" * 300])
def test_a_catalog_that_names_a_directory_elsewhere(closed: Path, precious: Path, place: str) -> None:
    where = str(precious.parent / place) if place in ("precious", "missing") else place
    _tell(closed, path=where)
    before = picture(precious)
    if "\0" in place:
        with pytest.raises(mmkv.PoolCorrupt, match="hot tier"):
            mmkv.Pool.open(closed)
    else:
        with mmkv.Pool.open(closed) as pool:
            assert len(pool.stats().tiers) == 1
            assert_parked(pool, "chat", IDS)
    assert picture(precious) == before
    assert not (precious.parent / "missing").exists()


@pytest.mark.parametrize("capacity", [1 << 62, 10**300, -1, 0, 1.5])
def test_a_hot_capacity_that_cannot_be(warm: tuple[Path, Path], capacity: Any) -> None:
    path, hot = warm
    _tell(path, capacity=capacity)
    before = picture(hot)
    with pytest.raises(mmkv.MmkvError):
        mmkv.Pool.open(path)
    assert {name: data for name, data in picture(hot).items() if "layers" in name} == {
        name: data for name, data in before.items() if "layers" in name
    }


def test_a_copy_of_a_pool_leaves_the_hot_tier_of_the_first_alone(
    warm: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, hot = warm
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    before = picture(hot)
    with mmkv.Pool.open(copy) as pool:
        assert len(pool.stats().tiers) == 1
        assert_parked(pool, "chat", IDS)
    assert "another copy of this pool" in caplog.text
    assert picture(hot) == before
    with mmkv.Pool.open(path) as pool:
        assert [tier.name for tier in pool.stats().tiers] == ["hot", "path"]
        assert_parked(pool, "chat", IDS)


def test_hot_layers_that_lie_elsewhere(warm: tuple[Path, Path], precious: Path) -> None:
    path, hot = warm
    shutil.rmtree(hot / "layers")
    (hot / "layers").symlink_to(precious / "layers")
    before = picture(precious)
    with pytest.raises(ValueError, match="symbolic link"):
        mmkv.Pool.open(path)
    assert picture(precious) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 60_000, '{"uuid": 1}', "9" * 60_000, "\x00" * 200])
def test_a_claim_that_is_none(warm: tuple[Path, Path], text: str) -> None:
    path, hot = warm
    (hot / "hot.json").write_text(text)
    before = picture(hot)
    with mmkv.Pool.open(path) as pool:
        assert len(pool.stats().tiers) == 1
        assert_parked(pool, "chat", IDS)
    assert picture(hot) == before


def test_freed_bytes_are_in_no_other_conversation(closed: Path) -> None:
    """A park writes all rows that it lists, and a take returns no row behind the last one."""
    marker = ids_of((9, 4096))
    with mmkv.Pool.open(closed) as pool:
        park(pool, "secret", marker)
        pool.drop("secret")
        for tokens in (1, 511, 513, 3000):
            ids = ids_of((tokens, tokens))
            park(pool, "next", ids, share=False)
            # Rows behind the last one keep the filling of the slot.
            assert_parked(pool, "next", ids)
            pool.drop("next")
        assert np.array_equal(marker, ids_of((9, 4096)))
