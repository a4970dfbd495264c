"""The catalog: the SQLite database of what is parked and where."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from mmkv.distrust import bounded_rows, limit_values, refuse_other_files, schema_of
from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.geometry import Extent
from mmkv.medium import medium_of
from mmkv.refused import lacks_files, refusal
from mmkv.reserve import Reserve, headroom

__all__ = ["Catalog", "Checkpoint", "ConversationRow", "Request", "Resident", "VersionRow"]

_Result = TypeVar("_Result")
_APPLICATION_ID = 0x6D6D6B76
_SCHEMA_VERSION = 3
_BUSY_SECONDS = 10.0
# Some 3,000 years: what a calendar can print.
_MAX_TIME = 1e11
_MOST_HOT = 1 << 40
# SQLite fails in other ways than `SQLITE_FULL`, too, where less than this is free.
_LEAST_FREE_BYTES = 1 << 20
_PAGE_BYTES = 4096
_LEAST_LOG_PAGES, _MOST_LOG_PAGES = 16, 1000
# What SQLite's index of a write-ahead log takes, and a log.
_LOG_BYTES = 64 << 10
# What it keeps open: the database, its log or journal, the index, and a directory.
_FILES = 4
_SET_PROPERTY = "INSERT INTO properties VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"

# Of `tier`, 0 is the pool's own files, which hold every version, and 1 the hot ones, which have segments of their own.
# `checksums` is empty: those of units belong to numbers, which versions share.
_RESIDENTS = """
CREATE TABLE residents (
    kind TEXT NOT NULL, number INTEGER NOT NULL, hot INTEGER NOT NULL, dirty INTEGER NOT NULL,
    PRIMARY KEY (kind, number)) WITHOUT ROWID;
"""
_UNITS = """
CREATE TABLE units_of_blocks (number INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, checksums BLOB NOT NULL);
CREATE TABLE units_of_checkpoints (number INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, checksums BLOB NOT NULL);
CREATE TABLE quarantine (
    kind TEXT NOT NULL, number INTEGER NOT NULL, layer INTEGER NOT NULL, plane TEXT NOT NULL, noticed REAL NOT NULL,
    PRIMARY KEY (kind, number)) WITHOUT ROWID;
"""
_SCHEMA = (
    """
CREATE TABLE properties (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL,
    version INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, parked REAL NOT NULL, taken REAL, used INTEGER NOT NULL);
CREATE TABLE versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, conversation INTEGER NOT NULL, tokens INTEGER NOT NULL,
    created REAL NOT NULL, boot TEXT NOT NULL, synced INTEGER NOT NULL, hashes BLOB NOT NULL, checksums BLOB);
CREATE INDEX versions_of_conversation ON versions (conversation);
CREATE TABLE extents (
    version INTEGER NOT NULL, tier INTEGER NOT NULL DEFAULT 0, ordinal INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (version, tier, ordinal)) WITHOUT ROWID;
CREATE TABLE checkpoints (
    version INTEGER NOT NULL, tokens INTEGER NOT NULL, tier INTEGER NOT NULL DEFAULT 0, record INTEGER NOT NULL,
    boundary INTEGER NOT NULL, checksums BLOB, PRIMARY KEY (version, tokens, tier)) WITHOUT ROWID;
CREATE TABLE segments (
    tier INTEGER NOT NULL DEFAULT 0, kind TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (tier, kind, number)) WITHOUT ROWID;
CREATE TABLE requests (id INTEGER PRIMARY KEY AUTOINCREMENT, action TEXT NOT NULL, argument TEXT NOT NULL,
    created REAL NOT NULL);
