"""One follow-up turn: a conversation of so many tokens says some more, and the first token of the answer is awaited.

Its cache is where each way of keeping it has it; every way that brings rows back is checked bit by bit.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmkv
from benchmarks.contenders import wait_until_locked
from benchmarks.engine import Engine
from benchmarks.machine import Bus
from benchmarks.memory import DeviceMemory, Memory, rows_of
from benchmarks.results import median, spread
from benchmarks.rooms import LockedRoom
from mmkv.integrations.transformers import by_layer, decoder_layers, new_cache, seek, slot_of, streams_of

__all__ = ["WAYS", "FollowUp"]

WAYS = {
    "again": "reading everything again",
    "ram": "RAM only, then computing",
    "blocking": "mmkv, then computing",
    "streamed": "mmkv, layer by layer",
    "resident": "nothing moves",
}
# Like the pools of the other benchmarks, whose runs are as long as an engine's are.
_POOL_CONVERSATIONS = 20
# Reading everything again takes long and varies little.
_MOST_READINGS = 3


@dataclass
class FollowUp:
    """A conversation of `tokens` tokens, computed once, in a slot, in page-locked RAM and in a pool.

    Parameters
    ----------
    engine : Engine
        The model.
    memory : Memory
        Where its cache lies.
    tokens, new_tokens : int
        Tokens of the conversation, and of what is said now.
    directory : Path
        Where to make the pool.
    """

    engine: Engine
    memory: Memory
    tokens: int
    new_tokens: int
    directory: Path

    def __post_init__(self) -> None:
        engine, layout = self.engine, self.engine.layout
        if layout.state_bytes:
            raise ValueError(f"{engine.name} keeps states, which this benchmark does not restore: choose another model")
        self.ids = engine.random_ids(self.tokens + self.new_tokens)
        self._prompt = np.array(self.ids[:-1])
        self.cache = new_cache(engine.model, layout, len(self.ids))
        self.slot = slot_of(self.cache, layout)
        engine.read(self.cache, self.ids[: self.tokens], 0)
        self._token = engine.read(self.cache, self.ids[self.tokens :], self.tokens)
        self._kept = [(layer.keys.clone(), layer.values.clone()) for layer in self.cache.layers]
        arrays = [
            {name: buffer.owner for name, buffer in layer.items()} for layer in self.slot.memory.planes
        ]  # fmt: skip
        self._rows = rows_of(arrays)
        self._room = LockedRoom(self.memory, self._rows, self.tokens)
        engine.synchronize()
        self._room.out(self._rows, 0, self.tokens)
        size = _POOL_CONVERSATIONS * self.tokens * (layout.token_bytes + 8) + (64 << 20)
        self.pool = mmkv.Pool.open(self.directory, layout, capacity=size)
        self.pool.park("chat", self.slot, self._prompt[: self.tokens], stream=streams_of(self.slot)).result()
        wait_until_locked(self.pool)
        self._bus = Bus(self.memory) if isinstance(self.memory, DeviceMemory) else None
        self._paths: set[str] = set()

    @property
    def bytes(self) -> int:
        """Bytes of the conversation."""
        return self.engine.layout.token_bytes * self.tokens

    def close(self) -> None:
        """Give everything back."""
        self.pool.close()
        shutil.rmtree(self.directory)
        self._room.free()
        if self._bus is not None:
            self._bus.close()

    # The ways to the first token

    def again(self) -> int:
        """Read the whole prompt, in an empty cache."""
        seek(self.cache, 0)
        return self.engine.read(self.cache, self.ids, 0)

    def ram(self) -> int:
        """Copy all rows from page-locked RAM, wait, and compute."""
        self._room.back(self._rows, 0, self.tokens)
        return self._read_new()

    def blocking(self) -> int:
        """Take the conversation, wait, and compute."""
        with self.pool.match(self._prompt) as match:
            self._paths.add(self.pool.take(match, self.slot, stream=streams_of(self.slot)).result().path)
        return self._read_new()

    def streamed(self, note: Callable[[mmkv.Transfer], None] | None = None) -> int:
        """Take the conversation, and compute each layer as soon as it is there."""
        with self.pool.match(self._prompt) as match:
            take = self.pool.take(match, self.slot, stream=streams_of(self.slot))
        if note is not None:
            note(take)
        with by_layer(self.engine.model, take, len(self.engine.layout.layers)):
            token = self._read_new()
        take.result()
        return token

    def resident(self) -> int:
        """Compute, for all rows are there."""
        return self._read_new()

    def _read_new(self) -> int:
        seek(self.cache, self.tokens)
        return self.engine.read(self.cache, self.ids[self.tokens :], self.tokens)

    # Measuring

    def measure(self, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
        """The times of all ways, turn about, with the bus's speed between them."""
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        copies: list[float] = []
        for turn in range(repeats + 1):
            for way, title in WAYS.items():
                if way == "again" and turn > _MOST_READINGS:
                    continue
                seconds = self._timed(way)
                if turn:
                    found[way].append(seconds)
                tell(f"{self.tokens:,} tokens, {title}: {1e3 * seconds:.1f} ms{'' if turn else ', to warm up'}")
            if turn:
                copies.append(self._copy_seconds())
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "bytes_ms": 1e3 * median(copies),
            "path": "+".join(sorted(self._paths)),
            "ways": {
                way: {"title": WAYS[way], "ms": 1e3 * median(all_of), "range_ms": [1e3 * one for one in spread(all_of)]}
                for way, all_of in found.items()
            },
            **({} if self._bus is None else {"bus": self._bus.figures()}),
        }

    def _timed(self, way: str) -> float:
        brings = way in ("ram", "blocking", "streamed")
        self._prepare(wiped=brings)
        started = time.perf_counter()
        token = getattr(self, way)()
        seconds = time.perf_counter() - started
        # Read in one go, with what is said now, the prompt is summed up in another order.
        if way != "again" and token != self._token:
            raise RuntimeError(f"{WAYS[way]}: the first token is {token}, not {self._token}")
        if brings:
            self._require_rows(WAYS[way])
        return seconds

    def _prepare(self, *, wiped: bool) -> None:
        """Clear the cache's rows, so that nothing but a move brings them, or let it hold the conversation."""
        for layer, (keys, values) in zip(self.cache.layers, self._kept, strict=True):
            for array, kept in ((layer.keys, keys), (layer.values, values)):
                array.zero_() if wiped else array.copy_(kept)
        gc.collect()
        self.engine.synchronize()

    def _require_rows(self, title: str) -> None:
        for index, (layer, (keys, values)) in enumerate(zip(self.cache.layers, self._kept, strict=True)):
            for array, kept in ((layer.keys, keys), (layer.values, values)):
                if not torch.equal(array[:, :, : self.tokens], kept[:, :, : self.tokens]):
                    raise RuntimeError(f"{title}: other bytes than were parked, in layer {index}")

    def _copy_seconds(self) -> float:
        """What the conversation's bytes take at the speed of the bus; without one, of a copy in RAM."""
        if self._bus is not None:
            self._bus.measure()
            return self.bytes / float(self._bus.figures()["to_device_gbps"]) / 1e9
        started = time.perf_counter()
        self._room.back(self._rows, 0, self.tokens)
        return time.perf_counter() - started

    # The time line of one streamed turn

    def timeline(self) -> dict[str, Any]:
        """For each layer, in ms since the turn began: when its bytes were there, when its compute began and ended."""
        layers = decoder_layers(self.engine.model, len(self.engine.layout.layers))
        clock = _DeviceClock(self.engine.device) if self.engine.device.type == "cuda" else _HostClock()
        arrived: list[Any] = []
        began: list[Any] = []
        ended: list[Any] = []
        watching: list[threading.Thread] = []

        def watch(take: mmkv.Transfer) -> None:
            watching.append(threading.Thread(target=clock.arrivals, args=(take, len(layers), arrived)))
            watching[0].start()

        # The attention comes behind the hook of its layer that waits.
        hooks = [layer.self_attn.register_forward_pre_hook(lambda *_: began.append(clock.now())) for layer in layers]
        hooks += [layer.register_forward_hook(lambda *_: ended.append(clock.now())) for layer in layers]
        self._prepare(wiped=True)
        start = clock.now()
        try:
            self.streamed(watch)
            whole = clock.now()
        finally:
            for thread in watching:
                thread.join()
            for hook in hooks:
                hook.remove()
        self.engine.synchronize()
        arrivals, begins, ends = (
            [clock.ms_between(start, mark) for mark in marks] for marks in (arrived, began, ended)
        )
        return {
            "tokens": self.tokens,
            "first_token_ms": clock.ms_between(start, whole),
            # A layer that began had its bytes, whenever the watching thread came to see it.
            "arrived_ms": [min(pair) for pair in zip(arrivals, begins, strict=True)],
            "began_ms": begins,
            "ended_ms": ends,
        }


class _HostClock:
    """The time of layers that the host computes."""

    def now(self) -> Any:
        return time.perf_counter()

    def arrivals(self, take: mmkv.Transfer, layers: int, marks: list[Any]) -> None:
        for layer in range(layers):
            take.wait(layer)
            marks.append(self.now())

    def ms_between(self, start: Any, end: Any) -> float:
        return 1e3 * float(end - start)


class _DeviceClock:
    """The time of layers that a device computes, in the order of its streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = torch.cuda.Stream(device)

    def now(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def arrivals(self, take: mmkv.Transfer, layers: int, marks: list[Any]) -> None:
        with torch.cuda.device(self._device):
            for layer in range(layers):
                take.wait(layer, self._watch)
                mark = torch.cuda.Event(enable_timing=True)
                mark.record(self._watch)
                marks.append(mark)

    def ms_between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))
