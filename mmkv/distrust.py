"""A catalog may come from somebody else: what SQLite would do for its sake, and what ours never holds, is refused."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmkv.errors import PoolCorrupt
from mmkv.refused import is_short_of_files, refusal
from mmkv.reserve import RESERVE_SUFFIX

__all__ = ["SUFFIXES", "bounded_rows", "limit_values", "refuse_other_files", "schema_of"]

_JOURNAL_END = bytes.fromhex("d9d505f920a163d7")
# Of the files that may lie beside a catalog.
SUFFIXES = ("-journal", "-wal", "-shm", RESERVE_SUFFIX)
# The largest value that a catalog holds are the hashes of one version: 8 bytes a block.
_MAX_VALUE_BYTES = 256 << 20
# A row of the smallest table takes more.
_LEAST_ROW_BYTES = 4


def refuse_other_files(path: Path) -> None:
    """Refuse a database whose companions would make SQLite touch files that are not its own.

    A rollback journal may end with the name of a super-journal, which several databases of one transaction share.
    SQLite deletes that file when it rolls back. A catalog has no such transactions.

    Raises
    ------
    PoolCorrupt
        A companion is no plain file, or the journal names another one.
    """
    for suffix in SUFFIXES:
        file = path.with_name(path.name + suffix)
        try:
            mode = file.lstat().st_mode
        except OSError:
            # There is none, or SQLite will meet the same, and says what it needed the file for.
            continue
        if stat.S_ISLNK(mode):
            raise PoolCorrupt(f"{file} is a symbolic link: a pool's files are plain files")
        if not stat.S_ISREG(mode):
            raise PoolCorrupt(f"{file} is not a plain file")
    # Only this one is opened. To close one of the others, or the database, would end the locks that another connection
    # of this process has on it, as POSIX has it: other processes would write beside it, and cut what it has mapped.
    journal = path.with_name(path.name + "-journal")
    try:
        fd = os.open(journal, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if is_short_of_files(error):
            raise refusal(f"{journal} cannot be looked at", error) from error
        return
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size > 512:
            stream.seek(-len(_JOURNAL_END), os.SEEK_END)
            if stream.read() == _JOURNAL_END:
                raise PoolCorrupt(f"{journal} names another journal, which no transaction of a catalog does: delete it")


def limit_values(db: sqlite3.Connection) -> None:
    """Let no value take more memory than one of a catalog may."""
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)


def schema_of(statements: Iterable[str]) -> dict[str, str]:
    """What each of some `CREATE` statements makes, by name; the same for all that mean the same table."""
    made = {}
    for statement in statements:
        text = " ".join(statement.split())
        if text:
            match = re.match(r"CREATE (?:TABLE|INDEX) (\w+)", text)
            made[match[1] if match else text] = text
    return made


def bounded_rows(db: sqlite3.Connection, path: Path, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query without an order, no more than the file can hold.

    The pages of a database that was made to harm may hold each other many times over, so that a small file has rows
    without end.

    Raises
    ------
    PoolCorrupt
        There are more.
    """
    size = sum(_size(path.with_name(path.name + suffix)) for suffix in ("", "-wal"))
    most = size // _LEAST_ROW_BYTES
    rows = db.execute(query, values).fetchmany(most + 1)
    if len(rows) > most:
        raise PoolCorrupt(f"the catalog {path} is damaged: it has more rows than its {size} bytes can hold")
    return rows


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
