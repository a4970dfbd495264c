"""What the tests of a pool with two tiers share: how one is opened, and a look at the bytes that move between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv.blocks import block_numbers
from mmkv.store import posix
from mmkv.store.pieces import Piece
from tests.computed import UNIFORM, Ids, ids_of
from tests.crashed import idle_writers

BLOCK = 512
# Of UNIFORM, at the path without and in the hot tier: three layers of 16 bytes a token.
BLOCK_BYTES = BLOCK * 48
CAPACITY = 4 << 20


def open_tiers(
    base: Path, hot: Path, layout: mmkv.Layout = UNIFORM, *, writes: bool = False, **options: Any
) -> mmkv.Pool:
    """A pool in `base` with a hot tier of 16 blocks; nothing is written to the path unasked, unless `writes` is set."""
    options = {"capacity": CAPACITY, "hot": hot, "hot_capacity": 16 * BLOCK_BYTES, "min_free_ram": 0, **options}
    if writes:
        return mmkv.Pool.open(base, layout, **options)
    with idle_writers():
        return mmkv.Pool.open(base, layout, **options)


def text(seed: int, blocks: float) -> Ids:
    """The ids of so many blocks."""
    return ids_of((seed, int(blocks * BLOCK)))


def make_cold(pool: mmkv.Pool) -> None:
    """Bring everything to the path and let it go from the hot tier."""
    assert pool._hot is not None
    pool.flush()
    while pool._hot.give_back_one(even_pinned=True):
        pass
    assert pool._hot.space.allocated_bytes == 0


def hot_blocks(pool: mmkv.Pool, name: str) -> list[bool]:
    """Which blocks of a conversation are in the hot tier."""
    hot = pool._hot
    assert hot is not None
    with pool._lock:
        numbers = block_numbers(pool._ledger.conversations[name].version.extents)
        return [bool(place >= 0) for place in hot.residents["blocks"].places(numbers)]


def is_hot(pool: mmkv.Pool, name: str) -> bool:
    """Whether all blocks of a conversation are in the hot tier."""
    return all(hot_blocks(pool, name))


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something has come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


class Moves:
    """Counts, holds up or breaks what moves in and out of the files under a directory, piece by piece.

    Attributes
    ----------
    read, written : int
        Bytes so far.
    hold : threading.Event
        Reads, and writes with `hold_writes`, wait until it is set.
    waiting : int
        How many wait.
    fail_read, fail_write : callable or None
        Called with each piece; what it raises is what happens.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.read = self.written = self.waiting = 0
        self.pieces: list[Piece] = []
        self.hold = threading.Event()
        self.hold.set()
        self.hold_reads, self.hold_writes = True, False
        self.fail_read: Callable[[Piece], None] | None = None
        self.fail_write: Callable[[Piece], None] | None = None
        self._lock = threading.Lock()
        self._read, self._write = posix.read_piece, posix.write_piece
        monkeypatch.setattr(posix, "read_piece", self._read_piece)
        monkeypatch.setattr(posix, "write_piece", self._write_piece)

    def _pass(self, held: bool) -> None:
        if held and not self.hold.is_set():
            with self._lock:
                self.waiting += 1
            self.hold.wait(30)

    def _read_piece(self, piece: Piece) -> str:
        if piece.copy.file.path.is_relative_to(self.directory):
            self._pass(self.hold_reads)
            if self.fail_read is not None:
                self.fail_read(piece)
            with self._lock:
                self.read += piece.size
                self.pieces.append(piece)
        return self._read(piece)

    def _write_piece(self, piece: Piece) -> str:
        if piece.copy.file.path.is_relative_to(self.directory):
            self._pass(self.hold_writes)
            if self.fail_write is not None:
                self.fail_write(piece)
            with self._lock:
                self.written += piece.size
        return self._write(piece)

    def reset(self) -> None:
        """Count from zero."""
        self.read = self.written = self.waiting = 0
        self.pieces.clear()
