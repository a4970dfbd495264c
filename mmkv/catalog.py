"""The catalog: the SQLite database of what is parked and where."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mmkv.database import Database
from mmkv.distrust import bounded_rows
from mmkv.errors import PoolCorrupt
from mmkv.rows import ConversationRow, VersionRow, as_number, read_conversations
from mmkv.schema import SET_PROPERTY

__all__ = ["Catalog", "Request", "Resident"]

_MOST_HOT = 1 << 40


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


class Catalog(Database):
    """The catalog of one pool: what is parked, where it lies, and what others ask of its owner.

    What changes several rows is one transaction, on a full file system as `Database.write` says.
    """

    def load(self, *, hashes: bool = True) -> list[ConversationRow]:
        """Every conversation, as `mmkv.rows.read_conversations` has them."""
        return read_conversations(self, hashes=hashes)

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
                Resident(kind, as_number(number, "a number"), as_number(hot, "a number", most=_MOST_HOT), bool(dirty))
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
            db.executemany(SET_PROPERTY, [(key, json.dumps(value)) for key, value in properties.items()])

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


def _change_residents(db: sqlite3.Connection, arrived: Iterable[Resident], gone: Iterable[tuple[str, int]]) -> None:
    db.executemany("DELETE FROM residents WHERE kind = ? AND number = ?", gone)
    db.executemany("INSERT OR REPLACE INTO residents (kind, number, hot, dirty) VALUES (?, ?, ?, ?)", arrived)


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
