"""The catalog: what is committed is there again, all of it or nothing, and what makes no sense is refused."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from mmkv.catalog import Catalog
from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.geometry import Extent
from mmkv.rows import Checkpoint, ConversationRow, VersionRow

Opened: TypeAlias = Callable[..., Catalog]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite3"


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    """Opens the catalog, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def opened(at: Path = path, **options: Any) -> Catalog:
            catalog = Catalog(at, **options)
            stack.callback(catalog.close)
            return catalog

        yield opened


def version(tokens: int = 5, *, synced: bool = False, created: float = 1000.0) -> VersionRow:
    hashes = np.arange(tokens, dtype=np.uint64) + np.uint64(2**63)
    extents = (Extent(7, 2), Extent(3, 1))
    return VersionRow(0, tokens, created, "boot", synced, hashes, extents, (Checkpoint(tokens, 9, True),))


def only(catalog: Catalog) -> ConversationRow:
    (row,) = catalog.load()
    return row


def test_a_version_is_there_again(opened: Opened) -> None:
    catalog = opened(create=True)
    put = catalog.put_version("chat/ü\x1b[1m", "space", version(), 17)
    catalog.close()
    row = only(opened())
    assert (row.name, row.namespace, row.pinned, row.taken, row.used) == ("chat/ü\x1b[1m", "space", False, None, 17)
    assert (row.created, row.parked, row.fallback) == (1000.0, 1000.0, None)
    found = row.version
    assert (found.id, found.tokens, found.boot, found.synced) == (put.id, 5, "boot", False)
    assert found.extents == put.extents
    assert found.checkpoints == put.checkpoints
    assert found.hashes.tolist() == put.hashes.tolist()


def test_hashes_are_left_out_where_nobody_needs_them(opened: Opened) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(), 1)
    assert len(catalog.load(hashes=False)[0].version.hashes) == 0


def test_a_new_version_takes_the_place_of_the_former(opened: Opened, path: Path) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(5), 1)
    catalog.put_version("a", "", version(6, created=2000.0), 2)
    row = only(catalog)
    assert (row.version.tokens, row.created, row.parked, row.fallback) == (6, 1000.0, 2000.0, None)
    counts = [_count(path, table) for table in ("versions", "extents", "checkpoints")]
    assert counts == [1, 2, 1], "of the former one nothing is left"


def test_a_fallback_is_kept_until_its_successor_is_synced(opened: Opened) -> None:
    catalog = opened(create=True)
    first = catalog.put_version("a", "", version(5, synced=True), 1)
    second = catalog.put_version("a", "", version(6), 2, keep_fallback=first.id)
    assert only(catalog).fallback is not None
    third = catalog.put_version("a", "", version(7), 3, keep_fallback=first.id)
    fallback = only(catalog).fallback
    assert fallback is not None
    assert (fallback.id, third.id > second.id) == (first.id, True)
    catalog.mark_synced([third.id])
    row = only(catalog)
    assert (row.version.synced, row.version.tokens, row.fallback) == (True, 7, None)


def test_a_fallback_can_be_the_newest_again(opened: Opened) -> None:
    catalog = opened(create=True)
    first = catalog.put_version("a", "", version(5, synced=True), 1)
    catalog.put_version("a", "", version(6), 2, keep_fallback=first.id)
    catalog.restore_fallback("a", first.id)
    row = only(catalog)
    assert (row.version.tokens, row.fallback) == (5, None)


def test_conversations_come_the_least_recently_used_first(opened: Opened) -> None:
    catalog = opened(create=True)
    for used, name in enumerate("abc"):
        catalog.put_version(name, "", version(), used)
    catalog.touch([("a", 3000.0, 9), ("b", None, 7)])
    assert [(row.name, row.taken) for row in catalog.load()] == [("c", None), ("b", None), ("a", 3000.0)]


def test_a_use_that_is_noted_late_does_not_undo_a_later_one(opened: Opened) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(), 8)
    catalog.touch([("a", 3000.0, 5)])
    assert (only(catalog).used, only(catalog).taken) == (8, 3000.0)


def test_dropping_leaves_nothing(opened: Opened, path: Path) -> None:
    catalog = opened(create=True)
    first = catalog.put_version("a", "", version(5, synced=True), 1)
    catalog.put_version("a", "", version(6), 2, keep_fallback=first.id)
    catalog.drop(["a", "nobody"])
    assert [_count(path, t) for t in ("conversations", "versions", "extents", "checkpoints")] == [0, 0, 0, 0]


def test_a_transaction_that_fails_changes_nothing(opened: Opened) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(5), 1)

    def fail_in_the_middle() -> None:
        with catalog.transaction() as db:
            db.execute("DELETE FROM conversations")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle()
    assert only(catalog).version.tokens == 5


def test_segments_are_listed_by_kind(opened: Opened) -> None:
    catalog = opened(create=True)
    for kind, number in (("blocks", 3), ("blocks", 0), ("checkpoints", 1)):
        catalog.add_segment(kind, number)
    catalog.remove_segment("blocks", 3)
    assert (catalog.segments("blocks"), catalog.segments("checkpoints")) == ([0], [1])


