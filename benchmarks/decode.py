"""A stand-in for an engine that decodes: small batches through large weights, which memory bandwidth bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import mmkv
from benchmarks.memory import DeviceMemory
from benchmarks.results import median, reason_of, spread

__all__ = ["DecodeLoop"]

_WIDTH, _BATCH, _WEIGHTS = 8192, 16, 8
_CALIBRATION = 200
# Of the time that a take needs at most: the loop is to end while the take is still running.
_SHARE = 0.5
_FASTEST_BUS = 55e9


class _Engine(Protocol):
    """A stream of matmuls."""

    def start(self, steps: int) -> Callable[[], float]:
        """Start so many; gives what waits for them and returns the seconds that they took on the device."""


class _TorchEngine:
    name = "torch"

    def __init__(self, memory: DeviceMemory) -> None:
        import torch

        self._torch = torch
        device = torch.device(memory.device)
        self._weights = [
            torch.randn(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16) for _ in range(_WEIGHTS)
        ]  # fmt: skip
        self._batch = torch.randn(_BATCH, _WIDTH, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._batch)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def start(self, steps: int) -> Callable[[], float]:
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream), torch.inference_mode():
            begin.record()
            for step in range(steps):
                torch.matmul(self._batch, self._weights[step % _WEIGHTS], out=self._out)
            end.record()

        def wait() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait


class _CupyEngine:
    name = "cupy"

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        cupy: Any = memory.xp
        self._weights = [
            cupy.random.rand(_WIDTH, _WIDTH, dtype=cupy.float32).astype(cupy.float16) for _ in range(_WEIGHTS)
        ]  # fmt: skip
        self._batch = cupy.ones((_BATCH, _WIDTH), dtype=cupy.float16)
        self._out = cupy.empty_like(self._batch)
        memory.synchronize()

    def start(self, steps: int) -> Callable[[], float]:
        memory, stream = self._memory, self._memory.compute_stream
        begin = memory.mark(stream)
        with stream:
            for step in range(steps):
                memory.xp.matmul(self._batch, self._weights[step % _WEIGHTS], out=self._out)
        end = memory.mark(stream)
        return lambda: memory.seconds_between(begin, end)


class DecodeLoop:
    """Matmuls on a stream of their own, by Torch, or by CuPy where there is no Torch for this device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._engine, self.engine_name = _first_engine(memory)

    def beside(self, repeats: int, take_bytes: int, take: Callable[[], mmkv.Transfer]) -> dict[str, Any]:
        """The loop's speed beside a take over its speed alone, interleaved; and the take's beside it."""
        step = self._engine.start(_CALIBRATION)() / _CALIBRATION
        step = self._engine.start(_CALIBRATION)() / _CALIBRATION
        steps = max(8, int(_SHARE * take_bytes / _FASTEST_BUS / step))
        alone, beside, takes, takes_alone, covered = [], [], [], [], 0
        for _ in range(repeats):
            self._memory.synchronize()
            alone.append(self._engine.start(steps)())
            takes_alone.append(_seconds(lambda: take().result()))
            self._memory.synchronize()
            started = time.perf_counter()
            transfer = take()
            beside.append(self._engine.start(steps)())
            covered += not transfer.done()
            transfer.result()
            takes.append(time.perf_counter() - started)
        return {
            "ratio": median(alone) / median(beside),
            "engine": self.engine_name,
            "step_us": 1e6 * median(alone) / steps,
            "steps": steps,
            "alone_ms": [1e3 * value for value in spread(alone)],
            "beside_ms": [1e3 * value for value in spread(beside)],
            "take_beside_over_alone": median(takes_alone) / median(takes),
            # Runs in which the take still ran when the loop was done.
            "covered": covered,
            "runs": repeats,
        }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _first_engine(memory: DeviceMemory) -> tuple[_Engine, str]:
    reasons = []
    for engine in (_TorchEngine, _CupyEngine):
        try:
            made: _Engine = engine(memory)
            made.start(1)()
        except Exception as error:
            reasons.append(f"{engine.name}: {reason_of(error)}")
        else:
            return made, engine.name
    raise RuntimeError("nothing here multiplies matrices: " + "; ".join(reasons))
