"""Reading a pool from outside: its description, one snapshot of its catalog, and who owns it.

Nothing here takes a lock that the owner would wait for, and nothing is written. What is read may be damaged or made
to harm: every number is checked against the allocated segments before anything is computed from it.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmkv.catalog import Catalog, Resident
from mmkv.directory import Description, catalog_file, owner_pid, prepare, read_description
from mmkv.errors import MmkvError, PoolCorrupt
from mmkv.geometry import Extent, Geometry, extent_blocks
from mmkv.info import ConversationInfo, PoolStats, conversation_infos, union_extents
from mmkv.medium import Medium, medium_of
from mmkv.rows import ConversationRow, VersionRow
from mmkv.space import KINDS
from mmkv.unit_table import Bad, read_bad
from mmkv_inspect.notes import Owner, capacity_of, owner_of, stats_of

__all__ = ["PoolView", "check_directory", "open_catalog", "read_pool", "require_same_pool"]

_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")
_MAX_ID = 512
_MORE_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """A pool as it was at one moment.

    Attributes
    ----------
    path : Path
        The pool's directory.
    description : Description
        What `pool.json` says.
    catalog : Path
        Its catalog, which may lie elsewhere.
    medium : Medium
        What the directory lies on.
    rows : list of ConversationRow
        The conversations, the least recently used first, without their hashes.
    block_segments, checkpoint_segments : list of int
        The allocated segments of each kind.
    bad : list of Bad
        What is in quarantine, numbers that no version holds left out.
    capacity : int or None
        The limit of the files' bytes, if the catalog tells it.
    owner : Owner
        Who owns the pool.
    stats : PoolStats or None
        What the owner said last of itself, if it makes sense.
    requests : int
        Requests that wait for the owner.
    now : float
        When all this was read, in seconds since the epoch.
    """

    path: Path
    description: Description
    catalog: Path
    medium: Medium
    rows: list[ConversationRow]
    residents: list[Resident]
    block_segments: list[int]
    checkpoint_segments: list[int]
    bad: list[Bad]
    capacity: int | None
    owner: Owner
    stats: PoolStats | None
    requests: int
    now: float

    @property
    def has_hot_tier(self) -> bool:
        """Whether the owner has, or had, a hot tier."""
        return bool(self.residents) or (self.stats is not None and any(tier.name == "hot" for tier in self.stats.tiers))

    def infos(self) -> list[ConversationInfo]:
        """The figures of every conversation, in the order of `rows`."""
        bad = {kind: {row.number for row in self.bad if row.kind == kind} for kind in KINDS}
        return conversation_infos(self.rows, self.description.geometry, self.residents, bad)

    def versions(self) -> list[VersionRow]:
        """Every version that the catalog keeps, those that wait for their successor to be synced too."""
        return list(_versions(self.rows))


def _versions(rows: Sequence[ConversationRow]) -> Iterator[VersionRow]:
    for row in rows:
        yield row.version
        if row.fallback is not None:
            yield row.fallback


def _holds(version: VersionRow, bad: Bad) -> bool:
    if bad.kind == "blocks":
        return any(first <= bad.number < first + count for first, count in version.extents)
    return any(point.record == bad.number for point in version.checkpoints)


def check_directory(path: Path, elsewhere: Path | None) -> tuple[Description, Path]:
    """The description of the pool at `path`, and its catalog; `elsewhere` is where that was said to lie, if not there.

    Raises
    ------
    MmkvError
        There is no pool, it is damaged or of a newer format, or others can write it.
    """
    if not path.exists():
        raise MmkvError(f"{path} does not exist")
    if not path.is_dir():
        raise MmkvError(f"{path} is not a directory: a pool is a directory")
    description = read_description(path)
    try:
        prepare(path, create=False)
        catalog = catalog_file(path, description, elsewhere)
    except ValueError as error:
        raise MmkvError(str(error)) from error
    for suffix in _SQLITE_SUFFIXES:
        file = catalog.with_name(catalog.name + suffix)
        if file.is_symlink():
            raise PoolCorrupt(f"{file} is a symbolic link: a pool's files are plain files")
        # SQLite would only say that it cannot open it.
        if file.exists() and not os.access(file, os.R_OK):
            raise MmkvError(f"{file} cannot be read: Permission denied")
    return description, catalog


def read_pool(path: Path, elsewhere: Path | None = None) -> PoolView:
    """Read a pool, also while its engine runs. Costs a pass over the catalog; the layer files are not opened.

    Parameters
    ----------
    path : Path
        The pool's directory.
    elsewhere : Path, optional
        Where its catalog lies, if not there.

    Raises
    ------
    MmkvError
        There is no pool, it may not be read, or what it says makes no sense.
    """
    description, file = check_directory(path, elsewhere)
    catalog = open_catalog(file)
    try:
        view = _read(path, description, catalog)
        for _ in range(_MORE_ATTEMPTS):
            # Versions and segments are read one after the other: the owner may have given a segment back in between.
            if _damage(view) is None:
                break
            view = _read(path, description, catalog)
    finally:
        catalog.close()
    damage = _damage(view)
    if damage is not None:
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: {damage}")
    return view


def open_catalog(file: Path) -> Catalog:
    """The catalog, for reading only."""
    try:
        return Catalog(file, readonly=True)
    except PoolCorrupt:
        raise
    except MmkvError as error:
        log, index = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm"))
        if log.exists() and not index.exists() and not os.access(file.parent, os.W_OK):
            raise MmkvError(
                f"{file} has a log that was not written back, and reading that makes {index.name} in a directory that "
                "may not be written: copy the pool's directory to where it may"
            ) from error
        if file.with_name(file.name + "-journal").exists():
            raise MmkvError(
                f"{file} has a transaction that was cut short: the pool's owner rolls it back when it opens it"
            ) from error
        raise


def require_same_pool(path: Path, description: Description, catalog: Catalog) -> None:
    """Raise `PoolCorrupt` where description and catalog are of two pools."""
    if catalog.get_property("uuid", description.uuid) != description.uuid:
        raise PoolCorrupt(f"{catalog.path} belongs to another pool than {path / 'pool.json'}")


def _read(path: Path, description: Description, catalog: Catalog) -> PoolView:
    require_same_pool(path, description, catalog)
    pid = owner_pid(path)
    rows = catalog.load(hashes=False)
    return PoolView(
        path=path,
        description=description,
        catalog=catalog.path,
        medium=medium_of(path),
        rows=rows,
        residents=catalog.residents(),
        block_segments=catalog.segments("blocks"),
        checkpoint_segments=catalog.segments("checkpoints"),
        bad=[bad for bad in read_bad(catalog) if any(_holds(version, bad) for version in _versions(rows))],
        capacity=capacity_of(catalog),
        owner=owner_of(catalog, pid),
        stats=stats_of(catalog),
        requests=len(catalog.requests()),
        now=time.time(),
    )


def _damage(view: PoolView) -> str | None:
    """What cannot be in the blocks and checkpoints of some version, or `None`."""
    geometry = view.description.geometry
    blocks = _Numbers(view.block_segments, geometry.segment_blocks)
    records = _Numbers(view.checkpoint_segments, geometry.segment_checkpoints)
    for row in view.rows:
        for version in (row.version, row.fallback):
            problem = None if version is None else _version_damage(version, geometry, blocks, records)
            if problem is not None:
                return f"{row.name[:_MAX_ID]!r} lists {problem}"
    return None


def _version_damage(version: VersionRow, geometry: Geometry, blocks: _Numbers, records: _Numbers) -> str | None:
    if extent_blocks(version.extents) != geometry.blocks_for(version.tokens):
        return f"{extent_blocks(version.extents)} blocks for its {version.tokens} tokens"
    if not blocks.hold_all(version.extents):
        return "blocks outside the allocated segments"
    if not records.hold_all([Extent(point.record, 1) for point in version.checkpoints]):
        return "checkpoints outside the allocated segments"
    if any(point.tokens > version.tokens for point in version.checkpoints):
        return f"a checkpoint behind its {version.tokens} tokens"
    return None


class _Numbers:
    """The numbers of allocated segments; asking costs the same whatever the numbers are."""

    def __init__(self, segments: Iterable[int], length: int) -> None:
        self._spans = union_extents([Extent(segment * length, length) for segment in segments] if length else [])
        self._firsts = [span.first for span in self._spans]

    def hold_all(self, extents: Sequence[Extent]) -> bool:
        return all(self._holds(extent) for extent in extents)

    def _holds(self, extent: Extent) -> bool:
        at = bisect_right(self._firsts, extent.first) - 1
        return at >= 0 and extent.first + extent.blocks <= self._spans[at].first + self._spans[at].blocks
