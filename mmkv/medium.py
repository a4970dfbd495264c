"""What a directory lies on, and how much memory this process may still use."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmkv.refused import is_short_of_files, refusal

__all__ = ["Medium", "available_ram", "boot_id", "medium_of"]

_PROC = Path("/proc")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_IN_RAM = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "wekafs", "cifs", "smb3", "9p", "ceph", "glusterfs", "gpfs", "beegfs", "virtiofs", "afs"}
)
# Of these an flock(2) goes to the server, or to all who mount them, unless an option keeps it back. Of FUSE, 9p,
# virtiofs, BeeGFS and AFS it depends on what cannot be seen from here.
_LOCKING = frozenset({"nfs", "nfs4", "lustre", "wekafs", "cifs", "smb3", "ceph", "gpfs"})
_LOCAL_LOCKS = frozenset({"nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock", "nobrl"})
# Each write goes to blocks that were free.
_COPYING = frozenset({"btrfs", "bcachefs", "nilfs2"})
# In steps of this SQLite extends what it maps.
_MAPPED_PAGE = 4096
# cgroup v1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Medium:
    """The file system that a directory lies on.

    Attributes
    ----------
    path : Path
        The directory that was asked about, or its nearest parent that exists.
    fs_type : str
        The file system's type, such as `ext4` or `tmpfs`; `unknown` where the system does not tell.
    mount_point : Path
        Where it is mounted.
    options : tuple of str
        The mount's options and the file system's.
    page_bytes : int
        Size of a page of a file in RAM: that of a huge page on hugetlbfs.
    block_bytes : int
        Size of a block, in which the file system gives out its space.
    """

    path: Path
    fs_type: str
    mount_point: Path
    options: tuple[str, ...]
    page_bytes: int
    block_bytes: int = _MAPPED_PAGE

    @property
    def in_ram(self) -> bool:
        """Whether the files' bytes are memory."""
        return self.fs_type in _IN_RAM

    @property
    def shared(self) -> bool:
        """Whether other machines may see the files, so that locks and memory maps across machines are not to be had."""
        return self.fs_type in _SHARED or self.fs_type == "fuse" or self.fs_type.startswith("fuse.")

    @property
    def has_safe_maps(self) -> bool:
        """Whether what is mapped can always be written, once each page of it was written to the file.

        Where blocks are smaller than pages, or each write takes new ones, a file system that is full ends the process.
        """
        return self.fs_type not in _COPYING and self.block_bytes >= _MAPPED_PAGE

    @property
    def locks_across_hosts(self) -> bool:
        """Whether an `flock` keeps out whoever else may see the files; `False` also where that cannot be told.

        On a file system that is not shared there is nobody else.
        """
        return not self.shared or (self.fs_type in _LOCKING and _LOCAL_LOCKS.isdisjoint(self.options))

    @property
    def readonly(self) -> bool:
        """Whether it is mounted read-only."""
        return "ro" in self.options

    @property
    def huge(self) -> str | None:
        """The setting of huge pages of a tmpfs (`never`, `always`, `within_size`, `advise`), `None` elsewhere."""
        if self.fs_type != "tmpfs":
            return None
        return next((option[len("huge=") :] for option in self.options if option.startswith("huge=")), "never")

    def free_bytes(self) -> int:
        """Bytes that can still be written, now; of a file system in RAM without a limit, those of the free memory."""
        status = os.statvfs(self.path)
        if status.f_blocks > 0:
            return status.f_bavail * status.f_frsize
        if self.fs_type == "hugetlbfs":
            return _free_huge_pages(self.page_bytes) * self.page_bytes
        return available_ram() if self.in_ram else 0


def medium_of(path: str | os.PathLike[str]) -> Medium:
    """The medium of a directory; of its nearest parent that exists, where it does not exist itself."""
    place = Path(path).resolve()
    while not place.exists():
        place = place.parent
    fs_type, mount_point = "unknown", Path("/")
    options: tuple[str, ...] = ()
    for mount in _mounts():
        # Of mounts on the same point the last one is seen.
        if place.is_relative_to(mount.point) and len(mount.point.parts) >= len(mount_point.parts):
            fs_type, mount_point, options = mount.fs_type, mount.point, mount.options
    block_bytes = os.statvfs(place).f_bsize
    page_bytes = block_bytes if fs_type == "hugetlbfs" else os.sysconf("SC_PAGE_SIZE")
    return Medium(place, fs_type, mount_point, options, page_bytes, block_bytes)


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: Path
    fs_type: str
    options: tuple[str, ...]


def _mounts() -> Iterator[_Mount]:
    """The mounts of this process, as /proc/self/mountinfo lists them."""
    for line in _text(_PROC / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) < 6 or not rest[0]:
            continue
        options = (*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ()))
        yield _Mount(_unescaped(fields[3]), Path(_unescaped(fields[4])), rest[0], options)


def _unescaped(field: str) -> str:
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field


def _free_huge_pages(page_bytes: int) -> int:
    return _number(_HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages") or 0


@functools.cache
def boot_id() -> str:
    """What tells this boot of the machine from others. Where the system does not say, every process is a boot."""
    return _text(_PROC / "sys/kernel/random/boot_id").strip() or str(uuid.uuid4())


def available_ram() -> int:
    """Bytes of memory that this process may still take: of the machine and of every cgroup it is in.

    Page cache that the kernel can drop counts as available.
    """
    rooms = [_cgroup_room(directory, v2) for directory, v2 in _memory_cgroups()]
    return max(0, min([_mem_available(), *(room for room in rooms if room is not None)]))


def _mem_available() -> int:
    amounts = _amounts(_PROC / "meminfo")
    return 1024 * amounts.get("MemAvailable:", amounts.get("MemFree:", 0))


def _memory_cgroups() -> Iterator[tuple[Path, bool]]:
    """The memory cgroups of this process and their parents, each with whether it is of version 2."""
    lines = _text(_PROC / "self/cgroup").splitlines()
    mounts = list(_mounts())
    for line in lines:
        _, controllers, name = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.fs_type == "cgroup2" if v2 else mount.fs_type == "cgroup" and "memory" in mount.options:
                # In a container the mount may show only the container's own part of the tree.
                inside = name.removeprefix(mount.root) if mount.root != "/" else name
                directory = mount.point / inside.strip("/")
                while directory.is_relative_to(mount.point):
                    yield directory, v2
                    directory = directory.parent


def _cgroup_room(directory: Path, v2: bool) -> int | None:
    """What a cgroup's limit leaves, `None` where it has no limit."""
    limit = _number(directory / ("memory.max" if v2 else "memory.limit_in_bytes"))
    usage = _number(directory / ("memory.current" if v2 else "memory.usage_in_bytes"))
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    droppable = _amounts(directory / "memory.stat").get("inactive_file" if v2 else "total_inactive_file", 0)
    return limit - usage + min(droppable, usage)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _amounts(file: Path) -> dict[str, int]:
    """The lines of a file that start with a name and a number."""
    rows = [line.split() for line in _text(file).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(file: Path) -> str:
    """What a file of the system's says; nothing, where this system has none or keeps it to itself.

    Raises
    ------
    MmkvError
        The process may open no file: what it says is not known.
    """
    try:
        return file.read_text()
    except OSError as error:
        if is_short_of_files(error):
            raise refusal(f"cannot read {file}", error) from error
        return ""
