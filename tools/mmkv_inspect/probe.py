"""The probe: what this machine can do for a pool in a directory, as a document and as people read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmkv_inspect.advice import advice, problems
from mmkv_inspect.bus_speed import BusSpeed, PathHere, measure_bus, path_here
from mmkv_inspect.medium_speed import MediumSpeed, measure_medium
from mmkv_inspect.surroundings import Surroundings, surroundings_of
from mmkv_inspect.tables import medium_text, print_figures, print_lines
from mmkv_inspect.text import size_text, visible

__all__ = ["Probe", "print_probe", "probe", "probe_record"]


@dataclass(frozen=True, slots=True)
class Probe:
    """All that was found.

    Attributes
    ----------
    speed : MediumSpeed or None
        What the medium does; `None` where it was not measured, for `speed_reason`.
    buses : list of BusSpeed
        What the bus does, by device.
    path : PathHere
        The path that a pool here would use.
    problems, advice : list of str
        Why there can be no pool; what would make it faster.
    """

    here: Surroundings
    speed: MediumSpeed | None
    speed_reason: str | None
    buses: list[BusSpeed]
    bus_reason: str | None
    path: PathHere
    problems: list[str]
    advice: list[str]


def probe(directory: Path) -> Probe:
    """Look around a directory, and measure. Takes a few seconds and leaves nothing behind."""
    here = surroundings_of(directory)
    found = problems(here)
    speed, speed_reason = _medium_speed(here)
    buses, bus_reason = _buses(here)
    path = path_here(here.medium)
    return Probe(here, speed, speed_reason, buses, bus_reason, path, found, advice(here, path, buses))


def _medium_speed(here: Surroundings) -> tuple[MediumSpeed | None, str | None]:
    if here.medium.fs_type == "hugetlbfs":
        return None, "hugetlbfs has no write(2)"
    if here.medium.readonly or not here.writable:
        return None, "it cannot be written"
    try:
        return measure_medium(here.medium), None
    except OSError as error:
        return None, error.strerror or str(error)


def _buses(here: Surroundings) -> tuple[list[BusSpeed], str | None]:
    try:
        return measure_bus(here.medium), None
    except Exception as error:  # whatever CUDA is short of, the rest of the probe is worth having
        return [], f"{type(error).__name__}: {error}"


def probe_record(found: Probe) -> dict[str, Any]:
    """Plain values: sizes in bytes, speeds in 10**9 bytes a second."""
    here, medium = found.here, found.here.medium
    return {
        "directory": str(here.directory),
        "exists": here.exists,
        "writable": here.writable,
        "medium": {
            "fs_type": medium.fs_type,
            "mount_point": str(medium.mount_point),
            "options": list(medium.options),
            "in_ram": medium.in_ram,
            "shared": medium.shared,
            "locks_across_hosts": medium.locks_across_hosts,
            "free": here.free_bytes,
        },
        "ram": {"total": here.total_ram, "available": here.available_ram},
        "huge_pages": {
            "tmpfs": here.huge_pages.tmpfs,
            "shmem_enabled": here.huge_pages.shmem_enabled,
            "reserved": [
                {"page": page, "free": free, "total": total}
                for page, (free, total) in sorted(here.huge_pages.reserved.items())
            ],
        },
        "limits": asdict(here.limits),
        "speed": None if found.speed is None else asdict(found.speed),
        "speed_reason": found.speed_reason,
        "devices": [asdict(bus) for bus in found.buses],
        "devices_reason": found.bus_reason,
        "path": asdict(found.path),
        "problems": found.problems,
        "advice": found.advice,
    }


def print_probe(found: Probe) -> None:
    """Print what was found, and then what to change."""
    here, medium = found.here, found.here.medium
    limits = here.limits
    print_figures(
        [
            ("Directory", visible(str(here.directory)) + ("" if here.exists else " (not there yet)")),
            ("File system", medium_text(medium)),
            ("Mount options", visible(", ".join(dict.fromkeys(medium.options)))),
            ("Free space", size_text(here.free_bytes)),
            ("RAM", f"{size_text(here.total_ram)}, {size_text(here.available_ram)} available to this process"),
            ("Huge pages", _huge_pages_text(here)),
            ("Locked memory", _limit_text(limits.locked_bytes, "ulimit -l", is_size=True)),
            ("Open files", _limit_text(limits.open_files, "ulimit -n")),
            ("Medium", _speed_text(found)),
            *_bus_rows(found),
            ("Path", _path_text(found)),
        ]
    )
    print_lines("Problems", [visible(line) for line in found.problems], style="red")
    print_lines("What to change", [visible(line) for line in found.advice])


def _huge_pages_text(here: Surroundings) -> str:
    pages = here.huge_pages
    texts = [] if pages.tmpfs is None else [f"huge={pages.tmpfs} on this tmpfs"]
    for page, (free, total) in sorted(pages.reserved.items()):
        if total:
            texts.append(f"{free:,} of {total:,} pages of {size_text(page)} free on hugetlbfs")
    return "; ".join(texts) or "none reserved, and this is no tmpfs"


def _limit_text(value: int | None, command: str, *, is_size: bool = False) -> str:
    shown = "unlimited" if value is None else size_text(value) if is_size else f"{value:,}"
    return f"{shown} ({command})"


def _speed_text(found: Probe) -> str:
    speed = found.speed
    if speed is None:
        return f"not measured: {found.speed_reason}"
    text = f"writes {speed.write_gbps:.2f}, reads {speed.read_gbps:.2f} GB/s"
    if speed.fresh_gbps is not None:
        text += f"; the first write, into fresh pages, {speed.fresh_gbps:.2f}"
    return f"{text} ({speed.how}, {speed.files} files at once)"


def _bus_rows(found: Probe) -> list[tuple[str, str]]:
    if found.bus_reason is not None:
        return [("Bus", f"not measured: {visible(found.bus_reason)}")]
    if not found.buses:
        return [("Bus", "not measured: there is no GPU that CuPy sees")]
    rows = []
    for bus in found.buses:
        text = f"{visible(bus.name)}: to it {bus.to_device_gbps:.1f}, from it {bus.from_device_gbps:.1f} GB/s"
        if bus.map_to_device_gbps is not None and bus.map_from_device_gbps is not None:
            text += f"; a file here {bus.map_to_device_gbps:.1f} and {bus.map_from_device_gbps:.1f}"
        rows.append((f"Bus, device {bus.device}", text))
    return rows


def _path_text(found: Probe) -> str:
    path, reason = found.path.path, found.path.reason
    what = {
        "mapped": "a page-locked map of the files, at the speed of the bus",
        "gds": "GPUDirect Storage",
        "cufile-compat": "cuFile through host memory of its own",
        "kvikio-posix": "kvikio through host memory",
        "posix": "system calls",
    }.get(path, path)
    return f"{path}: {what}" + ("" if reason is None else f" ({visible(reason)})")
