"""The files of a pool, and its hot tier, beside what the catalog lists."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmkv.catalog import Catalog
from mmkv.check_rows import Rows, Version
from mmkv.directory import Description
from mmkv.errors import PoolCorrupt
from mmkv.findings import Repair, Severity
from mmkv.geometry import Geometry
from mmkv.medium import boot_id
from mmkv.reserve import RESERVE_SUFFIX
from mmkv.warming import is_of, read_claim, stored_generations, stored_hot

__all__ = ["check_capacity", "check_files", "check_hot", "check_names", "expected_files"]

_KNOWN = ("pool.json", "tokens.kv", "lock", "layers")
_CATALOG_SUFFIXES = ("", "-wal", "-shm", "-journal", RESERVE_SUFFIX)
_SLACK = 1 << 16
_SHORT_ADVICE = (
    "restore the file, or let --fix drop what lay behind its end",
    "open the pool: the hot tier is made anew, and what only it had is dropped",
)


def expected_files(geometry: Geometry, *, hot: bool = False) -> dict[str, tuple[str, int]]:
    """Every file of a tier, with the kind of its segments and the bytes of one."""
    files = {} if hot else {"tokens.kv": ("blocks", geometry.tokens_segment_bytes)}
    sizes = zip(geometry.layer_segment_bytes, geometry.layer_state_segment_bytes, strict=True)
    for layer, (planes, states) in enumerate(sizes):
        if planes:
            files[f"layers/{layer:04d}.kv"] = ("blocks", planes)
        if states:
            files[f"layers/{layer:04d}.state"] = ("checkpoints", states)
    return files


def check_files(rows: Rows, path: Path, geometry: Geometry, *, tier: int, owned: bool) -> bool:
    """Whether each file of a tier is there, plain, and as long as its segments. Opens none.

    What is longer, or holds more, is only looked for while nobody owns the pool, who may be growing it.

    Returns
    -------
    bool
        Whether the file of ids can be read.
    """
    found = {kind: rows.segments.get((tier, kind), []) for kind in ("blocks", "checkpoints")}
    readable, shortest, longer, kept = True, dict.fromkeys(found, 1 << 62), [], 0
    if (path / "layers").is_symlink():
        rows.found("error", "file-not-plain", f"{path / 'layers'} is a symbolic link", "put the directory back")
    for name, (kind, size) in expected_files(geometry, hot=tier == 1).items():
        file, segments = path / name, found[kind]
        status = _status(rows, file)
        if status is None:
            readable = readable and name != "tokens.kv"
            continue
        needed = (max(segments, default=-1) + 1) * size
        if status.st_size < needed:
            shortest[kind] = min(shortest[kind], status.st_size // size)
            rows.found(
                "error",
                "file-short",
                f"{file} has {status.st_size} bytes, and its {len(segments)} segments need {needed}",
                "restore the file, or let --fix drop what lay behind its end"
                if tier == 0
                else "open the pool: the hot tier is made anew, and what only it had is dropped",
            )
        elif not owned and status.st_size > needed:
            longer.append(f"{file} has {status.st_size} bytes, {status.st_size - needed} more than its segments")
        elif not owned and status.st_blocks * 512 > len(segments) * size + _SLACK:
            kept += status.st_blocks * 512 - len(segments) * size
    advice, cut = "nothing: the next opening cuts it", Repair(trim=True) if tier == 0 else None
    for text in longer:
        rows.found("note", "file-long", text, advice, cut)
    if kept:
        text = f"the files in {path} hold {kept} bytes where the catalog lists no segment"
        rows.found("note", "space-unlisted", text, advice, cut)
    if tier == 0:
        for kind, whole in shortest.items():
            _drop_behind(rows, kind, whole, geometry)
    return readable


def _status(rows: Rows, file: Path) -> os.stat_result | None:
    try:
        status = os.lstat(file)
    except FileNotFoundError:
        rows.found("error", "file-missing", f"{file} is missing", "restore it, or empty the directory to start anew")
        return None
    except OSError as error:
        rows.found("error", "file-unreadable", f"{file} cannot be read: {error.strerror}", "see its permissions")
        return None
    if not stat.S_ISREG(status.st_mode):
        rows.found("error", "file-not-plain", f"{file} is not a plain file", "put the file back that was there")
        return None
    if status.st_mode & 0o077:
        rows.found(
            "warning",
            "file-mode",
            f"{file} may be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
            f"run chmod 600 {file}: it holds its users' text",
        )
    return status


def _drop_behind(rows: Rows, kind: str, whole: int, geometry: Geometry) -> None:
    """What lies in segments that a file does not have as a whole, is lost."""
    segments = rows.segments.get((0, kind), [])
    gone = [number for number in segments if number >= whole]
    if not gone:
        return
    length = geometry.segment_blocks if kind == "blocks" else geometry.segment_checkpoints
    lost = [version for _, version in rows.held() if _reaches(version, kind, whole * length)]
    for version in lost:
        version.sound = False
    rows.found(
        "error",
        "segment-lost",
        f"{len(gone)} segments of {kind} lie behind the end of a file, with {len(lost)} versions in them",
        "restore the files, or let --fix drop these versions",
        Repair(
            f"forget {len(gone)} segments of {kind}",
            tuple(("DELETE FROM segments WHERE tier = 0 AND kind = ? AND number = ?", (kind, n)) for n in gone),
            tuple(version.id for version in lost),
            trim=True,
        ),
    )


def _reaches(version: Version, kind: str, end: int) -> bool:
    if kind == "blocks":
        return any(extent.first + extent.blocks > end for extent in version.extents)
    return any(point.record >= end for point in version.points)


def check_names(rows: Rows, path: Path, catalog: Path, geometry: Geometry) -> None:
    """What lies in the directory and belongs to no pool."""
    expected = {path / name for name in (*_KNOWN, *expected_files(geometry))}
    expected |= {catalog.with_name(catalog.name + suffix) for suffix in _CATALOG_SUFFIXES}
    _orphans(rows, expected, [path, path / "layers"])


def _orphans(rows: Rows, expected: set[Path], directories: Iterable[Path]) -> None:
    for directory in directories:
        if directory.is_symlink() or not directory.is_dir():
            continue
        others = sorted(entry for entry in directory.iterdir() if entry not in expected)
        for entry in others[:20]:
            rows.found("warning", "file-foreign", f"{entry} is not of the pool", "remove it, if it is of no use")


def check_capacity(rows: Rows, catalog: Catalog, geometry: Geometry) -> None:
    """Whether the segments keep to the capacity."""
    capacity = catalog.get_property("capacity")
    if type(capacity) is not int or not 1 <= capacity < 1 << 62:
        text = f"the capacity is {str(capacity)[:80]}"
        rows.found("error", "property-invalid", text, "open the pool with capacity=, if that is all that is wrong")
        return
    counts = {kind: len(rows.segments.get((0, kind), ())) for kind in ("blocks", "checkpoints")}
    allocated = counts["blocks"] * geometry.segment_bytes + counts["checkpoints"] * geometry.state_segment_bytes
    if allocated > capacity:
        text = f"the segments take {allocated} bytes, more than the capacity of {capacity}"
        rows.found("warning", "capacity-exceeded", text, "call resize with a smaller capacity, or a larger one")


def check_hot(rows: Rows, home: Path, description: Description, catalog: Catalog, *, owned: bool) -> None:
    """Whether the hot tier is the one that the catalog knows; and its files, where it is."""
    from mmkv.check_space import check_residents

    try:
        stored, generations = stored_hot(catalog), stored_generations(catalog)
    except PoolCorrupt as error:
        rows.found("error", "property-invalid", str(error), "delete the rows 'hot' and 'hot_generations' of properties")
        check_residents(rows, None)
        return
    geometry: Geometry | None = None
    if stored is not None:
        geometry = _hot_geometry(rows, stored[0], home, description, generations)
    elif rows.residents or any(tier == 1 for tier, _ in rows.segments):
        _lost(rows, "hot-missing", "the catalog lists a hot tier that the pool does not have")
    lengths = None
    if geometry is not None and stored is not None:
        lengths = {"blocks": geometry.segment_blocks, "checkpoints": geometry.segment_checkpoints}
        check_files(rows, stored[0], geometry, tier=1, owned=owned)
        names = {stored[0] / name for name in ("hot.json", "lock", "layers", *expected_files(geometry, hot=True))}
        _orphans(rows, names, [stored[0], stored[0] / "layers"])
    check_residents(rows, lengths)


def _hot_geometry(
    rows: Rows, hot: Path, home: Path, description: Description, generations: list[Any]
) -> Geometry | None:
    claim = read_claim(hot)
    if claim is None:
        _lost(rows, "hot-missing", f"the hot tier at {hot} is gone, or does not say whose it is")
    elif not is_of(claim, home, description):
        _lost(rows, "hot-foreign", f"the directory {hot} is the hot tier of another pool, {claim.uuid[:36]!r}")
    elif claim.boot != boot_id():
        _lost(rows, "hot-stale", f"the hot tier at {hot} is of an earlier boot")
    elif claim.generation not in generations:
        text = f"the hot tier at {hot} is of opening {claim.generation}, and the catalog of {generations}"
        _lost(rows, "hot-stale", text)
    else:
        try:
            return Geometry.from_json(description.layout, claim.sizes)
        except ValueError as error:
            _lost(rows, "hot-stale", f"the hot tier at {hot} has sizes that cannot be: {error}")
    return None


def _lost(rows: Rows, code: str, text: str) -> None:
    dirty = sum(row.dirty for row in rows.residents)
    severity: Severity = "error" if dirty else "warning"
    what = f", and the path lacks {dirty} blocks and records that lay there" if dirty else ""
    advice = "bring the directory back, or open the pool: it starts without, and drops what only the hot tier had"
    rows.found(severity, code, text + what, advice)
