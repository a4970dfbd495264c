"""How SQLite opens a catalog's file, where it may and where it may not map memory, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.medium import medium_of
from mmkv.refused import lacks_files, refusal

__all__ = ["BUSY_SECONDS", "connect", "sqlite_errors"]

BUSY_SECONDS = 10.0
# SQLite fails in other ways than `SQLITE_FULL`, too, where less than this is free.
_LEAST_FREE_BYTES = 1 << 20
# What SQLite's index of a write-ahead log takes, and a log.
_LOG_BYTES = 64 << 10
# What it keeps open: the database, its log or journal, the index, and a directory.
_FILES = 4


def connect(path: Path, *, readonly: bool) -> sqlite3.Connection:
    """A connection to a database, of which several threads may take turns; statements commit by themselves.

    Raises
    ------
    PoolFull
        Reading its log needs room beside it that there is not.
    """
    uri = f"file:{quote(os.fsencode(path))}"
    wal = path.with_name(path.name + "-wal")
    if readonly and not medium_of(path).has_safe_maps and (wal.exists() or _is_logged(uri)):
        _require_room_for_index(path)
    if readonly and not wal.exists() and not os.access(path.parent, os.W_OK) and _has_log(path):
        # A reader of a WAL database makes files beside it; where it may not, and nobody writes, it needs none.
        uri += "?mode=ro&immutable=1"
    else:
        uri += "?mode=ro" if readonly else "?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _require_room_for_index(path: Path) -> None:
    """Refuse where SQLite's index of a log would be mapped, and the file system has no room for its pages."""
    found = os.statvfs(path.parent)
    if found.f_bavail * found.f_frsize < _LOG_BYTES:
        raise PoolFull(f"reading {path} needs {_LOG_BYTES} bytes beside it: free some space")


@contextlib.contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Errors of SQLite's at the database of a path become those of a pool."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", None)
        # Of a full file system SQLite says any of these, by which of its files did not grow, or was not made.
        least = {sqlite3.SQLITE_IOERR: _LEAST_FREE_BYTES, sqlite3.SQLITE_CANTOPEN: _LOG_BYTES}.get(_primary(code))
        if code == sqlite3.SQLITE_FULL or (least is not None and _is_full(path, least)):
            raise PoolFull(f"no room on the file system of {path}: free some space") from error
        what = f"the catalog {path} cannot be used"
        if _primary(code) == sqlite3.SQLITE_CANTOPEN and lacks_files(_FILES):
            raise refusal(what, OSError(errno.EMFILE, "")) from error
        raise MmkvError(f"{what}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise PoolCorrupt(f"the catalog {path} is damaged: {error}") from error


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
