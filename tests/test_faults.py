"""Faults of the system, injected one call after another: an error or the right bytes, and nothing lost.

Every rule is put to the same question: whichever call fails, however, the conversations that were parked before are
there byte by byte, the counts are right, and the next operation works.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.store import files
from tests.broken import BrokenConnection, Fault, raising
from tests.computed import HYBRID, UNIFORM, assert_parked, ids_of, make_slot, park
from tests.mirror import check_pool

KEPT = ids_of((1, 1300))
GROWN = np.concatenate([KEPT, ids_of((2, 700))])
OTHER = ids_of((3, 900))


@pytest.fixture(params=[UNIFORM, HYBRID], ids=["uniform", "hybrid"])
def pool(request: pytest.FixtureRequest, pool_dir: Path) -> Iterator[mmkv.Pool]:
    """A pool with two conversations, and with room for more."""
    with mmkv.Pool.open(pool_dir, request.param, capacity="4MiB", threads=2) as pool:
        park(pool, "kept", KEPT)
        park(pool, "other", OTHER)
        yield pool


def assert_nothing_lost(pool: mmkv.Pool, *, grown: bool) -> None:
    """`kept` is what it was or what it became, `other` what it was, and the pool goes on."""
    assert_parked(pool, "kept", GROWN if grown else KEPT)
    assert_parked(pool, "other", OTHER)
    check_pool(pool, [])
    park(pool, "next", ids_of((4, 1000)))
    assert_parked(pool, "next", ids_of((4, 1000)))
    park(pool, "kept", GROWN)
    assert_parked(pool, "kept", GROWN)
    check_pool(pool, [])


def each_call(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    fail: Callable[..., Any],
    attempt: Callable[[], Any],
    check: Callable[[BaseException | None], None],
) -> int:
    """Let the first, the second, ... call fail, until an attempt makes fewer calls than that. Returns how many."""
    real = getattr(module, name)
    for at in range(200):
        fault = Fault(real, at, fail)
        monkeypatch.setattr(module, name, fault)
        error: BaseException | None = None
        try:
            attempt()
        except mmkv.MmkvError as raised:
            error = raised
        finally:
            monkeypatch.setattr(module, name, real)
        if fault.calls <= at:
            assert error is None
            return at
        check(error)
    raise AssertionError(f"{name} is called for ever")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_whichever_write_of_a_park_fails(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def check(error: BaseException | None) -> None:
        assert error is not None
        assert os.strerror(code) in str(error)
        assert_parked(pool, "kept", KEPT)
        check_pool(pool, [])

    calls = each_call(monkeypatch, os, "pwritev", raising(code), lambda: park(pool, "kept", GROWN), check)
    assert calls >= 2, "ids and planes were written"
    assert_nothing_lost(pool, grown=True)


def test_a_write_that_fails_names_the_layer_and_the_plane(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_file = str(pool._space.planes[0].path) if pool._space.planes[0] else ""
    real = os.pwritev

    def fail(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == layer_file:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, *arguments)

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(mmkv.TransferError, match=r"layer 0, 'k': .*0000\.kv.*Input/output error") as caught:
        park(pool, "kept", GROWN)
    assert (caught.value.layer, caught.value.plane) == (0, "k")
    monkeypatch.undo()
    assert_nothing_lost(pool, grown=False)


def test_whichever_read_of_a_take_fails(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = make_slot(pool.layout, 2000)
    failed = 0

    def check(error: BaseException | None) -> None:
        nonlocal failed
        failed += 1
        assert isinstance(error, mmkv.TransferError)
        assert error.layer is not None

    each_call(monkeypatch, os, "preadv", raising(errno.EIO), lambda: pool.take("kept", slot).result(30), check)
    assert failed >= 2
    assert_nothing_lost(pool, grown=False)


def test_whichever_read_of_a_match_fails(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(error: BaseException | None) -> None:
        assert "cannot read" in str(error)
        assert pool.stats().leases == 0

    each_call(monkeypatch, os, "preadv", raising(errno.EIO), lambda: pool.match(KEPT).close(), check)
    assert_nothing_lost(pool, grown=False)


def test_short_reads_and_writes_are_taken_up_again(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(real: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            (buffer,) = buffers
            return real(fd, [buffer[: max(1, len(buffer) // 3)]], offset)

        return move

    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    park(pool, "kept", GROWN)
    assert_parked(pool, "kept", GROWN)
    assert_nothing_lost(pool, grown=True)


def test_a_write_that_takes_nothing_is_an_error_and_no_loop(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(error: BaseException | None) -> None:
        # What takes nothing past the page cache is tried through it.
        assert "takes no more bytes" in str(error) or (error is None and not pool._opened.medium.in_ram)

    each_call(monkeypatch, os, "pwritev", lambda *_: 0, lambda: park(pool, "kept", GROWN), check)
    assert_nothing_lost(pool, grown=True)


def test_a_read_that_gives_nothing_is_an_error_and_no_loop(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = make_slot(pool.layout, 2000)

    def check(error: BaseException | None) -> None:
        # What gives nothing past the page cache is tried through it.
        assert "truncated" in str(error) or (error is None and not pool._opened.medium.in_ram)

    each_call(monkeypatch, os, "preadv", lambda *_: 0, lambda: pool.take("kept", slot).result(30), check)
    assert_nothing_lost(pool, grown=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_whichever_file_has_no_room_to_grow(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    large = ids_of((5, 6000))
    # Otherwise they make room.
    pool.pin("kept")
    pool.pin("other")

    def check(error: BaseException | None) -> None:
        assert isinstance(error, mmkv.MmkvError if code == errno.EIO else mmkv.PoolFull)
        assert os.strerror(code) in str(error)
        assert set(pool.conversations()) == {"kept", "other"}
        check_pool(pool, [])

    calls = each_call(monkeypatch, files, "_fallocate", lambda *_: code, lambda: park(pool, "large", large), check)
    assert calls > len(pool.layout.layers)
    assert_parked(pool, "large", large)
    assert_nothing_lost(pool, grown=False)


@pytest.mark.parametrize(
    "statement",
    ["BEGIN IMMEDIATE", "INSERT INTO versions", "INSERT INTO extents", "UPDATE conversations SET version", "COMMIT"],
)
@pytest.mark.parametrize("durable", [False, True])
def test_a_commit_that_fails_at_any_statement(pool: mmkv.Pool, statement: str, durable: bool) -> None:
    catalog = pool._catalog
    real = catalog._db
    broken = BrokenConnection(real, statement, sqlite3.OperationalError("disk I/O error"))
    with pool._lock:
        catalog._db = broken  # type: ignore[assignment]
    try:
        with pytest.raises(mmkv.MmkvError, match="disk I/O error"):
            park(pool, "kept", GROWN, durable=durable)
        assert broken.failures
    finally:
        catalog._db = real
    assert not real.in_transaction
    assert_nothing_lost(pool, grown=False)


def test_drop_fork_and_pin_that_fail_change_nothing(pool: mmkv.Pool) -> None:
    catalog = pool._catalog
    real = catalog._db
    for call in (
        lambda: pool.drop("kept"),
        lambda: pool.fork("kept", "fork"),
        lambda: pool.pin("kept"),
        lambda: pool.resize("8MiB"),
    ):
        catalog._db = BrokenConnection(real, "COMMIT", sqlite3.OperationalError("disk I/O error"))  # type: ignore[assignment]
        try:
            with pytest.raises(mmkv.MmkvError, match="disk I/O error"):
                call()
        finally:
            catalog._db = real
        assert set(pool.conversations()) == {"kept", "other"}
        assert not pool.info("kept").pinned
        check_pool(pool, [])
    assert_nothing_lost(pool, grown=False)


def test_an_eviction_that_cannot_be_written_down_loses_nothing(pool: mmkv.Pool) -> None:
    pool.resize(pool.stats().allocated)
    catalog = pool._catalog
    real = catalog._db
    broken = BrokenConnection(real, "DELETE FROM conversations", sqlite3.OperationalError("disk I/O error"))
    catalog._db = broken  # type: ignore[assignment]
    try:
        with pytest.raises(mmkv.MmkvError):
            park(pool, "large", ids_of((5, 2000)))
    finally:
        catalog._db = real
    assert_parked(pool, "kept", KEPT)
    assert_parked(pool, "other", OTHER)
    check_pool(pool, [])


def test_a_park_whose_sync_fails_is_not_done(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Fault(os.fdatasync, 0, raising(errno.EIO))
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(mmkv.MmkvError, match=r"cannot bring .* to the medium"):
        park(pool, "kept", GROWN, durable=True)
    assert failing.calls
    assert_parked(pool, "kept", KEPT)
    check_pool(pool, [])
    # The kernel takes the pages for clean after an error: a second sync would succeed and say nothing true.
    with pytest.raises(mmkv.MmkvError, match="could not be brought to the medium earlier"):
        pool.flush()
    assert not pool.info("kept").synced
    park(pool, "kept", GROWN)
    assert_parked(pool, "kept", GROWN)
    for file in pool._space._opened:
        file._sync_error = None


def test_a_close_whose_sync_fails_says_so_and_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity="4MiB")
    park(pool, "kept", KEPT)
    monkeypatch.setattr(os, "fdatasync", raising(errno.EIO))
    with pytest.raises(mmkv.MmkvError, match="cannot bring"):
        pool.close()
    monkeypatch.undo()
    with mmkv.Pool.open(tmp_path / "pool") as again:
        assert not again.info("kept").synced
        assert_parked(again, "kept", KEPT)


def test_without_new_threads_nothing_moves_and_nothing_hangs(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool._movers._host._lanes, "submit", submit)
    with pytest.raises(mmkv.MmkvError, match="no thread could be started"):
        park(pool, "kept", GROWN)
    with pytest.raises(mmkv.MmkvError, match="no thread could be started"):
        pool.take("kept", make_slot(pool.layout, 2000)).result(10)
    slot = make_slot(pool.layout, 2000)
    for transfer in pool.swap(slot, leaving="new", leaving_ids=OTHER, arriving="kept"):
        with pytest.raises(mmkv.MmkvError, match="no thread could be started"):
            transfer.result(10)
    monkeypatch.undo()
    assert_nothing_lost(pool, grown=False)


def test_an_open_that_fails_late_gives_the_lock_back(pool_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="4MiB") as pool:
        park(pool, "kept", KEPT)

    def refuse(*_: Any, **__: Any) -> None:
        raise mmkv.PoolFull("no room for the catalog")

    monkeypatch.setattr("mmkv.catalog.Catalog.set_property", refuse)
    with pytest.raises(mmkv.PoolFull):
        mmkv.Pool.open(pool_dir)
    monkeypatch.undo()
    with mmkv.Pool.open(pool_dir) as pool:
        assert_parked(pool, "kept", KEPT)
