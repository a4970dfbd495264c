"""What stands in the way of a pool, and what to change so that it gets a better path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmkv_inspect.bus_speed import BusSpeed, PathHere
from mmkv_inspect.surroundings import Surroundings
from mmkv_inspect.text import size_text

__all__ = ["advice", "problems"]

# A layer's file, its states and kvikio's two handles, of 100 layers; and what else is open.
_OPEN_FILES = 512
_MAPS = 65_530
_SMALL_SHM = 1 << 30
# A map that is page-locked is as fast as page-locked memory; below this share something is wrong.
_SHARE = 0.9


def problems(here: Surroundings) -> list[str]:
    """Why no pool can be made in a directory."""
    return list(_problems(here))


def _problems(here: Surroundings) -> Iterator[str]:
    medium = here.medium
    if medium.fs_type == "hugetlbfs":
        yield "hugetlbfs has no write(2), so that it cannot hold a pool's catalog: use a tmpfs with huge=always"
    if medium.readonly:
        yield f"{medium.mount_point} is mounted read-only"
    elif not here.writable:
        yield f"this user may not write {medium.path}"
    if here.open_to_others and not here.sticky:
        yield f"others may write {here.directory}: a pool is refused there; make a directory below it, or chmod 0700"


def advice(here: Surroundings, path: PathHere, buses: Sequence[BusSpeed]) -> list[str]:
    """What would make a pool in a directory faster, the most useful first."""
    return [*_of_device(here, path, buses), *_of_medium(here, bool(buses)), *_of_limits(here), *_of_directory(here)]


def _of_device(here: Surroundings, path: PathHere, buses: Sequence[BusSpeed]) -> Iterator[str]:
    if not buses:
        if here.driver:
            yield (
                "NVIDIA's driver is loaded, but CuPy sees no device: install mmkv[cu13] for drivers from 580 on, "
                "mmkv[cu12] for older ones"
            )
        return
    for bus in buses:
        if bus.reason is not None:
            yield (
                f"files here cannot be page-locked for device {bus.device}: {bus.reason}. Set ulimit -l to unlimited, "
                "in a container with --ulimit memlock=-1"
            )
        elif bus.map_to_device_gbps is not None and bus.map_to_device_gbps < _SHARE * bus.to_device_gbps:
            yield (
                f"the map of a file is slower than page-locked memory on device {bus.device}: bind the tmpfs to the "
                "GPU's NUMA node with mpol=bind:N"
            )
    if path.path == "posix":
        yield "kvikio cannot be used here, so that bytes go through host memory: install mmkv[cu13] or mmkv[cu12]"
    elif path.path in ("kvikio-posix", "cufile-compat"):
        yield f"kvikio does not use GPUDirect Storage here: {path.reason}"


def _of_medium(here: Surroundings, has_device: bool) -> Iterator[str]:
    medium = here.medium
    if has_device and not medium.in_ram:
        yield (
            f"{medium.fs_type} is as fast as its medium; for the speed of the bus put the pool on a tmpfs: mount -t "
            "tmpfs -o size=100g,huge=always,mode=0700,uid=$(id -u) tmpfs /mnt/kv"
        )
    if medium.fs_type == "tmpfs" and medium.huge == "never" and here.huge_pages.shmem_enabled not in (None, "force"):
        yield f"mount {medium.mount_point} with huge=always: growing and page-locking cost less with pages of 2 MiB"
    if medium.in_ram and here.free_bytes < _SMALL_SHM:
        yield (
            f"only {size_text(here.free_bytes)} are free: give the tmpfs size=, in a container --shm-size, or mount "
            "one of the host's"
        )
    if medium.fs_type == "overlay":
        yield "an overlay file system may refuse O_DIRECT and is gone with its container: put the pool on a volume"
    if medium.shared:
        yield (
            f"{medium.fs_type} is shared: one machine at a time may open a pool there, and its transactions cost less "
            "with Pool.open(catalog=...) on a local disk"
        )
    if not medium.locks_across_hosts:
        yield (
            f"locks on this {medium.fs_type} do not reach other hosts, or not for certain: see to it yourself that no "
            "other host opens the pool"
        )


def _of_limits(here: Surroundings) -> Iterator[str]:
    limits = here.limits
    if limits.open_files is not None and limits.open_files < _OPEN_FILES:
        yield f"ulimit -n is {limits.open_files}: a pool opens a file or two for each layer, kvikio two more; raise it"
    if limits.max_maps is not None and limits.max_maps < _MAPS:
        yield f"vm.max_map_count is {limits.max_maps}: a pool of many layers wants {_MAPS}"


def _of_directory(here: Surroundings) -> Iterator[str]:
    if here.open_to_others and here.sticky:
        yield f"others may write {here.directory}: make the pool in a directory of its own below it"
