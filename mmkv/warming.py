"""Opening the hot tier: its directory, whose it is, and whether what the catalog lists there is still true."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv import directory
from mmkv.catalog import Catalog, Resident
from mmkv.errors import MmkvError, PoolCorrupt
from mmkv.geometry import Geometry, choose_geometry
from mmkv.medium import Medium, boot_id, medium_of
from mmkv.refused import is_short_of_files, refusal
from mmkv.space import Space

__all__ = [
    "Claim",
    "OpenedHot",
    "close_hot",
    "forget_hot",
    "give_up_hot",
    "is_of",
    "is_whole",
    "open_hot",
    "read_claim",
    "stored_generations",
    "stored_hot",
]

_NAME = "hot.json"
_NAMES = frozenset({_NAME, "layers", "lock"})
_MAX_BYTES = 1 << 16
_LEAST_BYTES = 2048
_log = logging.getLogger("mmkv")


@dataclass(slots=True)
class OpenedHot:
    """The parts of an open hot tier.

    Attributes
    ----------
    residents : list of Resident
        What the catalog lists in it; nothing where it was made anew.
    pool : Path
        The directory of its pool.
    place : list of int
        What tells its directory from one that takes the name.
    """

    path: Path
    pool: Path
    medium: Medium
    space: Space
    lock: directory.OwnerLock
    residents: list[Resident]
    generation: int
    place: list[int]

    def require_there(self) -> None:
        """Check that the directory and its files are still those that were opened. Costs a `stat` a file.

        Raises
        ------
        PoolCorrupt
            They were deleted or replaced, by another pool perhaps.
        """
        try:
            is_there = _place(self.path) == self.place
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise refusal(f"the hot tier at {self.path} cannot be looked at", error) from error
            is_there = False
        if not is_there:
            raise PoolCorrupt(f"the hot tier at {self.path} was deleted or replaced while the pool is open")
        self.space.require_whole()

    def close(self) -> None:
        """Close the files and give the lock up."""
        try:
            self.space.close()
        finally:
            self.lock.release()


@dataclass(frozen=True)
class Claim:
    """What `hot.json` says: of which pool the files are, and of which of its openings.

    Attributes
    ----------
    origin : list of int
        What tells the pool's `pool.json` from a copy of it.
    place : list of int
        What tells the hot directory from a copy of it.
    """

    uuid: str
    origin: list[Any]
    place: list[Any]
    generation: int
    boot: str
    dirty: bool
    sizes: dict[str, Any]


def stored_hot(catalog: Catalog) -> tuple[Path, int] | None:
    """The hot directory and its capacity that a pool was opened with last, if it has one.

    Raises
    ------
    PoolCorrupt
        What the catalog keeps makes no sense.
    """
    value = catalog.get_property("hot")
    if value is None:
        return None
    match value:
        case {"path": str(path), "capacity": int(capacity)} if _is_place(path) and 0 < capacity < 1 << 62:
            return Path(path), capacity
    raise PoolCorrupt(f"the catalog {catalog.path} is damaged: its hot tier is {value!r}")


def _is_place(path: str) -> bool:
    return "\0" not in path and len(path) < 4096 and os.path.isabs(path) and os.path.normpath(path) == path


def is_whole(path: Path, pool: Path, description: directory.Description, catalog: Catalog) -> bool:
    """Whether a directory is the hot tier of a pool, as that one says itself, and nobody else's to write.

    A copy of a pool has the pool's UUID and names its hot tier, too; so what it may hold for the original alone is not
    the copy's to clear.
    """
    claim = read_claim(path)
    if claim is None or not is_of(claim, pool, description):
        return False
    if claim.dirty and claim.boot == boot_id() and claim.generation not in stored_generations(catalog):
        return False
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def open_hot(
    path: Path, capacity: int, pool: Path, description: directory.Description, catalog: Catalog, *, min_free_ram: int
) -> OpenedHot:
    """Open the hot tier of a pool, or make it anew where what is there is not what the catalog knows.

    Before this returns anew, what only the lost files held is forgotten: those conversations fall back to the version
    that the path has, or are dropped.

    Raises
    ------
    ValueError
        The directory cannot be a hot tier, or holds what another pool has not written to its path yet.
    PoolLocked
        Another pool uses the directory.
    PoolFull
        There is no room for it.
    """
    medium = medium_of(path)
    if not medium.in_ram:
        raise ValueError(f"hot={str(path)!r} lies on {medium.fs_type}, not in RAM: use a directory on tmpfs")
    if medium.fs_type == "hugetlbfs":
        raise ValueError(f"hot={str(path)!r} lies on hugetlbfs, which has no system calls to write with: use tmpfs")
    if path.resolve() == pool.resolve():
        raise ValueError(f"hot={str(path)!r} is the directory of the pool itself: use one of its own")
    with contextlib.ExitStack() as undo:
        made = directory.prepare(path, create=True)
        undo.callback(directory.unmake, made)
        _require_own_files(path)
        if made:
            undo.callback(_discard, path)
        lock = _lock(path)
        undo.callback(lock.release)
        claim = read_claim(path)
        _require_free(path, claim, pool, description)
        generations = stored_generations(catalog)
        space = None
        if claim is not None and is_of(claim, pool, description) and claim.place == _place(path):
            space = _reopened(path, claim, generations, capacity, description, catalog, medium, min_free_ram)
        residents = []
        if space is not None:
            undo.callback(space.close)
            residents = catalog.residents()
        else:
            geometry = choose_geometry(description.layout, capacity)
            forget_hot(catalog)
            _clear(path)
            try:
                space = Space(
                    path, geometry, catalog, medium, capacity=capacity, min_free_ram=min_free_ram, create=True, tier=1
                )
            except OSError as error:
                raise refusal(f"cannot make the hot tier at {path}", error) from error
            undo.callback(space.close)
        space.trim()
        opened = OpenedHot(path, pool, medium, space, lock, residents, max(generations), _place(path))
        _claim(opened, description, catalog, dirty=True)
        catalog.set_property("hot", {"path": str(path), "capacity": capacity})
        undo.pop_all()
    return opened


def close_hot(opened: OpenedHot, description: directory.Description, catalog: Catalog, *, dirty: bool) -> None:
    """Leave the hot tier for the next opening: a copy of its files that was made meanwhile is of no use then.

    One that is gone, or whose directory is another pool's by now, is left as it is.

    Raises
    ------
    PoolCorrupt
        It is gone, and the path lacks some of what it had.
    """
    try:
        opened.require_there()
    except PoolCorrupt as error:
        if dirty:
            raise
        _log.warning("%s: all that it had is at the path", error)
        return
    _claim(opened, description, catalog, dirty=dirty)


def give_up_hot(pool: Path, description: directory.Description, catalog: Catalog) -> None:
    """Forget the hot tier of a pool, all of which is at the path, and give back the RAM that its files take."""
    stored = stored_hot(catalog)
    forget_hot(catalog)
    if stored is not None and is_whole(stored[0], pool, description, catalog):
        lock = _lock(stored[0])
        try:
            _clear(stored[0])
        finally:
            lock.release()


def forget_hot(catalog: Catalog) -> None:
    """Forget the hot tier, whose files are gone: what only they held is lost, all else is at the path."""
    dirty = {(row.kind, row.number) for row in catalog.residents() if row.dirty}
    lost = []
    for row in catalog.load(hashes=False):
        if row.version.synced or not dirty:
            continue
        blocks = {("blocks", number) for first, count in row.version.extents for number in range(first, first + count)}
        records = {("checkpoints", point.record) for point in row.version.checkpoints}
        if dirty.isdisjoint(blocks | records):
            continue
        if row.fallback is None:
            lost.append(row.name)
        else:
            catalog.restore_fallback(row.name, row.fallback.id)
    if lost:
        _log.warning("%d conversations were in a hot tier that is gone, and are lost", len(lost))
        catalog.drop(lost)
    catalog.forget_hot({"hot": None})


def _reopened(
    path: Path,
    claim: Claim,
    generations: list[int],
    capacity: int,
    description: directory.Description,
    catalog: Catalog,
    medium: Medium,
    min_free_ram: int,
) -> Space | None:
    """The files as the catalog knows them, or `None` if they are not."""
    stored = stored_hot(catalog)
    if stored is None or claim.boot != boot_id():
        return None
    if claim.generation not in generations or stored[0] != path:
        return None
    try:
        geometry = Geometry.from_json(description.layout, claim.sizes)
        return Space(path, geometry, catalog, medium, capacity=capacity, min_free_ram=min_free_ram, tier=1)
    except (ValueError, PoolCorrupt) as error:
        _log.warning("the hot tier at %s is damaged and is made anew: %s", path, error)
        return None


def stored_generations(catalog: Catalog) -> list[int]:
    """The generation of the hot files; two, while one makes way for the next."""
    value = catalog.get_property("hot_generations", [0])
    numbers = value if isinstance(value, list) else []
    if not numbers or any(type(number) is not int or not 0 <= number < 1 << 60 for number in numbers):
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: its hot generations are {value!r}")
    return numbers


def _origin(pool: Path) -> list[int]:
    """What tells a `pool.json`, which is written once, from a copy of it. No device: that of a share changes."""
    status = (pool / "pool.json").stat()
    return [status.st_ino, status.st_mtime_ns]


def _place(path: Path) -> list[int]:
    """What tells a directory in RAM from a copy of it."""
    status = path.stat()
    return [status.st_dev, status.st_ino]


def is_of(claim: Claim, pool: Path, description: directory.Description) -> bool:
    """Whether a claim is that of the pool in the directory `pool`, and not of a copy."""
    return claim.uuid == description.uuid and claim.origin == _origin(pool)


def _lock(path: Path) -> directory.OwnerLock:
    return directory.OwnerLock(
        path, "the hot directory", "close the pool that uses it there, or give this one a directory of its own as hot="
    )


def _require_own_files(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(name for name in names - _NAMES if not name.startswith(_NAME))
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]!r}, which is not of a hot tier: choose an empty directory")


def _require_free(path: Path, claim: Claim | None, pool: Path, description: directory.Description) -> None:
    if claim is None or is_of(claim, pool, description):
        return
    # A copy of a hot tier has nothing that the one that it was copied from has not.
    if claim.dirty and claim.boot == boot_id() and claim.place == _place(path):
        raise ValueError(
            f"{path} is the hot tier of another pool ({claim.uuid}), which was not closed: open that pool first, "
            "or empty the directory to give up what it had not written to its path"
        )


def _claim(opened: OpenedHot, description: directory.Description, catalog: Catalog, *, dirty: bool) -> None:
    """Note a new generation in the catalog and beside the files: a copy of either goes with the other no longer."""
    catalog.set_property("hot_generations", [opened.generation, opened.generation + 1])
    opened.generation += 1
    value = {
        "uuid": description.uuid,
        "origin": _origin(opened.pool),
        "place": opened.place,
        "generation": opened.generation,
        "boot": boot_id(),
        "dirty": dirty,
        "sizes": opened.space.geometry.to_json(),
    }
    try:
        _write_claim(opened.path, json.dumps(value).encode().ljust(_LEAST_BYTES))
    except OSError as error:
        raise refusal(f"cannot write {opened.path / _NAME}", error) from error
    catalog.set_property("hot_generations", [opened.generation])


def _write_claim(path: Path, text: bytes) -> None:
    """Replace `hot.json`; where segments have filled the file system, write over it: it is within one page."""
    partial = path / f"{_NAME}.{os.getpid()}"
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        partial.rename(path / _NAME)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (path / _NAME).exists():
            raise
        fd = os.open(path / _NAME, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "wb") as file:
            file.write(text)


def read_claim(path: Path) -> Claim | None:
    """What `hot.json` says; `None` where there is none that makes sense."""
    try:
        fd = os.open(path / _NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except ValueError:
        # A name that no file can have.
        return None
    except OSError as error:
        if is_short_of_files(error):
            # What is there is not known: nothing may be forgotten for it.
            raise refusal(f"{path / _NAME} cannot be read", error) from error
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = file.read(_MAX_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match value:
        case {
            "uuid": str(uuid),
            "origin": list(origin),
            "place": list(place),
            "generation": int(generation),
            "boot": str(boot),
            "dirty": bool(dirty),
            "sizes": dict(sizes),
        }:
            return Claim(uuid, origin, place, generation, boot, dirty, sizes)
    return None


def _discard(path: Path) -> None:
    """Delete what was made in a new directory that becomes no hot tier."""
    with contextlib.suppress(MmkvError, OSError, ValueError):
        _clear(path)
        if (path / "layers").is_dir():
            (path / "layers").rmdir()
        (path / directory.LOCK).unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Delete the files of a hot tier that is made anew."""
    try:
        (path / _NAME).unlink(missing_ok=True)
        layers = path / "layers"
        if layers.is_symlink():
            raise ValueError(f"{layers} is a symbolic link: a hot tier's files are plain files")
        for file in layers.glob("*") if layers.is_dir() else ():
            if file.suffix not in (".kv", ".state"):
                raise ValueError(f"{file} is not of a hot tier: choose an empty directory")
            file.unlink()
    except OSError as error:
        raise refusal(f"cannot clear {path}", error) from error
