"""The tables of a catalog, and what each version of its format added."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv.distrust import schema_of
from mmkv.errors import PoolCorrupt

__all__ = ["SCHEMA_VERSION", "SET_PROPERTY", "add_tables", "make_tables", "require_tables"]

SCHEMA_VERSION = 3
SET_PROPERTY = "INSERT INTO properties VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_APPLICATION_ID = 0x6D6D6B76

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


def make_tables(db: sqlite3.Connection, properties: Mapping[str, Any]) -> None:
    """Make the tables of a new catalog, which holds `properties`; a part of a transaction."""
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.executemany("INSERT INTO properties VALUES (?, ?)", [(key, json.dumps(properties[key])) for key in properties])


def require_tables(db: sqlite3.Connection, path: Path, *, may_be_empty: bool = False) -> int | None:
    """The version of the format of a database that holds the tables of a catalog and nothing else.

    `None` where it holds nothing at all, if that may be.

    Raises
    ------
    PoolCorrupt
        It is none, or is of a newer format.
    """
    found = db.execute("SELECT type, name, sql FROM sqlite_master").fetchmany(2 * len(_TABLES))
    if not found and may_be_empty:
        return None
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if application != _APPLICATION_ID:
        raise PoolCorrupt(f"{path} is not a catalog of mmkv")
    if version > SCHEMA_VERSION:
        raise PoolCorrupt(f"{path} is of format {version}, newer than {SCHEMA_VERSION}")
    missing = {name for tables in _added_after(version) for name in schema_of(tables.split(";"))}
    expected = {name: text for name, text in _TABLES.items() if name not in missing}
    # Indexes of SQLite's own have no text. Triggers, views and virtual tables would show here.
    if schema_of(text for _, _, text in found if text) != expected or any(
        kind not in ("table", "index") or (text is None and not name.startswith("sqlite_autoindex_"))
        for kind, name, text in found
    ):
        raise PoolCorrupt(f"{path} does not hold the tables of a catalog")
    return int(version)


def add_tables(db: sqlite3.Connection, version: int) -> None:
    """Make what a catalog of an older format lacks; a part of a transaction."""
    for tables in _added_after(version):
        for statement in tables.split(";"):
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _added_after(version: int) -> list[str]:
    return [_ADDED[later] for later in range(max(version, 1) + 1, SCHEMA_VERSION + 1)]
