"""The checksums that a catalog lists, beside what its versions hold; and what is in quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmkv.blocks import block_numbers
from mmkv.catalog import Catalog
from mmkv.check_rows import Rows, Version
from mmkv.distrust import bounded_rows
from mmkv.findings import Repair
from mmkv.geometry import Geometry
from mmkv.space import KINDS, Kind
from mmkv.units import Columns

__all__ = ["check_units"]


def check_units(rows: Rows, catalog: Catalog, geometry: Geometry) -> None:
    """Check that each row of checksums makes sense and covers what versions hold, and tell what is in quarantine.

    The bytes themselves are not read. Rows of numbers that nobody holds mean nothing.
    """
    if not catalog.has_units:
        return
    columns = Columns(geometry.layout)
    held = {kind: dict(_held(rows, geometry, kind)) for kind in KINDS}
    for kind in KINDS:
        with catalog.snapshot() as db:
            found = bounded_rows(db, catalog.path, f"SELECT number, tokens, checksums FROM units_of_{kind}")
        _check_kind(rows, kind, found, held[kind], 4 * len(columns.of(kind)))
    with catalog.snapshot() as db:
        bad = bounded_rows(
            db, catalog.path, "SELECT CAST(kind AS BLOB), number, layer, CAST(plane AS BLOB) FROM quarantine"
        )
    for row in bad:
        _check_bad(rows, row, held)


def _held(rows: Rows, geometry: Geometry, kind: Kind) -> Iterator[tuple[int, tuple[int, Version]]]:
    """Of each number, the most tokens that a version has in it, and that version."""
    most: dict[int, tuple[int, Version]] = {}
    for _, version in rows.held():
        if kind == "checkpoints":
            most |= {point.record: (1, version) for point in version.points}
            continue
        for position, number in enumerate(block_numbers(version.extents).tolist()):
            tokens = min(version.tokens - position * geometry.block_tokens, geometry.block_tokens)
            if number not in most or most[number][0] < tokens:
                most[number] = tokens, version
    yield from most.items()


def _check_kind(
    rows: Rows, kind: Kind, found: list[tuple[Any, ...]], held: dict[int, tuple[int, Version]], width: int
) -> None:
    table = f"units_of_{kind}"
    known = set()
    for number, tokens, checksums in found:
        size = len(checksums) if isinstance(checksums, bytes) else None
        repair = Repair(
            f"forget the checksums of {kind} {number}", ((f"DELETE FROM {table} WHERE number = ?", (number,)),)
        )
        if type(tokens) is not int or tokens < 1 or size != width:
            rows.found(
                "error",
                "checksums-invalid",
                f"the checksums of {kind} {number} cover {str(tokens)[:40]} tokens in {size} bytes, not {width}",
                "let --fix forget them: its bytes cannot be verified then",
                repair,
            )
        elif number in held and tokens < held[number][0]:
            needed, version = held[number]
            rows.found(
                "warning",
                "checksums-short",
                f"the checksums of {kind} {number} cover {tokens} tokens, and {rows.name_of(version)} has {needed}",
                "let --fix forget them: its bytes cannot be verified then",
                repair,
            )
        known.add(number)
    missing = held.keys() - known
    if missing:
        rows.found(
            "note",
            "checksums-missing",
            f"{len(missing)} {kind} have no checksums: they were parked with verify='never', or by an older version",
            "nothing: what is parked anew has some",
        )


def _check_bad(rows: Rows, row: tuple[Any, ...], held: dict[Kind, dict[int, tuple[int, Version]]]) -> None:
    raw, number, layer, plane = row
    kind = next((kind for kind in KINDS if raw == kind.encode()), None)
    if kind is None or type(number) is not int:
        rows.found(
            "error",
            "row-invalid",
            f"{str(raw)[:40]} {str(number)[:40]} is in quarantine",
            "delete the row with --fix",
            Repair(
                "delete a row of quarantine",
                (("DELETE FROM quarantine WHERE CAST(kind AS BLOB) IS ? AND number IS ?", (raw, number)),),
            ),
        )
    elif number in held[kind]:
        name = plane.decode(errors="backslashreplace") if isinstance(plane, bytes) else str(plane)
        rows.found(
            "error",
            "in-quarantine",
            f"{kind} {number}, of {rows.name_of(held[kind][number][1])} among others, had other bytes than were "
            f"parked: layer {str(layer)[:20]}, {name[:80]!r}",
            "park those conversations anew, or drop them",
        )
