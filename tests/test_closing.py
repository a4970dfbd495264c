"""A pool ends: whatever fails or is interrupted, threads stop and locks go, and nothing waits for a prefetch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import pool as pool_module
from mmkv.catalog import Catalog
from mmkv.errors import MmkvError, PoolFull, TransferCancelled, TransferTimeout
from mmkv.hot import Hot
from mmkv.housekeeping import Housekeeping
from mmkv.movers import Movers
from mmkv.space import Space
from mmkv.store.files import PoolFile
from mmkv.traffic import Traffic
from mmkv.transfer import Transfer
from mmkv.writer import Writer
from tests.computed import assert_parked, ids_of, park
from tests.tiered import BLOCK, Moves, eventually, hot_blocks, open_tiers

pytestmark = [
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs"),
    pytest.mark.usefixtures("no_threads_left"),
]


def failing_once(owner: Any, name: str, error: BaseException, *, after: bool) -> Callable[..., Any]:
    """What stands for a method and fails the first time, before or after it did its work."""
    real, calls = getattr(owner, name), []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) > 1:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise error

    return failing


@pytest.mark.parametrize(
    ("owner", "name", "after", "error"),
    [
        (Traffic, "wait_until_quiet", False, KeyboardInterrupt()),
        (Writer, "bring", False, PoolFull("no room")),
        (Writer, "bring", False, KeyboardInterrupt()),
        (Writer, "stop", True, KeyboardInterrupt()),
        (Housekeeping, "stop", True, PoolFull("no room")),
        (Movers, "close", True, MmkvError("stuck")),
        (Hot, "close", True, MmkvError("stuck")),
        (pool_module, "close_hot", False, PoolFull("no room")),
        (PoolFile, "close", True, OSError(5, "Input/output error")),
        (Space, "close", True, KeyboardInterrupt()),
        (Catalog, "close", True, MmkvError("stuck")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_fails_the_pool_is_let_go_of(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, error: BaseException
) -> None:
    pool = open_tiers(base, hot, writes=True)
    park(pool, "chat", ids_of((1, 2 * BLOCK)))
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing_once(owner, name, error, after=after))
        with pytest.raises(type(error)):
            pool.close()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) < before
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "chat", ids_of((1, 2 * BLOCK)))


def test_a_lock_file_that_cannot_be_written_is_let_go_of(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_tiers(base, hot)

    def refused(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refused)
        pool.close()
    open_tiers(base, hot).close()


@pytest.mark.parametrize("refused", ["mmkv-writer", "mmkv-housekeeping", "mmkv-rewarm"])
def test_an_opening_that_finds_no_thread_leaves_nothing_behind(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    open_tiers(base, hot).close()
    before = len(os.listdir("/proc/self/fd"))
    start = threading.Thread.start

    def without(self: threading.Thread) -> None:
        if self.name == refused:
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", without)
        with pytest.raises(MmkvError, match=f"the thread '{refused}' cannot be started"):
            open_tiers(base, hot, rewarm=True, writes=True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name in ("mmkv-writer", "mmkv-housekeeping")]
    open_tiers(base, hot).close()


def test_an_opening_that_fails_late_stops_the_writer(base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tiers(base, hot).close()
    note = Catalog.set_property

    def full(self: Catalog, key: str, value: Any, **options: Any) -> None:
        if key == "owner":
            raise PoolFull("no room")
        note(self, key, value, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "set_property", full)
        with pytest.raises(PoolFull):
            open_tiers(base, hot, writes=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "mmkv-writer"]
    open_tiers(base, hot).close()


@pytest.mark.parametrize("rewarm", [False, True], ids=["prefetch", "rewarm"])
def test_closing_cancels_what_is_brought_ahead_of_need(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch, rewarm: bool
) -> None:
    with open_tiers(base, hot, writes=True) as pool:
        for name in ("a", "b"):
            park(pool, name, ids_of((ord(name), 4 * BLOCK)))
        pool.flush()
        while pool._hot is not None and pool._hot.give_back_one():
            pass
    moves = Moves(base, monkeypatch)
    moves.hold.clear()
    pool = open_tiers(base, hot, rewarm=rewarm)
    transfer = None if rewarm else pool.prefetch("a")
    eventually(lambda: moves.waiting > 0)
    closing = threading.Thread(target=pool.close)
    closing.start()
    eventually(lambda: all(transfer.stopped for transfer in list(pool._prefetches)))
    moves.hold.set()
    closing.join(10)
    assert not closing.is_alive()
    if transfer is not None:
        with pytest.raises(TransferCancelled):
            transfer.result(0)
    # A layer that was under way ends; no other begins.
    layers = {piece.layer for piece in moves.pieces}
    assert len(layers) < len(pool.layout.layers)
    with open_tiers(base, hot) as pool:
        assert not any(hot_blocks(pool, "a"))
        assert_parked(pool, "a", ids_of((ord("a"), 4 * BLOCK)))


def test_a_take_that_waits_for_a_prefetch_is_not_cancelled_by_closing(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of((1, 4 * BLOCK))
    with open_tiers(base, hot, writes=True) as pool:
        park(pool, "a", ids)
        pool.flush()
        while pool._hot is not None and pool._hot.give_back_one():
            pass
    moves = Moves(base, monkeypatch)
    moves.hold.clear()
    pool = open_tiers(base, hot)
    pool.prefetch("a")
    eventually(lambda: moves.waiting > 0)
    take = pool.take("a", mmkv.Slot.allocate(pool.layout, len(ids)))
    closing = threading.Thread(target=pool.close)
    closing.start()
    eventually(lambda: pool._closed is not None)
    moves.hold.set()
    closing.join(10)
    assert not closing.is_alive()
    assert take.result(0).tokens == len(ids)


def test_callbacks_of_what_expires_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called: list[Transfer] = []
    transfer = Transfer("hanging", 1, parts=1, deadline=1e-9, finish=lambda: None, release=lambda _: None)
    transfer.add_done_callback(called.append)
    transfer.begin()
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert transfer.expire()
    assert called == [transfer]
    with pytest.raises(TransferTimeout):
        transfer.result(0)
