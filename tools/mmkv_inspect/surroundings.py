"""What a directory lies on and what the system allows, found out without moving a byte."""

from __future__ import annotations

import errno
import os
import resource
import stat
from dataclasses import dataclass
from pathlib import Path

from mmkv.medium import Medium, available_ram, medium_of

__all__ = ["HugePages", "Limits", "Surroundings", "surroundings_of"]

_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")
_MAX_MAPS = Path("/proc/sys/vm/max_map_count")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages of the machine.

    Attributes
    ----------
    tmpfs : str or None
        The setting of the mount, where it is a tmpfs: `never`, `always`, `within_size`, `advise`.
    shmem_enabled : str or None
        What the kernel does with the huge pages of tmpfs by default.
    reserved : dict of int to tuple of int
        Pages of hugetlbfs by their size: how many are free, and how many there are.
    """

    tmpfs: str | None
    shmem_enabled: str | None
    reserved: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; `None` where there is none.

    Attributes
    ----------
    locked_bytes : int or None
        `ulimit -l`.
    open_files : int or None
        `ulimit -n`.
    max_maps : int or None
        `vm.max_map_count`.
    """

    locked_bytes: int | None
    open_files: int | None
    max_maps: int | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a pool would lie.

    Attributes
    ----------
    directory : Path
        The directory that was asked about.
    exists, writable : bool
        Whether it is there; whether this user may write it, or where it is not there, its nearest parent.
    open_to_others, sticky : bool
        Whether it is there and others than its owner may write it; whether they may not touch what is not theirs.
    free_bytes, total_ram, available_ram : int
        What can still be written; what the machine has; what this process may still take.
    driver : bool
        Whether NVIDIA's driver is loaded.
    """

    directory: Path
    exists: bool
    writable: bool
    open_to_others: bool
    sticky: bool
    medium: Medium
    free_bytes: int
    total_ram: int
    available_ram: int
    huge_pages: HugePages
    limits: Limits
    driver: bool


def surroundings_of(directory: Path) -> Surroundings:
    """Look around a directory, which need not exist.

    Raises
    ------
    NotADirectoryError
        The path, or a parent of it, is something else.
    """
    medium = medium_of(directory)
    if not medium.path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(medium.path))
    exists = directory.exists()
    mode = directory.stat().st_mode if exists else 0
    return Surroundings(
        directory=directory,
        exists=exists,
        writable=os.access(medium.path, os.W_OK | os.X_OK),
        open_to_others=bool(mode & (stat.S_IWGRP | stat.S_IWOTH)),
        sticky=bool(mode & stat.S_ISVTX),
        medium=medium,
        free_bytes=medium.free_bytes(),
        total_ram=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_ram=available_ram(),
        huge_pages=HugePages(medium.huge, _chosen(_TRANSPARENT / "shmem_enabled"), _reserved()),
        limits=Limits(_limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE), _number(_MAX_MAPS)),
        driver=_DRIVER.exists(),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _chosen(file: Path) -> str | None:
    """The word in brackets, by which sysfs says what is chosen."""
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _reserved() -> dict[int, tuple[int, int]]:
    found = {}
    try:
        places = sorted(_HUGE_PAGES.iterdir())
    except OSError:
        return {}
    for place in places:
        size = place.name.removeprefix("hugepages-").removesuffix("kB")
        free, total = _number(place / "free_hugepages"), _number(place / "nr_hugepages")
        if size.isdigit() and free is not None and total is not None:
            found[1024 * int(size)] = (free, total)
    return found
