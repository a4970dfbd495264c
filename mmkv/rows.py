"""Conversations, their versions and checkpoints as the catalog keeps them; what makes no sense is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmkv.database import Database
from mmkv.distrust import bounded_rows
from mmkv.errors import PoolCorrupt
from mmkv.geometry import Extent

__all__ = ["Checkpoint", "ConversationRow", "VersionRow", "as_number", "read_conversations"]

# Some 3,000 years: what a calendar can print.
_MAX_TIME = 1e11


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


def read_conversations(database: Database, *, hashes: bool = True) -> list[ConversationRow]:
    """Every conversation, the least recently used first, read in one short transaction.

    Parameters
    ----------
    database : Database
        The catalog.
    hashes : bool
        Whether to read the chain hashes, 8 bytes a block.

    Raises
    ------
    PoolCorrupt
        A row does not make sense.
    """
    column = "hashes" if hashes else "x''"
    with database.snapshot() as db:
        conversations, versions, extents, checkpoints = (
            bounded_rows(db, database.path, query)
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
        raise PoolCorrupt(f"the catalog {database.path} is damaged: {error}") from error


def as_number(value: object, what: str, least: int = 0, most: int = 1 << 60) -> int:
    """A whole number of a row's, or `ValueError`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}")
    return value


def _as_time(value: object, what: str) -> float:
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
        extents_of[version].append(
            Extent(as_number(first, "an extent's start"), as_number(count, "an extent's length", 1))
        )
    checkpoints_of: dict[int, list[Checkpoint]] = defaultdict(list)
    for version, tokens, record, boundary in sorted(checkpoints, key=lambda row: row[:2]):
        checkpoints_of[version].append(
            Checkpoint(as_number(tokens, "a checkpoint's tokens"), as_number(record, "a record"), bool(boundary))
        )
    versions_of: dict[int, dict[int, VersionRow]] = defaultdict(dict)
    for number, conversation, tokens, created, boot, synced, hashes in versions:
        versions_of[conversation][number] = VersionRow(
            number,
            as_number(tokens, f"the tokens of version {number}", 1),
            _as_time(created, "a time"),
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
                _as_time(created, "a time"),
                _as_time(parked, "a time"),
                None if taken is None else _as_time(taken, "a time"),
                as_number(used, "an order of use"),
                own[version],
                max(older, key=lambda row: row.id, default=None),
            )
        )
    return sorted(rows, key=lambda row: row.used)
