"""The directory of a pool: its description `pool.json`, its owner's lock, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import time
import uuid as uuids
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.distrust import SUFFIXES
from mmkv.errors import LayoutMismatch, PoolCorrupt, PoolLocked
from mmkv.geometry import Geometry
from mmkv.layout import Layout, difference
from mmkv.medium import medium_of
from mmkv.refused import is_short_of_files, refusal

__all__ = [
    "FORMAT",
    "Description",
    "OwnerLock",
    "catalog_file",
    "describe",
    "prepare",
    "read_description",
    "write_description",
]

FORMAT = 1
LOCK = "lock"
_NAME = "pool.json"
CATALOG = "catalog.sqlite3"
_ELSEWHERE = "elsewhere"
_MAX_DESCRIPTION_BYTES = 16 << 20
_LOCK_ATTEMPTS, _LOCK_PAUSE = 10, 0.005
_POOL_NAMES = frozenset({_NAME, CATALOG, "tokens.kv", "layers"})


@dataclass(frozen=True)
class Description:
    """What `pool.json` says: written once, when the pool is created.

    Attributes
    ----------
    uuid : str
        The pool's UUID.
    layout : Layout
        The layout of every conversation in it.
    geometry : Geometry
        The sizes of blocks and segments.
    catalog_elsewhere : bool
        Whether the catalog lies outside of the directory. Where, is never written here: who opens a pool says it, so
        that a directory from somebody else makes nobody open a file outside of it.
    """

    uuid: str
    layout: Layout
    geometry: Geometry
    catalog_elsewhere: bool = False


def describe(layout: Layout, geometry: Geometry, *, catalog_elsewhere: bool = False) -> Description:
    """The description of a new pool, with a UUID of its own."""
    return Description(str(uuids.uuid4()), layout, geometry, catalog_elsewhere)


def catalog_file(path: Path, description: Description, elsewhere: Path | None) -> Path:
    """Where the catalog of the pool at `path` lies; `elsewhere` is what was said of it.

    Raises
    ------
    ValueError
        It is not where it was said to be, or may not lie there.
    """
    if elsewhere is None:
        if description.catalog_elsewhere:
            raise ValueError(
                f"the catalog of the pool at {path} lies elsewhere: say where, with catalog=FILE of Pool.open or "
                "--catalog FILE of mmkv-inspect"
            )
        return path / CATALOG
    if not description.catalog_elsewhere:
        raise ValueError(f"the catalog of the pool at {path} lies in its directory, not at {elsewhere}")
    require_place(path, elsewhere)
    return elsewhere


def require_place(path: Path, elsewhere: Path) -> None:
    """Make sure that the catalog of the pool at `path` may lie at `elsewhere`.

    Raises
    ------
    ValueError
        It is within the pool, it is a directory, or its own directory is missing or may be written by others.
    """
    if elsewhere.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"the catalog {elsewhere} would lie within the pool at {path}: choose a file outside, or none")
    if elsewhere.is_dir():
        raise ValueError(f"{elsewhere} is a directory: a catalog is a file")
    try:
        status = elsewhere.parent.stat()
    except FileNotFoundError:
        raise ValueError(f"{elsewhere.parent} does not exist: make it for the catalog, with mode 0700") from None
    except OSError as error:
        raise refusal(f"{elsewhere.parent} cannot be read", error) from error
    _require_own(elsewhere.parent, status)


def prepare(path: Path, *, create: bool) -> list[Path]:
    """Make sure that `path` is a directory that only its owner writes, and make it where it may be made.

    Returns the directories that were made, for `unmake`.

    Raises
    ------
    PoolCorrupt
        There is no pool and none may be made.
    ValueError
        The path is no directory, or others can write it.
    """
    made: list[Path] = []
    try:
        if create and not path.exists():
            made = [place for place in (path, *path.parents) if not place.exists()]
            # Another process may make it at this moment, too.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except FileNotFoundError as error:
        unmake(made)
        if made:
            raise refusal(f"{path} cannot be made: no directory can be in {made[-1].parent}", error) from None
        raise PoolCorrupt(f"{path} does not exist: give a layout and a capacity to create a pool there") from None
    except OSError as error:
        unmake(made)
        raise refusal(f"{path} cannot be {'made' if create else 'read'}", error) from error
    try:
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path} is not a directory: a pool is a directory")
        _require_own(path, status)
    except ValueError:
        unmake(made)
        raise
    return made


def unmake(made: list[Path]) -> None:
    """Remove directories that were made, the innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for place in made:
            place.rmdir()


