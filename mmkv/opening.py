"""Opening a pool: its directory, lock, catalog, files and ledger, made or read back, checked and cleaned up."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from mmkv import directory
from mmkv.catalog import Catalog
from mmkv.errors import PoolCorrupt
from mmkv.geometry import Extent, choose_geometry
from mmkv.layout import Layout
from mmkv.ledger import Ledger
from mmkv.medium import Medium, boot_id, medium_of
from mmkv.refused import refusal
from mmkv.rows import ConversationRow
from mmkv.space import Space
from mmkv.unit_table import read_bad
from mmkv.warming import OpenedHot, forget_hot, give_up_hot, is_whole, open_hot, stored_hot

__all__ = ["Opened", "forget_stored_hot", "hot_of", "load_ledger", "open_owner", "open_reader", "stored_capacity"]

_LEAST_FREE_RAM = 1 << 30
_log = logging.getLogger("mmkv")


@dataclass(slots=True)
class Opened:
    """The parts of an open pool. `lock` is `None` for a reader, and so is `hot`, as where there is no hot tier."""

    path: Path
    description: directory.Description
    medium: Medium
    catalog: Catalog
    space: Space
    ledger: Ledger
    lock: directory.OwnerLock | None
    hot: OpenedHot | None = None

    def close(self) -> None:
        """Close the files and the catalog, and give the locks up."""
        with contextlib.ExitStack() as closing:
            # Whatever cannot be closed, the locks go.
            if self.lock is not None:
                closing.callback(self.lock.release)
            closing.callback(self.catalog.close)
            closing.callback(self.space.close)
            if self.hot is not None:
                closing.callback(self.hot.close)


def open_owner(
    path: Path,
    layout: Layout | None,
    capacity: int | None,
    min_free_ram: int | None,
    elsewhere: Path | None = None,
    hot: tuple[Path | None, int | None] = (None, None),
) -> Opened:
    """Open a pool as its owner, and create it where there is none.

    `elsewhere` is the file of its catalog, where that does not lie in the directory; `hot` the directory of its hot
    tier and that one's capacity, by default what it was opened with last.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, not {layout!r}")
    with contextlib.ExitStack() as undo:
        # What fails leaves nothing that was not there before.
        made = directory.prepare(path, create=layout is not None and capacity is not None)
        undo.callback(directory.unmake, made)
        medium = medium_of(path)
        if medium.fs_type == "hugetlbfs":
            raise ValueError(f"{path} lies on hugetlbfs, which cannot hold a pool's catalog: use tmpfs or a disk")
        if not directory.is_pool(path):
            _require_creatable(path, layout, capacity, elsewhere)
        was_locked = os.path.lexists(path / directory.LOCK)
        lock = directory.OwnerLock(path)
        undo.callback(lock.release)
        if not directory.is_pool(path):
            undo.callback(directory.discard, path, elsewhere or path / directory.CATALOG, lock=not was_locked)
            _create(path, layout, capacity, elsewhere)
        description = directory.read_description(path)
        if layout is not None:
            directory.require_layout(path, description.layout, layout)
        file = directory.catalog_file(path, description, elsewhere)
        # A creation that was interrupted leaves empty files at most, and is finished here.
        unborn = _holds_nothing(path)
        if not file.exists():
            if not unborn:
                lost = file.name if elsewhere is None else f"catalog, which is not at {file}"
                raise PoolCorrupt(f"{path} has lost its {lost}: restore it, or empty the directory to start anew")
            if capacity is None:
                raise PoolCorrupt(f"the creation of the pool at {path} was interrupted: give a capacity to finish it")
        catalog = Catalog(
            file,
            create=unborn and capacity is not None,
            properties={"uuid": description.uuid, "capacity": capacity},
        )
        undo.callback(catalog.close)
        catalog.require_of(path, description.uuid)
        space = Space(
            path,
            description.geometry,
            catalog,
            medium,
            capacity=stored_capacity(catalog),
            min_free_ram=_free_ram_to_leave() if min_free_ram is None else min_free_ram,
            create=unborn,
        )
        undo.callback(space.close)
        if unborn:
            for place in {path, file.parent}:
                directory.sync_directory(place)
        _settle_other_boots(catalog, boot_id())
        opened_hot = _open_hot(hot, path, description, catalog, space.min_free_ram)
        if opened_hot is not None:
            undo.callback(opened_hot.close)
        ledger = load_ledger(catalog, space)
        space.trim()
        if not medium.in_ram:
            # Blocks that were freed before are free from here on, so what freed them must be on the medium.
            catalog.sync()
        catalog.keep_reserve()
        undo.pop_all()
    _warn(path, medium, file)
    return Opened(path, description, medium, catalog, space, ledger, lock, opened_hot)


def _open_hot(
    hot: tuple[Path | None, int | None],
    path: Path,
    description: directory.Description,
    catalog: Catalog,
    min_free_ram: int,
) -> OpenedHot | None:
    where, capacity = hot
    stored = stored_hot(catalog)
    if where is None and stored is not None:
        # The catalog may be somebody else's: no directory is made, or cleared, because it names one.
        if is_whole(stored[0], path, description, catalog):
            where = stored[0]
        else:
            _log.warning(
                "the hot tier at %s is gone, or is that of another copy of this pool, which is opened without one: "
                "give hot= for a new one",
                stored[0],
            )
            forget_hot(catalog)
    if capacity is None and stored is not None and stored[0] == where:
        capacity = stored[1]
    if where is None:
        if capacity is not None:
            raise ValueError(f"hot_capacity is {capacity}, but there is no hot tier: give its directory as hot=")
        return None
    if capacity is None:
        raise ValueError(f"the hot tier at {where} needs a limit: give hot_capacity=")
    return open_hot(where, capacity, path, description, catalog, min_free_ram=min_free_ram)


