"""Who takes part: RAM that forgets, mmkv, and what else users would pick. All park the same slot and take it back."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import mmkv
from benchmarks.memory import PlaneRows
from benchmarks.rooms import Room
from benchmarks.work import Ids, new_ids

__all__ = ["Contender", "MmkvPool", "RamPool", "drop_from_page_cache", "wait_until_locked"]


class Contender(Protocol):
    """A pool in the benchmark."""

    name: str
    path: str

    def park(self, conversation: str, token_ids: Ids) -> None:
        """Park the slot, and wait until it is parked."""

    def settle(self) -> None:
        """What comes between a park and a take, and counts for neither."""

    def take(self, conversation: str) -> float | None:
        """Take the conversation back, and wait until it is there; the seconds until the first layer was, if known."""

    def drop(self, conversation: str) -> None:
        """Forget the conversation."""

    def close(self) -> None:
        """Give everything back."""


class RamPool:
    """One conversation in RAM."""

    def __init__(self, name: str, path: str, room: Room, rows: Sequence[PlaneRows], tokens: int) -> None:
        self.name = name
        self.path = path
        self.room = room
        self._rows = rows
        self._tokens = tokens

    def park(self, conversation: str, token_ids: Ids) -> None:  # noqa: ARG002
        self.room.out(self._rows, 0, self._tokens)

    def settle(self) -> None:
        pass

    def take(self, conversation: str) -> float | None:  # noqa: ARG002
        self.room.back(self._rows, 0, self._tokens)
        return None

    def drop(self, conversation: str) -> None:
        pass

    def close(self) -> None:
        self.room.free()


class MmkvPool:
    """The same slot, parked with mmkv.

    Parameters
    ----------
    cold : bool
        For a pool on a disk: a park ends when the bytes are on the medium, and a take finds none in the page cache.
    """

    def __init__(self, name: str, pool: mmkv.Pool, slot: mmkv.Slot, tokens: int, *, cold: bool = False) -> None:
        self.name = name
        self.pool = pool
        self.path = ""
        self._slot = slot
        self._tokens = tokens
        self._cold = cold

    def warm_up(self, times: int) -> None:
        """Write every block once, and wait until the pool is as fast as it gets."""
        for turn in range(times):
            self.park(f"warm-{turn}", new_ids(self._tokens))
        for conversation in self.pool.conversations():
            self.pool.drop(conversation)
        wait_until_locked(self.pool)
        self.path = ""

    def park(self, conversation: str, token_ids: Ids) -> None:
        receipt = self.pool.park(conversation, self._slot, token_ids, durable=self._cold).result()
        if receipt.tokens_written != len(token_ids):
            raise RuntimeError(f"only {receipt.tokens_written} tokens of new ids moved: {receipt}")
        self._note(receipt.path)

    def settle(self) -> None:
        if self._cold:
            drop_from_page_cache(self.pool.path)

    def take(self, conversation: str) -> float | None:
        started = time.perf_counter()
        take = self.pool.take(conversation, self._slot)
        take.wait(0)
        first = time.perf_counter() - started
        self._note(take.result().path)
        return first

    def _note(self, path: str) -> None:
        self.path = "+".join(sorted({*filter(None, self.path.split("+")), *path.split("+")}))

    def drop(self, conversation: str) -> None:
        self.pool.drop(conversation)

    def close(self) -> None:
        self.pool.close()


def wait_until_locked(pool: mmkv.Pool, patience: float = 60.0) -> None:
    """Wait until the background has page-locked what it can of a pool's files."""
    from mmkv.store import MappedStore

    store = pool._movers._device
    deadline = time.monotonic() + patience
    last, since = -1, time.monotonic()
    while isinstance(store, MappedStore) and time.monotonic() < deadline:
        locked = store.describe()["locked_bytes"]
        if locked >= pool.stats().allocated:
            return
        if locked != last:
            last, since = locked, time.monotonic()
        elif time.monotonic() - since > 2:
            return
        time.sleep(0.01)


def drop_from_page_cache(directory: Path) -> None:
    """Let the kernel forget the clean pages of a pool's layer files."""
    for path in sorted(directory.glob("layers/*")):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