def discard(path: Path, catalog: Path, *, lock: bool) -> None:
    """Delete the files of a pool whose creation failed; `lock` says whether that of its lock, too.

    The description goes last: what a crash leaves meanwhile is finished by the next creation.
    """
    beside = [catalog.with_name(catalog.name + suffix) for suffix in ("", *SUFFIXES)]
    layers = path / "layers"
    with contextlib.suppress(OSError):
        for file in (path / "tokens.kv", *layers.glob("*"), *beside):
            file.unlink(missing_ok=True)
        if layers.is_dir():
            layers.rmdir()
        (path / _NAME).unlink(missing_ok=True)
        if lock:
            (path / LOCK).unlink(missing_ok=True)


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o022:
        raise ValueError(
            f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): a pool holds its users' text; "
            f"run chmod 700 {path}, or choose a directory of your own"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path} belongs to user {status.st_uid}, not to this process's user {os.geteuid()}")


def is_pool(path: Path) -> bool:
    """Whether the directory has a description."""
    return (path / _NAME).exists()


def refuse_foreign(path: Path) -> None:
    """Refuse to make a pool among files that are not of one, or over what is left of one.

    Raises
    ------
    PoolCorrupt
        The directory holds parts of a pool whose description is gone.
    ValueError
        The directory holds something else.
    """
    names = {entry.name for entry in path.iterdir()} - {LOCK}
    names = {name for name in names if not name.startswith(_NAME)}
    if is_pool(path):
        # Another process has made it meanwhile, which the lock will tell.
        return
    if names & _POOL_NAMES:
        raise PoolCorrupt(
            f"{path} holds {', '.join(sorted(names & _POOL_NAMES))} but no {_NAME}: it is what is left of a pool; "
            "restore the file, or empty the directory to start anew"
        )
    if names:
        raise ValueError(
            f"{path} is not a pool and not empty (it holds {sorted(names)[0]!r}): choose an empty directory"
        )


