"""What every figure needs: a slot, bytes to fill it with, page-locked RAM to compare with, and a place for pools."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import mmkv
from benchmarks.contenders import wait_until_locked
from benchmarks.machine import Bus
from benchmarks.memory import Memory, PlaneRows
from benchmarks.results import Output, median, reason_of, said, spread
from benchmarks.rooms import LockedRoom
from benchmarks.work import Noise, wipe

__all__ = ["POOL_CONVERSATIONS", "Rig", "console"]

# A pool is larger than what it holds: this is the one of an engine with so many conversations.
POOL_CONVERSATIONS = 20

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


@dataclass
class Rig:
    """A conversation of `tokens` tokens in `slot`, and RAM that holds it, too.

    Attributes
    ----------
    slot : Slot
        Holds some turns more than `tokens`.
    room : LockedRoom
        The fastest that RAM can be, measured beside every figure.
    """

    memory: Memory
    layout: mmkv.Layout
    slot: mmkv.Slot
    rows: list[PlaneRows]
    tokens: int
    repeats: int
    directory: Path
    noise: Noise
    room: LockedRoom
    bus: Bus | None
    output: Output
    # Seconds that page-locked RAM took, beside the current figure.
    ram_takes: list[float] = field(default_factory=list)
    ram_parks: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the conversation."""
        return self.layout.token_bytes * self.tokens

    @property
    def capacity(self) -> int:
        """Bytes of a pool for many conversations. It decides how long runs are; only what is parked takes memory."""
        return POOL_CONVERSATIONS * self.tokens * (self.layout.token_bytes + 8) + (64 << 20)

    def ram(self) -> None:
        """Move the conversation once each way with page-locked RAM, and see what the bus can do."""
        self.ram_parks.append(self.seconds(lambda: self.room.out(self.rows, 0, self.tokens)))
        self.ram_takes.append(self.seconds(lambda: self.room.back(self.rows, 0, self.tokens)))
        if self.bus is not None:
            self.bus.measure()

    def seconds(self, work: Callable[[], object]) -> float:
        """The seconds that a call takes; what was started before is waited for first."""
        self.memory.synchronize()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    @property
    def take_speed(self) -> float:
        """Bytes a second of page-locked RAM to the slot, beside the current figure."""
        return self.bytes / median(self.ram_takes)

    @property
    def park_speed(self) -> float:
        """Bytes a second from the slot to page-locked RAM."""
        return self.bytes / median(self.ram_parks)

    @property
    def one_way_speed(self) -> float:
        """Bytes a second of going out and coming back, one after the other."""
        return 2 * self.bytes / (median(self.ram_takes) + median(self.ram_parks))

    def figure(self, name: str, value: float, **details: Any) -> None:
        """Note a figure, and say it."""
        console.print(said(name, value, self.output.figure(name, value, **details)))

    def rates(self, name: str, seconds: list[float], ram_speed: float, size: int, **details: Any) -> None:
        """Note the ratio of a move's speed to page-locked RAM's."""
        rate = size / median(seconds)
        self.figure(
            name, rate / ram_speed, gbps=rate / 1e9, ram_gbps=ram_speed / 1e9, seconds=spread(seconds), **details
        )  # fmt: skip

    @contextmanager
    def group(self, *names: str) -> Iterator[None]:
        """Measure figures; what goes wrong is noted as their reason, and the run goes on."""
        self.ram_takes.clear()
        self.ram_parks.clear()
        try:
            yield
        except Exception as error:
            missing = self.output.failed(names[0], error, names)
            console.print(f"[red]{', '.join(missing or names)}:[/red] {reason_of(error)}", markup=True)

    @contextmanager
    def pool(self, name: str, layout: mmkv.Layout) -> Iterator[mmkv.Pool]:
        """A pool that is gone at the end."""
        path = self.directory / name
        try:
            with mmkv.Pool.open(path, layout, capacity=self.capacity) as pool:
                yield pool
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def park(self, pool: mmkv.Pool, conversation: str, slot: Any, ids: Any) -> mmkv.Receipt:
        """Park, wait, and wait until the pool is as fast as it gets."""
        receipt = pool.park(conversation, slot, ids).result()
        wait_until_locked(pool)
        return receipt

    def check(self, conversation: str, whose: str = "mmkv") -> None:
        """Raise unless the slot holds a conversation's bytes."""
        self.noise.require(conversation, self.rows, self.tokens, whose)

    def wipe(self) -> None:
        """Clear the slot."""
        wipe(self.memory, self.rows)
