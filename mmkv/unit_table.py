"""The catalog's tables of checksums and of what is in quarantine."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.castagnoli import Values
from mmkv.catalog import Catalog
from mmkv.distrust import bounded_rows
from mmkv.errors import PoolCorrupt
from mmkv.geometry import Extent
from mmkv.space import KINDS, Kind
from mmkv.units import Columns

__all__ = ["Bad", "UnitRows", "put_bad", "put_units", "read_bad", "read_units"]

_Numbers: TypeAlias = npt.NDArray[np.int64]
_MOST_NUMBERS = 1 << 60


class Bad(NamedTuple):
    """A number whose bytes are not those that were parked.

    Attributes
    ----------
    kind, number : str and int
        Which one.
    layer, plane : int and str
        The first unit that was found to differ.
    noticed : float
        When, in seconds since the epoch.
    """

    kind: Kind
    number: int
    layer: int
    plane: str
    noticed: float


@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """Checksums of some numbers of one kind.

    Attributes
    ----------
    numbers, tokens : ndarray of int64, shape (numbers,)
        The numbers, and how many of their tokens the checksums cover; 0 where there are none.
    values : ndarray of uint32, shape (numbers, columns)
        The checksums.
    """

    numbers: _Numbers
    tokens: _Numbers
    values: Values


def read_units(
    catalog: Catalog, kind: Kind, columns: Columns, most_tokens: int, extents: Iterable[Extent] | None = None
) -> UnitRows:
    """The checksums of all numbers of a kind, or of those in `extents`. Rows of numbers that nobody holds mean nothing.

    Raises
    ------
    PoolCorrupt
        A row does not make sense.
    """
    width = 4 * len(columns.of(kind))
    query = f"SELECT number, tokens, checksums FROM units_of_{kind}"
    rows: list[tuple[object, ...]] = []
    if catalog.has_units:
        with catalog.snapshot() as db:
            if extents is None:
                rows = bounded_rows(db, catalog.path, query)
            else:
                for first, count in extents:
                    rows += bounded_rows(
                        db, catalog.path, f"{query} WHERE number BETWEEN ? AND ?", (first, first + count - 1)
                    )
    for number, tokens, checksums in rows:
        if not _is_sound(number, tokens, checksums, width, most_tokens):
            raise PoolCorrupt(
                f"the catalog {catalog.path} is damaged: the checksums of {kind} {str(number)[:40]} cover "
                f"{str(tokens)[:40]} tokens and have {len(checksums) if isinstance(checksums, bytes) else 'no'} bytes, "
                f"not {width}"
            )
    joined = b"".join(checksums for _, _, checksums in rows)  # type: ignore[misc]
    return UnitRows(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.frombuffer(joined, dtype="<u4").astype(np.uint32, copy=False).reshape(len(rows), width // 4),
    )


def _is_sound(number: object, tokens: object, checksums: object, width: int, most_tokens: int) -> bool:
    return (
        type(number) is int
        and 0 <= number < _MOST_NUMBERS
        and type(tokens) is int
        and 1 <= tokens <= most_tokens
        and isinstance(checksums, bytes)
        and len(checksums) == width
    )


def put_units(db: sqlite3.Connection, new: Mapping[Kind, UnitRows]) -> None:
    """Keep the checksums of new numbers, instead of what a former use of them left behind."""
    for kind, rows in new.items():
        values = rows.values.astype("<u4", copy=False)
        known = rows.tokens > 0
        db.executemany(
            f"INSERT OR REPLACE INTO units_of_{kind} (number, tokens, checksums) VALUES (?, ?, ?)",
            [
                (number, tokens, line.tobytes())
                for number, tokens, line in zip(
                    rows.numbers[known].tolist(), rows.tokens[known].tolist(), values[known], strict=True
                )
            ],
        )
        db.executemany(
            f"DELETE FROM units_of_{kind} WHERE number = ?", [(number,) for number in rows.numbers[~known].tolist()]
        )
        db.executemany(
            "DELETE FROM quarantine WHERE kind = ? AND number = ?", [(kind, number) for number in rows.numbers.tolist()]
        )


def read_bad(catalog: Catalog) -> list[Bad]:
    """What is in quarantine. Rows of numbers that no version holds mean nothing.

    Raises
    ------
    PoolCorrupt
        A row does not make sense.
    """
    if not catalog.has_units:
        return []
    with catalog.snapshot() as db:
        rows = bounded_rows(db, catalog.path, "SELECT kind, number, layer, plane, noticed FROM quarantine")
    found = []
    for kind, number, layer, plane, noticed in rows:
        if kind not in KINDS or type(number) is not int or not 0 <= number < _MOST_NUMBERS:
            raise PoolCorrupt(f"the catalog {catalog.path} is damaged: {kind!r} {str(number)[:40]} is in quarantine")
        layer = layer if type(layer) is int else -1
        found.append(Bad(kind, number, layer, str(plane), float(noticed) if isinstance(noticed, float) else 0.0))
    return found


def put_bad(catalog: Catalog, bad: Iterable[Bad]) -> None:
    """Put numbers into quarantine."""
    rows = list(bad)
    catalog.write(
        lambda db: db.executemany("INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?)", rows), needed=True
    )