def hot_of(path: Path, elsewhere: Path | None) -> Path | None:
    """The directory of the hot tier that the pool at `path` was opened with last, if there is a pool and it has one."""
    if not directory.is_pool(path):
        return None
    file = directory.catalog_file(path, directory.read_description(path), elsewhere)
    if not file.exists():
        return None
    catalog = Catalog(file, readonly=True)
    try:
        stored = stored_hot(catalog)
    finally:
        catalog.close()
    return None if stored is None else stored[0]


def forget_stored_hot(path: Path, elsewhere: Path | None) -> None:
    """Let the pool at `path`, which is closed and has all its bytes there, have no hot tier any more."""
    lock = directory.OwnerLock(path)
    try:
        description = directory.read_description(path)
        catalog = Catalog(directory.catalog_file(path, description, elsewhere))
        try:
            give_up_hot(path, description, catalog)
        finally:
            catalog.close()
    finally:
        lock.release()


def _warn(path: Path, medium: Medium, catalog: Path) -> None:
    """Tell what the file systems cannot promise."""
    if not medium.locks_across_hosts:
        _log.warning(
            "the pool at %s lies on %s, whose locks do not reach other hosts, or not for certain: see to it yourself "
            "that no other host opens it",
            path,
            medium.fs_type,
        )
    if medium_of(catalog).in_ram and not medium.in_ram:
        _log.warning("the catalog %s is in RAM: the pool at %s is lost when this machine stops", catalog, path)


def open_reader(path: Path, layout: Layout | None, elsewhere: Path | None = None) -> Opened:
    """Open a pool for reading only, beside its owner or without one."""
    directory.prepare(path, create=False)
    description = directory.read_description(path)
    if layout is not None:
        directory.require_layout(path, description.layout, layout)
    medium = medium_of(path)
    with contextlib.ExitStack() as undo:
        catalog = Catalog(directory.catalog_file(path, description, elsewhere), readonly=True)
        undo.callback(catalog.close)
        catalog.require_of(path, description.uuid)
        with catalog.snapshot():
            space = Space(
                path,
                description.geometry,
                catalog,
                medium,
                capacity=stored_capacity(catalog),
                min_free_ram=0,
                readonly=True,
            )
            undo.callback(space.close)
            ledger = load_ledger(catalog, space)
        undo.pop_all()
    return Opened(path, description, medium, catalog, space, ledger, None)


def load_ledger(catalog: Catalog, space: Space) -> Ledger:
    """The ledger of what a catalog lists; the references of blocks are derived from the extents."""
    rows = catalog.load()
    for row in rows:
        _require_sound(row, space)
    ledger = Ledger(space.blocks, space.records)
    try:
        ledger.load(rows)
        ledger.quarantine.put(read_bad(catalog))
    except ValueError as error:
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: {error}") from error
    return ledger


def _require_sound(row: ConversationRow, space: Space) -> None:
    for version in (row.version, row.fallback):
        if version is not None:
            records = [Extent(point.record, 1) for point in version.checkpoints]
            space.require_in_range(version.extents, records, version.tokens)
            if len(version.hashes) != version.tokens // space.geometry.block_tokens:
                raise PoolCorrupt(f"version {version.id} of {row.name!r} has {len(version.hashes)} hashes")
            if space.geometry.layout.state_bytes and version.tokens not in {p.tokens for p in version.checkpoints}:
                raise PoolCorrupt(f"version {version.id} of {row.name!r} has no checkpoint at its end")


def _require_creatable(
    path: Path, layout: Layout | None, capacity: int | None, elsewhere: Path | None
) -> tuple[Layout, int]:
    directory.refuse_foreign(path)
    if elsewhere is not None:
        directory.require_place(path, elsewhere)
        if os.path.lexists(elsewhere) and not directory.is_pool(path):
            raise ValueError(
                f"{path} is not a pool, but {elsewhere} exists: it may be the catalog of another one. Remove it, or "
                "choose another name for that of a new pool"
            )
    if layout is None or capacity is None:
        missing = "a layout" if layout is None else "a capacity"
        raise PoolCorrupt(f"{path} is not a pool: to create one there, give {missing}, too")
    return layout, capacity


def _create(path: Path, layout: Layout | None, capacity: int | None, elsewhere: Path | None) -> None:
    layout, capacity = _require_creatable(path, layout, capacity, elsewhere)
    geometry = choose_geometry(layout, capacity)
    try:
        description = directory.describe(layout, geometry, catalog_elsewhere=elsewhere is not None)
        directory.write_description(path, description)
    except OSError as error:
        raise refusal(f"cannot create a pool at {path}", error) from error


def _holds_nothing(path: Path) -> bool:
    return not any(file.is_file() and file.stat().st_size for file in [path / "tokens.kv", *path.glob("layers/*")])


def stored_capacity(catalog: Catalog) -> int:
    """The capacity that the catalog keeps."""
    capacity = catalog.get_property("capacity")
    if type(capacity) is not int or not 1 <= capacity < 1 << 62:
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: its capacity is {capacity!r}")
    return capacity


def _free_ram_to_leave() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_LEAST_FREE_RAM, total // 16)


def _settle_other_boots(catalog: Catalog, boot: str) -> None:
    """After another boot, what was not synced may never have reached the medium: its last synced version counts."""
    lost = []
    for row in catalog.load(hashes=False):
        if row.version.synced or row.version.boot == boot:
            continue
        if row.fallback is None:
            lost.append(row.name)
        else:
            catalog.restore_fallback(row.name, row.fallback.id)
    if lost:
        catalog.drop(lost)
