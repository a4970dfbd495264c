"""The machine and the versions that figures come from, and what its bus can do."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import mmkv
from benchmarks.memory import DeviceMemory
from benchmarks.results import median
from mmkv import device as cuda
from mmkv.buffer import buffer_of
from mmkv.medium import medium_of

__all__ = ["Bus", "provenance"]

_PACKAGES = (
    "numpy", "cupy-cuda13x", "cupy-cuda12x", "kvikio-cu13", "kvikio-cu12", "torch", "transformers", "safetensors",
    "fastsafetensors",
)  # fmt: skip


def provenance(device: str, directories: dict[str, Path]) -> dict[str, Any]:
    """Machine, versions and date, for the top of a result."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            **_host(),
            "gpu": None if device == "cpu" else _gpu(device),
            "directories": {name: medium_of(path).fs_type for name, path in directories.items()},
        },
        "versions": _versions(),
    }


def _host() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu(device: str) -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(int(device.partition(":")[2] or 0))
    return {
        "name": properties["name"].decode(),
        "memory_gb": round(properties["totalGlobalMem"] / 1e9, 1),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "cuda_driver": int(runtime.driverGetVersion()),
        "cuda_runtime": int(runtime.runtimeGetVersion()),
    }


def _versions() -> dict[str, str]:
    versions = {"mmkv": mmkv.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Bus:
    """The limit of the bus: one large copy each way, and both at once, between the device and page-locked memory."""

    def __init__(self, memory: DeviceMemory, size: int = 1 << 29) -> None:
        self._memory = memory
        self._size = size
        self._host = [memory.lock(size) for _ in range(2)]
        self._arrays = [memory.allocate((size,)) for _ in range(2)]
        self._device = [buffer_of(array).address for array in self._arrays]
        self._streams = [cuda.new_stream(memory.ordinal) for _ in range(2)]
        self._rates: dict[str, list[float]] = {"to_device_gbps": [], "from_device_gbps": [], "both_gbps": []}

    def measure(self) -> None:
        """Copy once each way and once both ways."""
        for name, kinds in (("to_device_gbps", [True]), ("from_device_gbps", [False]), ("both_gbps", [True, False])):
            self._rates[name].append(self._rate(kinds))

    def _rate(self, kinds: list[bool]) -> float:
        self._memory.synchronize()
        started = time.perf_counter()
        with cuda.current(self._memory.ordinal):
            for to_device in kinds:
                at = int(to_device)
                pair = (self._device[at], self._host[at]) if to_device else (self._host[at], self._device[at])
                cuda.copy_async(*pair, self._size, self._streams[at].ptr, to_device=to_device)
            for to_device in kinds:
                self._streams[int(to_device)].synchronize()
        return len(kinds) * self._size / (time.perf_counter() - started) / 1e9

    def figures(self) -> dict[str, Any]:
        """The medians so far."""
        found: dict[str, Any] = {name: median(rates) for name, rates in self._rates.items() if rates}
        return {**found, "copies": len(self._rates["both_gbps"])}

    def close(self) -> None:
        """Give the memory back."""
        self._memory.synchronize()
        for address in self._host:
            self._memory.unlock(address)
        self._arrays.clear()
