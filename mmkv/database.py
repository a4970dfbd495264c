"""The catalog's file: short transactions on one connection, on a full file system, too, and a place for properties."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmkv.connection import BUSY_SECONDS, connect, sqlite_errors
from mmkv.distrust import limit_values, refuse_other_files
from mmkv.errors import PoolCorrupt, PoolFull
from mmkv.medium import medium_of
from mmkv.reserve import Reserve, headroom
from mmkv.schema import SCHEMA_VERSION, SET_PROPERTY, add_tables, make_tables, require_tables

__all__ = ["Database"]

_Result = TypeVar("_Result")
_PAGE_BYTES = 4096
_LEAST_LOG_PAGES, _MOST_LOG_PAGES = 16, 1000


class Database:
    """The database of one pool: short transactions on one connection, from any thread.

    Where the memory that a write-ahead log is indexed in is not shared with others, or not safe (`Medium.shared`,
    `Medium.has_safe_maps`), it has a rollback journal, and every transaction is synced.

    Where the file system is full, what makes room, what a pool cannot do without, and what needs no page more than
    there are, is written at the cost of a reserve (`mmkv.reserve`); all else is `PoolFull`.

    Parameters
    ----------
    path : Path
        The database file.
    create : bool
        Whether to make the tables where there are none.
    properties : mapping of str, optional
        What a catalog holds from its creation on, by the same transaction.
    readonly : bool
        Whether to open it for reading only, beside its owner.

    Raises
    ------
    PoolCorrupt
        The file is no catalog, is damaged or is of a newer format.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        readonly: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._open = True
        self._version = SCHEMA_VERSION
        if not create and not path.is_file():
            raise PoolCorrupt(f"{path} is missing")
        if path.is_symlink():
            raise PoolCorrupt(f"{path} is a symbolic link: a pool's files are plain files")
        if create and not path.exists():
            path.touch(mode=0o600)
        refuse_other_files(path)
        medium = medium_of(path)
        self._logs = not medium.shared and medium.has_safe_maps
        self._readonly = readonly
        self._reserve = Reserve(path)
        self._files: dict[Path, tuple[int, int] | None] = {}
        self.headroom = headroom(path.parent)
        """Bytes that segments leave free beside it."""
        try:
            self._open_database(create, readonly, properties or {})
        except PoolFull:
            if readonly or not self._reserve.give_up():
                raise
            self._open_database(create, readonly, properties or {})

    def _open_database(self, create: bool, readonly: bool, properties: Mapping[str, Any]) -> None:
        with self._errors():
            self._db = connect(self.path, readonly=readonly)
        self._files = {self.path: _identity(self.path)}
        try:
            with self._errors():
                limit_values(self._db)
                self._db.execute("PRAGMA trusted_schema = OFF")
                self._db.execute("PRAGMA cell_size_check = ON")
                if not readonly and not self._logs:
                    # A log that is there, as where the pool was moved, is read without an index in a file, and ended.
                    self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                    self._db.execute("PRAGMA journal_mode = DELETE")
                    self._db.execute("PRAGMA locking_mode = NORMAL")
                self._require_schema(create, readonly, properties)
                if not readonly and self._logs:
                    self._db.execute("PRAGMA journal_mode = WAL")
                    pages = self.headroom // 4 // _PAGE_BYTES
                    self._db.execute(
                        f"PRAGMA wal_autocheckpoint = {min(max(pages, _LEAST_LOG_PAGES), _MOST_LOG_PAGES)}"
                    )
                # Only a read opens the log.
                self._db.execute("PRAGMA user_version").fetchall()
        except BaseException:
            self._db.close()
            raise
        # SQLite keeps these as long as it has them open.
        companions = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
        self._files |= {file: found for file in companions if (found := _identity(file)) is not None}

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return sqlite_errors(self.path)

    def _require_schema(self, create: bool, readonly: bool, properties: Mapping[str, Any]) -> None:
        version = require_tables(self._db, self.path, may_be_empty=create)
        if version is None:
            with self.transaction(synced=True) as db:
                make_tables(db, properties)
            return
        if version < SCHEMA_VERSION and not readonly:
            with self.transaction(synced=True) as db:
                add_tables(db, version)
        self._version = version if readonly else SCHEMA_VERSION

    @property
    def has_residents(self) -> bool:
        """Whether the format of the catalog knows of a hot tier."""
        return self._version >= 2

    @property
    def has_units(self) -> bool:
        """Whether the format of the catalog knows of checksums."""
        return self._version >= 3

    def damage(self) -> list[str]:
        """What SQLite finds wrong with the file itself. Costs a pass over all of it."""
        with self._lock, self._errors():
            rows = self._db.execute("PRAGMA integrity_check(20)").fetchall()
        return [str(row[0])[:300] for row in rows if row[0] != "ok"]

    @contextlib.contextmanager
    def transaction(self, *, synced: bool = False) -> Iterator[sqlite3.Connection]:
        """A write transaction: all of it or nothing. `synced` waits until it and all before it are on the medium."""
        with self._lock, self._errors():
            self.require_there()
            self._db.execute(f"PRAGMA synchronous = {'FULL' if synced or not self._logs else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def write(
        self, change: Callable[[sqlite3.Connection], _Result], *, synced: bool = False, needed: bool = False
    ) -> _Result:
        """A write transaction, tried again where the file system is full: with the room of the log and of the reserve.

        `needed` is one that makes room, or that a pool cannot do without; others must do with the pages that there are.
        """
        try:
            with self.transaction(synced=synced) as db:
                return change(db)
        except PoolFull:
            with self._lock:
                self._shorten_log()
                self._reserve.give_up()
                try:
                    with self.transaction(synced=synced) as db:
                        pages = _pages(db)
                        result = change(db)
                        if not needed and _pages(db) > pages:
                            raise
                        return result
                finally:
                    self._shorten_log()
                    self._reserve.keep()

    def _shorten_log(self) -> None:
        """Write the log back, as far as there is room and nobody reads, and give back the space that it takes."""
        if self._logs and not self._db.in_transaction:
            self._db.execute("PRAGMA busy_timeout = 0")
            # What cannot be written back stays in the log, which is as good.
            with self._errors(), contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_SECONDS)}")

    def keep_reserve(self) -> None:
        """Take the space for what must be written on a full file system, where it is not taken yet."""
        self._reserve.keep()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A short read transaction: what is read within is of one moment. One may be within another."""
        with self._lock, self._errors():
            within = self._db.in_transaction
            if within:
                yield self._db
                return
            self._db.execute("BEGIN")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                # Not even a failed statement may leave it open: no other transaction could ever begin.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def require_of(self, pool: Path, uuid: str) -> None:
        """Raise `PoolCorrupt` unless it is the catalog of the pool in a directory, whose UUID that is."""
        if self.get_property("uuid") != uuid:
            raise PoolCorrupt(f"{self.path} belongs to another pool than {pool / 'pool.json'}")

    def require_there(self) -> None:
        """Check that the file was not deleted or replaced, nor its log: what is written to it would be lost.

        Costs a `stat` of each.

        Raises
        ------
        PoolCorrupt
            It was.
        """
        for file, identity in self._files.items():
            if _identity(file) != identity:
                raise PoolCorrupt(
                    f"{file} was deleted or replaced while the pool is open: close the pool, and restore the file"
                )

    def change_counter(self) -> int:
        """Changes when another connection has written to the catalog. Costs no read of the disk."""
        with self._lock, self._errors():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def sync(self) -> None:
        """Wait until every transaction so far is on the medium."""
        self.set_property("synced_at", time.time(), synced=True)

    def get_property(self, key: str, default: Any = None) -> Any:
        """The JSON value under a key, such as `capacity`, or `default`."""
        with self._lock, self._errors():
            row = self._db.execute("SELECT value FROM properties WHERE key = ?", (key,)).fetchone()
        try:
            return default if row is None else json.loads(row[0])
        except (TypeError, ValueError, RecursionError) as error:
            raise PoolCorrupt(f"the catalog {self.path} is damaged: property {key!r}: {error}") from error

    def set_property(self, key: str, value: Any, *, synced: bool = False) -> None:
        """Keep a JSON value under a key."""
        row = (key, json.dumps(value))
        self.write(lambda db: db.execute(SET_PROPERTY, row), synced=synced, needed=True)

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                self._db.close()
                if not self._readonly:
                    # From what the log took.
                    self._reserve.keep()

    def leak(self) -> None:
        """Keep the connection from ever being closed in a forked child.

        SQLite's connections must not be used across a fork, and closing is a use: it could check-point the log that
        the parent still writes.
        """
        self._open = False
        # Not even the interpreter's end closes what has a reference too many.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))


def _pages(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA page_count").fetchone()[0])


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