def test_properties_are_json_and_some_are_there_from_the_start(opened: Opened) -> None:
    catalog = opened(create=True, properties={"capacity": 5})
    catalog.set_property("owner", {"pid": 1})
    catalog.set_property("owner", {"pid": 2}, synced=True)
    assert catalog.get_property("capacity") == 5
    assert catalog.get_property("owner") == {"pid": 2}
    assert catalog.get_property("nothing", "default") == "default"


def test_requests_wait_in_order_until_they_are_removed(opened: Opened) -> None:
    catalog, other = opened(create=True), opened()
    before = catalog.change_counter()
    other.add_request("drop", "a")
    other.add_request("drop", "b")
    assert catalog.change_counter() != before
    assert [(request.action, request.argument) for request in catalog.requests()] == [("drop", "a"), ("drop", "b")]
    catalog.remove_requests([catalog.requests()[0].id])
    assert [request.argument for request in catalog.requests()] == ["b"]


def test_a_reader_neither_waits_for_a_writer_nor_holds_it_up(opened: Opened) -> None:
    owner = opened(create=True)
    owner.put_version("a", "", version(5), 1)
    reader = opened(readonly=True)
    with owner.transaction() as db:
        db.execute("DELETE FROM conversations")
        started = time.monotonic()
        assert only(reader).name == "a"
        assert time.monotonic() - started < 1
    with reader.snapshot():
        assert reader.load() == []
        owner.put_version("b", "", version(5), 2)
        assert reader.load() == [], "a snapshot is of one moment"
    assert only(reader).name == "b"


def test_a_reader_cannot_write(opened: Opened) -> None:
    opened(create=True)
    with pytest.raises(MmkvError, match="readonly"):
        opened(readonly=True).pin("a", pinned=True)


def test_only_its_user_may_read_it(opened: Opened, path: Path) -> None:
    opened(create=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_catalog_is_not_made_by_accident(opened: Opened, path: Path) -> None:
    with pytest.raises(PoolCorrupt, match="is missing"):
        opened()
    assert not path.exists()


def test_a_symbolic_link_is_refused(opened: Opened, path: Path, tmp_path: Path) -> None:
    opened(tmp_path / "real", create=True).close()
    path.symlink_to(tmp_path / "real")
    with pytest.raises(PoolCorrupt, match="symbolic link"):
        opened()


def test_another_database_is_refused(opened: Opened, path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebodys (thing)")
    db.close()
    with pytest.raises(PoolCorrupt, match="not a catalog"):
        opened()


def test_a_newer_format_is_refused(opened: Opened, path: Path) -> None:
    opened(create=True).close()
    _execute(path, "PRAGMA user_version = 4")
    with pytest.raises(PoolCorrupt, match="format 4, newer than 3"):
        opened()


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE extents",
        "CREATE TRIGGER t AFTER INSERT ON versions BEGIN DELETE FROM conversations; END",
        "CREATE VIEW v AS SELECT 1",
    ],
)
def test_another_schema_is_refused(opened: Opened, path: Path, statement: str) -> None:
    opened(create=True).close()
    _execute(path, statement)
    with pytest.raises(PoolCorrupt, match="does not hold the tables"):
        opened()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE extents SET first = -1",
        "UPDATE extents SET count = 0",
        "UPDATE extents SET count = 'many'",
        "UPDATE versions SET tokens = 0",
        "UPDATE versions SET hashes = x'0102'",
        "UPDATE versions SET created = 'today'",
        "UPDATE conversations SET version = 77",
        "UPDATE conversations SET name = x'00'",
        "UPDATE conversations SET used = -1",
        "UPDATE conversations SET parked = 1e300",
        "UPDATE checkpoints SET record = NULL",
        "UPDATE checkpoints SET record = -2",
        "DELETE FROM versions",
    ],
)
def test_rows_that_make_no_sense_are_an_error_and_nothing_else(opened: Opened, path: Path, statement: str) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(), 1)
    try:
        _execute(path, statement)
    except sqlite3.IntegrityError:
        return
    with pytest.raises(PoolCorrupt, match="is damaged"):
        catalog.load()


def test_a_damaged_page_is_an_error(opened: Opened, path: Path) -> None:
    catalog = opened(create=True)
    for used in range(300):
        catalog.put_version(str(used), "", version(50), used)
    catalog.close()
    data = bytearray(path.read_bytes())
    data[4096 * 2 : -4096] = b"\xee" * (len(data) - 4096 * 3)
    path.write_bytes(data)
    with pytest.raises(PoolCorrupt, match="damaged"):
        opened().load()


def test_a_full_medium_is_pool_full_and_loses_nothing(opened: Opened) -> None:
    catalog = opened(create=True)
    catalog.put_version("a", "", version(5), 1)
    pages = catalog._db.execute("PRAGMA page_count").fetchone()[0]
    catalog._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(PoolFull, match="free some space"):
        catalog.put_version("b", "", version(100_000), 2)
    assert only(catalog).name == "a"


def _execute(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()


def _count(path: Path, table: str) -> int:
    db = sqlite3.connect(path)
    (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    db.close()
    return int(count)