"""
    + _RESIDENTS
    + _UNITS
)
# What each version of the schema added.
_ADDED = {2: _RESIDENTS, 3: _UNITS}
# SQLite makes this one itself.
_TABLES = schema_of([*_SCHEMA.split(";"), "CREATE TABLE sqlite_sequence(name,seq)"])


class Checkpoint(NamedTuple):
    """The states of all layers at one token count."""

    tokens: int
    record: int
    boundary: bool


@dataclass(frozen=True, slots=True, eq=False)
class VersionRow:
    """One committed state of a conversation, as the catalog keeps it.

    Attributes
    ----------
    hashes : ndarray of uint64
        The chain hash after each whole block; empty where it was not asked for.
    synced : bool
        Whether its bytes and this row are on the medium.
    boot : str
        The boot in which it was parked.
    """

    id: int
    tokens: int
    created: float
    boot: str
    synced: bool
    hashes: npt.NDArray[np.uint64]
    extents: tuple[Extent, ...]
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ConversationRow:
    """One conversation, as the catalog keeps it.

    Attributes
    ----------
    version : VersionRow
        The newest version.
    fallback : VersionRow or None
        The last version that is on the medium, while the newest one is not.
    used : int
        Rises with every park and take: the order of least recent use, whatever the clock does.
    """

    id: int
    name: str
    namespace: str
    pinned: bool
    created: float
    parked: float
    taken: float | None
    used: int
    version: VersionRow
    fallback: VersionRow | None


class Resident(NamedTuple):
    """A number of the path that lies in the hot tier, too.

    Attributes
    ----------
    kind : str
        `blocks` or `checkpoints`.
    number, hot : int
        The number at the path, and the one in the hot tier.
    dirty : bool
        Whether the path does not have its bytes yet.
    """

    kind: str
    number: int
    hot: int
    dirty: bool


class Request(NamedTuple):
    """What another process asks the owner to do."""

    id: int
    action: str
    argument: str


class Catalog:
    """The catalog of one pool: short transactions on one connection, from any thread.

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
        self._version = _SCHEMA_VERSION
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
            self._db = self._connect(readonly)
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
                self._check_schema(create, readonly, properties)
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

    def _connect(self, readonly: bool) -> sqlite3.Connection:
        uri = f"file:{quote(os.fsencode(self.path))}"
        wal = self.path.with_name(self.path.name + "-wal")
        if readonly and not medium_of(self.path).has_safe_maps and (wal.exists() or _is_logged(uri)):
            self._require_room_for_index()
        if readonly and not wal.exists() and not os.access(self.path.parent, os.W_OK) and _has_log(self.path):
            # A reader of a WAL database makes files beside it; where it may not, and nobody writes, it needs none.
            uri += "?mode=ro&immutable=1"
        else:
            uri += "?mode=ro" if readonly else "?mode=rw"
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)

    def _require_room_for_index(self) -> None:
        """Refuse where SQLite's index of a log would be mapped, and the file system has no room for its pages."""
        found = os.statvfs(self.path.parent)
        if found.f_bavail * found.f_frsize < _LOG_BYTES:
            raise PoolFull(f"reading {self.path} needs {_LOG_BYTES} bytes beside it: free some space")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", None)
            # Of a full file system SQLite says any of these, by which of its files did not grow, or was not made.
            least = {sqlite3.SQLITE_IOERR: _LEAST_FREE_BYTES, sqlite3.SQLITE_CANTOPEN: _LOG_BYTES}.get(_primary(code))
            if code == sqlite3.SQLITE_FULL or (least is not None and _is_full(self.path, least)):
                raise PoolFull(f"no room on the file system of {self.path}: free some space") from error
            what = f"the catalog {self.path} cannot be used"
            if _primary(code) == sqlite3.SQLITE_CANTOPEN and lacks_files(_FILES):
                raise refusal(what, OSError(errno.EMFILE, "")) from error
            raise MmkvError(f"{what}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise PoolCorrupt(f"the catalog {self.path} is damaged: {error}") from error

    def _check_schema(self, create: bool, readonly: bool, properties: Mapping[str, Any]) -> None:
        found = self._db.execute("SELECT type, name, sql FROM sqlite_master").fetchmany(2 * len(_TABLES))
        if not found and create:
            with self.transaction(synced=True) as db:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                db.executemany(
                    "INSERT INTO properties VALUES (?, ?)", [(key, json.dumps(properties[key])) for key in properties]
                )
            return
        application, version = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application != _APPLICATION_ID:
            raise PoolCorrupt(f"{self.path} is not a catalog of mmkv")
        if version > _SCHEMA_VERSION:
            raise PoolCorrupt(f"{self.path} is of format {version}, newer than {_SCHEMA_VERSION}")
        added = [_ADDED[later] for later in range(max(version, 1) + 1, _SCHEMA_VERSION + 1)]
        missing = {name for tables in added for name in schema_of(tables.split(";"))}
        expected = {name: text for name, text in _TABLES.items() if name not in missing}
        # Indexes of SQLite's own have no text. Triggers, views and virtual tables would show here.
        if schema_of(text for _, _, text in found if text) != expected or any(
            kind not in ("table", "index") or (text is None and not name.startswith("sqlite_autoindex_"))
            for kind, name, text in found
        ):
            raise PoolCorrupt(f"{self.path} does not hold the tables of a catalog")
        if added and not readonly:
            with self.transaction(synced=True) as db:
                for statement in ";".join(added).split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        self._version = version if readonly else _SCHEMA_VERSION

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
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")

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

    def load(self, *, hashes: bool = True) -> list[ConversationRow]:
        """Every conversation, the least recently used first, read in one short transaction.

        Parameters
        ----------
        hashes : bool
            Whether to read the chain hashes, 8 bytes a block.

        Raises
        ------
        PoolCorrupt
            A row does not make sense.
        """
        column = "hashes" if hashes else "x''"
        with self.snapshot() as db:
            conversations, versions, extents, checkpoints = (
                bounded_rows(db, self.path, query)
                for query in (
                    "SELECT id, name, namespace, version, pinned, created, parked, taken, used FROM conversations",
                    f"SELECT id, conversation, tokens, created, boot, synced, {column} FROM versions",
                    "SELECT version, ordinal, first, count FROM extents WHERE tier = 0",
                    "SELECT version, tokens, record, boundary FROM checkpoints WHERE tier = 0",
                )
            )
        try:
            return _assemble(conversations, versions, extents, checkpoints)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise PoolCorrupt(f"the catalog {self.path} is damaged: {error}") from error

    def segments(self, kind: str, tier: int = 0) -> list[int]:
        """The allocated segments of `kind`, `"blocks"` or `"checkpoints"`, in the files of a tier."""
        with self.snapshot() as db:
            query = "SELECT number FROM segments WHERE tier = ? AND kind = ?"
            numbers = [row[0] for row in bounded_rows(db, self.path, query, (tier, kind))]
        if any(type(number) is not int or not 0 <= number < 1 << 40 for number in numbers):
            raise PoolCorrupt(f"the catalog {self.path} is damaged: segments {str(numbers[:4])[:200]}")
        return sorted(numbers)

    def add_segment(self, kind: str, number: int, tier: int = 0) -> None:
        """Record an allocated segment."""
        with self.transaction() as db:
            db.execute("INSERT INTO segments (tier, kind, number) VALUES (?, ?, ?)", (tier, kind, number))

    def remove_segment(self, kind: str, number: int, tier: int = 0) -> None:
        """Forget a segment before its space is given back."""
        query = "DELETE FROM segments WHERE tier = ? AND kind = ? AND number = ?"
        self.write(lambda db: db.execute(query, (tier, kind, number)), synced=tier == 0, needed=True)

    def residents(self) -> list[Resident]:
        """What lies in the hot tier. Rows of numbers that no version holds mean nothing.

        Raises
        ------
        PoolCorrupt
            A row does not make sense.
        """
        if not self.has_residents:
            return []
        with self.snapshot() as db:
            rows = bounded_rows(db, self.path, "SELECT kind, number, hot, dirty FROM residents")
        try:
            return [
                Resident(kind, _count(number, "a number"), _count(hot, "a number", most=_MOST_HOT), bool(dirty))
                for kind, number, hot, dirty in rows
            ]
        except (TypeError, ValueError) as error:
            raise PoolCorrupt(f"the catalog {self.path} is damaged: {error}") from error

    def change_residents(self, arrived: Iterable[Resident] = (), gone: Iterable[tuple[str, int]] = ()) -> None:
        """Note what arrived in the hot tier, and what is there no longer, in one transaction."""
        arrived, gone = list(arrived), list(gone)
        self.write(lambda db: _change_residents(db, arrived, gone), needed=not arrived)

    def mark_clean(self, numbers: Iterable[tuple[str, int]]) -> None:
        """Note that the path has the bytes of these kinds and numbers, synced or not."""
        clean = list(numbers)
        query = "UPDATE residents SET dirty = 0 WHERE kind = ? AND number = ?"
        self.write(lambda db: db.executemany(query, clean), needed=True)

    def forget_hot(self, properties: Mapping[str, Any]) -> None:
        """Forget all that lies in the hot tier and its segments, and set properties; synced, in one transaction."""

        def forget(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM residents")
            db.execute("DELETE FROM segments WHERE tier = 1")
            db.executemany(_SET_PROPERTY, [(key, json.dumps(value)) for key, value in properties.items()])

        self.write(forget, synced=True, needed=True)

    def put_version(
        self,
        name: str,
        namespace: str,
        version: VersionRow,
        used: int,
        *,
        keep_fallback: int | None = None,
        synced: bool = False,
        residents: Iterable[Resident] = (),
        cold: Iterable[tuple[str, int]] = (),
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> VersionRow:
        """Commit a version as the newest of its conversation, which is made where it is new.

        One transaction; older versions of the conversation are forgotten, save `keep_fallback`. Of its new numbers,
        `residents` lie in the hot tier, and `cold`, by kind and number, do not, whatever a former use left behind.
        What `also` changes is a part of the transaction.

        Returns
        -------
        VersionRow
            The version with its id.
        """
        now = version.created
        residents, cold = list(residents), list(cold)

        def put(db: sqlite3.Connection) -> VersionRow:
            row = db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
            if row is None:
                conversation = _inserted(
                    db,
                    "INSERT INTO conversations (name, namespace, version, created, parked, used) "
                    "VALUES (?, ?, 0, ?, ?, ?)",
                    (name, namespace, now, now, used),
                )
            else:
                conversation = row[0]
            number = _inserted(
                db,
                "INSERT INTO versions (conversation, tokens, created, boot, synced, hashes) VALUES (?, ?, ?, ?, ?, ?)",
                (conversation, version.tokens, now, version.boot, int(version.synced), version.hashes.tobytes()),
            )
            committed = replace(version, id=number)
            db.executemany(
                "INSERT INTO extents (version, ordinal, first, count) VALUES (?, ?, ?, ?)",
                [(committed.id, ordinal, *extent) for ordinal, extent in enumerate(version.extents)],
            )
            db.executemany(
                "INSERT INTO checkpoints (version, tokens, record, boundary) VALUES (?, ?, ?, ?)",
                [(committed.id, point.tokens, point.record, int(point.boundary)) for point in version.checkpoints],
            )
            db.execute(
                "UPDATE conversations SET version = ?, parked = ?, used = ? WHERE id = ?",
                (committed.id, now, used, conversation),
            )
            _forget_versions(db, conversation, keep=(committed.id, keep_fallback))
            _change_residents(db, residents, cold)
            if also is not None:
                also(db)
            return committed

        return self.write(put, synced=synced)

    def drop(self, names: Iterable[str]) -> None:
        """Forget conversations and all their versions, in one transaction."""
        names = list(names)

        def forget(db: sqlite3.Connection) -> None:
            for name in names:
                row = db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    _forget_versions(db, row[0], keep=())
                    db.execute("DELETE FROM conversations WHERE id = ?", row)

        self.write(forget, needed=True)

    def pin(self, name: str, pinned: bool) -> None:
        """Set whether a conversation is pinned."""
        query = "UPDATE conversations SET pinned = ? WHERE name = ?"
        self.write(lambda db: db.execute(query, (int(pinned), name)), needed=True)

    def touch(self, uses: Iterable[tuple[str, float | None, int]]) -> None:
        """Note uses: name, time of the last take or `None`, and order of use."""
        # A park since then may have noted a later use.
        query = "UPDATE conversations SET taken = coalesce(?, taken), used = max(?, used) WHERE name = ?"
        rows = [(taken, used, name) for name, taken, used in uses]
        self.write(lambda db: db.executemany(query, rows))

    def mark_synced(self, versions: Sequence[int]) -> None:
        """Note, synced, that the bytes of `versions` are on the medium, so that no fallback is needed."""

        def mark(db: sqlite3.Connection) -> None:
            for version in versions:
                db.execute("UPDATE versions SET synced = 1 WHERE id = ?", (version,))
                row = db.execute("SELECT id FROM conversations WHERE version = ?", (version,)).fetchone()
                if row is not None:
                    _forget_versions(db, row[0], keep=(version,))

        self.write(mark, synced=True, needed=True)

    def restore_fallback(self, name: str, version: int) -> None:
        """Make an older version the newest of its conversation, and forget the others."""

        def restore(db: sqlite3.Connection) -> None:
            (conversation,) = db.execute("SELECT id FROM conversations WHERE name = ?", (name,)).fetchone()
            db.execute("UPDATE conversations SET version = ? WHERE id = ?", (version, conversation))
            _forget_versions(db, conversation, keep=(version,))

        self.write(restore, needed=True)

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
        self.write(lambda db: db.execute(_SET_PROPERTY, row), synced=synced, needed=True)

    def add_request(self, action: str, argument: str) -> int:
        """Ask the owner to do something; it looks several times a second. Returns the request's number."""
        query, row = (
            "INSERT INTO requests (action, argument, created) VALUES (?, ?, ?)",
            (action, argument, time.time()),
        )
        return self.write(lambda db: _inserted(db, query, row), needed=True)

    def requests(self) -> list[Request]:
        """The requests that wait, the oldest first."""
        with self._lock, self._errors():
            rows = bounded_rows(self._db, self.path, "SELECT id, action, argument FROM requests")
        return sorted(Request(number, str(action), str(argument)) for number, action, argument in rows)

    def remove_requests(self, ids: Iterable[int]) -> None:
        """Forget requests that were carried out or refused."""
        rows = [(number,) for number in ids]
        self.write(lambda db: db.executemany("DELETE FROM requests WHERE id = ?", rows), needed=True)

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


def _change_residents(db: sqlite3.Connection, arrived: Iterable[Resident], gone: Iterable[tuple[str, int]]) -> None:
    db.executemany("DELETE FROM residents WHERE kind = ? AND number = ?", gone)
    db.executemany("INSERT OR REPLACE INTO residents (kind, number, hot, dirty) VALUES (?, ?, ?, ?)", arrived)


def _has_log(path: Path) -> bool:
    """Whether a database is one with a write-ahead log, by its header."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:] == b"\2\2"
    except OSError:
        # SQLite will say what is wrong with it.
        return False


def _is_logged(uri: str) -> bool:
    """Whether a database is one with a write-ahead log, by its header, as SQLite reads it.

    To open and close the file besides would end the locks that this process has on it. Costs a read of all of it.
    """
    with contextlib.closing(sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)) as db:
        return db.serialize()[18:20] == b"\2\2"


def _pages(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA page_count").fetchone()[0])


def _inserted(db: sqlite3.Connection, statement: str, values: tuple[Any, ...]) -> int:
    number = db.execute(statement, values).lastrowid
    assert number is not None
    return number


def _forget_versions(db: sqlite3.Connection, conversation: int, keep: Iterable[int | None]) -> None:
    kept = {version for version in keep if version is not None}
    rows = db.execute("SELECT id FROM versions WHERE conversation = ?", (conversation,)).fetchall()
    for (version,) in rows:
        if version not in kept:
            for table, column in (("extents", "version"), ("checkpoints", "version"), ("versions", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (version,))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _primary(code: int | None) -> int:
    """The kind of an error of SQLite's, of which extended codes have more in their upper bits."""
    return 0 if code is None else code & 0xFF


def _is_full(path: Path, least: int) -> bool:
    """Whether a file system has less than `least` bytes left, or no file."""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < least or (found.f_files > 0 and found.f_favail == 0)


def _count(value: object, what: str, least: int = 0, most: int = 1 << 60) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}")
    return value


def _number(value: object, what: str) -> float:
    if (type(value) is not int and type(value) is not float) or not 0 <= value <= _MAX_TIME:
        raise ValueError(f"{what} is {value!r}")
    return float(value)


def _assemble(
    conversations: list[tuple[Any, ...]],
    versions: list[tuple[Any, ...]],
    extents: list[tuple[Any, ...]],
    checkpoints: list[tuple[Any, ...]],
) -> list[ConversationRow]:
    extents_of: dict[int, list[Extent]] = defaultdict(list)
    for version, _, first, count in sorted(extents, key=lambda row: row[:2]):
        extents_of[version].append(Extent(_count(first, "an extent's start"), _count(count, "an extent's length", 1)))
    checkpoints_of: dict[int, list[Checkpoint]] = defaultdict(list)
    for version, tokens, record, boundary in sorted(checkpoints, key=lambda row: row[:2]):
        checkpoints_of[version].append(
            Checkpoint(_count(tokens, "a checkpoint's tokens"), _count(record, "a record"), bool(boundary))
        )
    versions_of: dict[int, dict[int, VersionRow]] = defaultdict(dict)
    for number, conversation, tokens, created, boot, synced, hashes in versions:
        versions_of[conversation][number] = VersionRow(
            number,
            _count(tokens, f"the tokens of version {number}", 1),
            _number(created, "a time"),
            str(boot),
            bool(synced),
            np.frombuffer(hashes, dtype=np.uint64),
            tuple(extents_of[number]),
            tuple(checkpoints_of[number]),
        )
    rows = []
    for number, name, namespace, version, pinned, created, parked, taken, used in conversations:
        if not isinstance(name, str) or not isinstance(namespace, str):
            raise ValueError(f"a conversation is named {name!r} in namespace {namespace!r}")
        own = versions_of[number]
        if version not in own:
            raise ValueError(f"the newest version of {name!r} is missing")
        older = [row for key, row in own.items() if key != version and row.synced]
        rows.append(
            ConversationRow(
                number,
                name,
                namespace,
                bool(pinned),
                _number(created, "a time"),
                _number(parked, "a time"),
                None if taken is None else _number(taken, "a time"),
                _count(used, "an order of use"),
                own[version],
                max(older, key=lambda row: row.id, default=None),
            )
        )
    return sorted(rows, key=lambda row: row.used)
