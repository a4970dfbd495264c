"""A benchmark's device memory on the simulated CUDA."""

from __future__ import annotations

import ctypes
import time
import types
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import memory, pool_vs_ram
from mmkv import device as cuda
from tests import simulated


class SimulatedMemory(memory.DeviceMemory):
    """Arrays of the simulated CUDA, whose bytes NumPy reaches."""

    def __init__(self, device: str, owner: simulated.SimulatedCuda) -> None:
        self.device = device
        self.ordinal = 0
        self.xp: ModuleType = np
        self._owner = owner
        self._held: dict[int, Any] = {}
        self._stream = cuda.new_stream(0)
        self.compute_stream = cuda.new_stream(0)

    def flat(self, array: Any) -> Any:
        return array.values.reshape(-1)

    def lock(self, size: int) -> int:
        held = cuda.pinned(size)
        self._held[held.ptr] = held
        return int(held.ptr)

    def unlock(self, address: int) -> None:
        del self._owner.pinned[address], self._held[address]

    def copy(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        self.synchronize()
        ctypes.memmove(target, source, size)

    def mark(self, stream: Any) -> Any:
        mark = types.SimpleNamespace(time=0.0)
        self._owner.enqueue(stream.ptr, lambda: setattr(mark, "time", time.perf_counter()))
        return mark

    def seconds_between(self, start: Any, end: Any) -> float:
        self.compute_stream.synchronize()
        return float(end.time - start.time)

    def trim(self) -> None:
        self.synchronize()


@pytest.fixture
def simulated_memory(simulated_cuda: simulated.SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedMemory:
    """Takes the place of every benchmark's device."""
    simulated.install_kvikio(monkeypatch)
    made = SimulatedMemory("cuda:0", simulated_cuda)
    monkeypatch.setattr(pool_vs_ram, "memory_of", lambda device: made)
    monkeypatch.setattr("benchmarks.machine._gpu", lambda device: {"name": "simulated"})
    monkeypatch.setattr("benchmarks.machine.Bus.__init__.__defaults__", (1 << 16,))
    return made