def write_description(path: Path, description: Description) -> None:
    """Write `pool.json` atomically and sync it."""
    value = {
        "format": FORMAT,
        "uuid": description.uuid,
        "fingerprint": description.layout.fingerprint,
        "layout": description.layout.to_json(),
        "sizes": description.geometry.to_json(),
        **({"catalog": _ELSEWHERE} if description.catalog_elsewhere else {}),
    }
    partial = path / f"{_NAME}.{os.getpid()}"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path / _NAME)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_description(path: Path) -> Description:
    """The description in `pool.json`, checked.

    Raises
    ------
    PoolCorrupt
        The file is missing, damaged or of a newer format.
    """
    file = path / _NAME
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PoolCorrupt(f"{path} is not a pool: it has no {_NAME}") from None
    except OSError as error:
        if is_short_of_files(error):
            raise refusal(f"{file} cannot be read", error) from error
        raise PoolCorrupt(f"{file} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PoolCorrupt(f"{file} is not a plain file")
        text = stream.read(_MAX_DESCRIPTION_BYTES + 1)
    if len(text) > _MAX_DESCRIPTION_BYTES:
        raise PoolCorrupt(f"{file} is larger than {_MAX_DESCRIPTION_BYTES} bytes")
    try:
        return _parse(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise PoolCorrupt(f"{file} is damaged: {error}") from error


def _parse(value: Any) -> Description:
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    written = value.get("format")
    if type(written) is not int:
        raise ValueError(f"its format is {written!r}")
    if written > FORMAT:
        raise ValueError(f"its format is {written}, newer than {FORMAT}, the newest that this version of mmkv reads")
    if written < 1:
        raise ValueError(f"its format is {written}")
    uuid = value.get("uuid")
    if not isinstance(uuid, str) or not re.fullmatch(r"[0-9a-f-]{36}", uuid):
        raise ValueError(f"its uuid is {uuid!r}")
    layout = Layout.from_json(value.get("layout"))
    if value.get("fingerprint") != layout.fingerprint:
        raise ValueError("its fingerprint is not that of its layout")
    catalog = value.get("catalog")
    if catalog not in (None, _ELSEWHERE):
        raise ValueError(f"its catalog is {catalog!r}")
    return Description(uuid, layout, Geometry.from_json(layout, value.get("sizes")), catalog == _ELSEWHERE)


def require_layout(path: Path, stored: Layout, given: Layout) -> None:
    """Raise `LayoutMismatch`, naming what differs, unless the two layouts are one."""
    if stored.fingerprint == given.fingerprint:
        return
    raise LayoutMismatch(f"the pool at {path} has another layout: {difference(stored, given)}")


class OwnerLock:
    """The lock of the one process that owns a pool.

    An `flock`, which ends with the process, however it ends, of the file `lock`, and of the directory itself where that
    can be locked: so that whoever deletes the file does not let a second owner in. On a shared file system the lock of
    a directory is not seen by other hosts: there `require_held` tells that the file is gone. See
    `Medium.locks_across_hosts` for other hosts.

    Parameters
    ----------
    path : Path
        The directory.
    what, advice : str
        What it is, and what to do if another has it, for errors.

    Raises
    ------
    PoolLocked
        Another pool object, of this process or another, owns the directory.
    """

    def __init__(
        self, path: Path, what: str = "the pool", advice: str = "close it there, or open it with readonly=True"
    ) -> None:
        file = self._file = path / LOCK
        self._shared = medium_of(path).shared
        self._fds: list[int] = []
        self._owned = False
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            self._fds.append(fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PoolCorrupt(f"{file} is not a plain file")
            _lock_soon(fd)
            self._fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            _lock_soon(self._fds[1])
        except BlockingIOError:
            pid, host = _read_owner(fd) if len(self._fds) == 1 else (None, None)
            self.release()
            where = "" if host in (None, socket.gethostname()) else f" on {host}"
            who = "another process, whose lock file was deleted" if pid is None else f"process {pid}{where}"
            raise PoolLocked(f"{what} at {path} is owned by {who}: {advice}", pid) from None
        except OSError as error:
            # File systems on other hosts may lock files only: those that can be written.
            if len(self._fds) < 2:
                self.release()
                raise refusal(f"cannot lock {file}", error) from error
        except BaseException:
            self.release()
            raise
        # Whose it is, is only told: a full file system may leave it out.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._owned = True

    def require_held(self) -> None:
        """Check that no other host can have the lock, because the file was deleted. Costs one `stat` where it can.

        Raises
        ------
        PoolCorrupt
            It was: another process may own the pool, too.
        """
        if self._shared and self._owned and not _is_named(self._fds[0], self._file):
            raise PoolCorrupt(
                f"{self._file} was deleted or replaced while the pool is open, and another process may own it, too: "
                "close the pool, and open it anew"
            )

    def release(self) -> None:
        """Give the pool up. In a forked child, `abandon` instead: the parent still owns it."""
        if self._owned:
            # Whose it was, is only told.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fds[0], 0)
            for fd in self._fds:
                # A child that inherited the descriptor, past Python's hooks, would keep the lock.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and leave the lock to whoever shares it."""
        self._owned = False
        while self._fds:
            os.close(self._fds.pop())


def _is_named(fd: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file.lstat())
    except FileNotFoundError:
        return False


def _lock_soon(fd: int) -> None:
    # `owner_pid` of another process holds the lock for some microseconds, which must not look like an owner.
    for attempt in range(1, _LOCK_ATTEMPTS + 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == _LOCK_ATTEMPTS:
                raise
            time.sleep(_LOCK_PAUSE)
        else:
            return


def owner_pid(path: Path) -> int | None:
    """The process that owns the pool, or `None`. Takes no lock that could keep an owner out for longer than this."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refusal(f"cannot open {path / 'lock'}", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(fd)[0]
    finally:
        os.close(fd)
    return None


def _read_owner(fd: int) -> tuple[int | None, str | None]:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return int(owner["pid"]), str(owner["host"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # The owner is just writing it, or this is no lock file of ours.
        return None, None
