"""Faults beneath a pool of two tiers: what fails or hangs is an error at the call that owns it, and nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.store import files
from mmkv.store.pieces import Piece
from mmkv_inspect.reading import read_pool
from mmkv_inspect.usage import tier_problems
from tests.broken import BrokenConnection
from tests.computed import HYBRID, UNIFORM, assert_holds, assert_parked, ids_of, make_slot, park
from tests.crashed import crash
from tests.mirror import check_pool
from tests.tiered import BLOCK, BLOCK_BYTES, Moves, eventually, hot_blocks, is_hot, open_tiers

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")

KEPT = ids_of((1, 1300))
GROWN = np.concatenate([KEPT, ids_of((2, 700))])
OTHER = ids_of((3, 900))
DEADLINE = 0.3


@pytest.fixture(params=[UNIFORM, HYBRID], ids=["uniform", "hybrid"])
def pool(
    request: pytest.FixtureRequest, base: Path, hot: Path, moves: Moves, no_threads_left: None
) -> Iterator[mmkv.Pool]:
    """A pool with two conversations: one at the path only, and one in the hot tier only."""
    before = len(os.listdir("/proc/self/fd"))
    with open_tiers(base, hot, request.param, deadline=DEADLINE) as pool:
        park(pool, "kept", KEPT)
        make_cold(pool)
        park(pool, "other", OTHER)
        yield pool
        moves.fail_read = moves.fail_write = None
        moves.hold.set()
    assert len(os.listdir("/proc/self/fd")) == before


def make_cold(pool: mmkv.Pool) -> None:
    assert pool._hot is not None
    pool.flush()
    while pool._hot.give_back_one():
        pass


def raising(code: int, at: int = 0) -> Callable[[Piece], None]:
    """Lets the pieces from the n-th on fail."""
    seen = 0

    def fail(piece: Piece) -> None:
        nonlocal seen
        seen += 1
        if seen > at:
            raise OSError(code, os.strerror(code))

    return fail


def assert_nothing_lost(pool: mmkv.Pool, *, grown: bool = False) -> None:
    eventually(lambda: pool.stats().quarantined == 0)
    check_pool(pool, [])
    assert_parked(pool, "kept", GROWN if grown else KEPT)
    assert_parked(pool, "other", OTHER)
    park(pool, "kept", GROWN)
    pool.flush()
    assert_parked(pool, "kept", GROWN)
    assert pool.stats().leases == 0
    check_pool(pool, [])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [0, 2])
def test_a_flush_that_the_medium_refuses(pool: mmkv.Pool, moves: Moves, code: int, at: int) -> None:
    moves.fail_write = raising(code, at)
    with pytest.raises(mmkv.MmkvError, match=os.strerror(code)):
        pool.flush()
    assert not pool.info("other").synced
    assert is_hot(pool, "other")
    moves.fail_write = None
    assert_nothing_lost(pool)


def test_the_writer_goes_on_after_an_error(
    base: Path, hot: Path, moves: Moves, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tiers(base, hot, writes=True) as pool:
        moves.fail_write = raising(errno.EIO)
        park(pool, "kept", KEPT)
        eventually(lambda: pool.stats().tiers[1].trouble != "")
        assert "Input/output error" in pool.stats().tiers[1].trouble
        assert_parked(pool, "kept", KEPT)
        moves.fail_write = None
        eventually(lambda: pool.stats().tiers[0].dirty == 0)
        eventually(lambda: pool.stats().tiers[1].trouble == "")
    assert len([record for record in caplog.records if "cannot write" in record.message]) == 1


@pytest.mark.parametrize("way", ["deleted", "moved", "taken over"])
def test_a_hot_tier_that_goes_while_the_pool_is_open(
    pool: mmkv.Pool, base: Path, hot: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [tier.trouble for tier in pool.stats().tiers] == ["", ""]
    hot.rename(hot.with_name("moved"))
    if way != "moved":
        shutil.rmtree(hot.with_name("moved"))
    other = open_tiers(base.with_name("other"), hot, pool.layout) if way == "taken over" else None
    if other is not None:
        park(other, "theirs", OTHER)
    stats = pool.stats()
    gone = f"the hot tier at {hot} was deleted or replaced while the pool is open"
    assert [tier.trouble for tier in stats.tiers] == [gone, ""]
    pool._housekeeping._note_stats()  # type: ignore[union-attr]
    view = read_pool(base, None)
    assert tier_problems(view) == [f"the tier 'hot': {gone}"]
    # Growing the tier is nothing that a park fails for, nor housekeeping.
    with pytest.raises(mmkv.MmkvError, match="cannot grow the files in" if way == "moved" else "deleted or replaced"):
        pool._hot.space.grow("blocks", pool._lock)  # type: ignore[union-attr]
    pool.close()
    assert f"{gone}: all that it had is at the path" in caplog.text
    if other is not None:
        crash(other)
        # Its directory is as it left it: what only that has is there.
        with open_tiers(base.with_name("other"), hot, pool.layout) as other:
            assert_parked(other, "theirs", OTHER)
    with mmkv.Pool.open(base, hot=False) as again:
        assert_parked(again, "kept", KEPT)
        assert_parked(again, "other", OTHER)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_durable_park_that_the_medium_refuses(pool: mmkv.Pool, moves: Moves, code: int) -> None:
    moves.fail_write = raising(code)
    with pytest.raises(mmkv.MmkvError, match=os.strerror(code)):
        park(pool, "kept", GROWN, durable=True)
    moves.fail_write = None
    assert_nothing_lost(pool)
    park(pool, "kept", GROWN, durable=True)
    assert pool.info("kept").synced


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_take_whose_fill_fails(pool: mmkv.Pool, moves: Moves, at: int) -> None:
    moves.fail_read = raising(errno.EIO, at)
    with pytest.raises(mmkv.TransferError, match="Input/output error") as caught:
        pool.take("kept", make_slot(pool.layout, len(KEPT))).result(10)
    assert caught.value.layer is not None
    with pytest.raises(mmkv.TransferError, match="Input/output error"):
        pool.prefetch("kept").result(10)
    moves.fail_read = None
    assert not any(hot_blocks(pool, "kept"))
    assert_nothing_lost(pool)


def test_short_reads_and_writes_between_the_tiers(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(real: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, buffers: Any, offset: int) -> int:
            (buffer,) = buffers
            return real(fd, [buffer[: max(1, len(buffer) // 3)]], offset)

        return move

    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    park(pool, "kept", GROWN)
    pool.flush()
    assert_nothing_lost(pool, grown=True)
    make_cold(pool)
    assert_nothing_lost(pool, grown=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_hot_file_system_without_room_sends_parks_to_the_path(
    base: Path, hot: Path, moves: Moves, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = files._fallocate

    def refuse(fd: int, mode: int, offset: int, size: int) -> int:
        in_hot = os.readlink(f"/proc/self/fd/{fd}").startswith(str(hot))
        return code if in_hot and mode == 0 else real(fd, mode, offset, size)

    with open_tiers(base, hot, HYBRID) as pool:
        park(pool, "other", OTHER)
        pool.flush()
        before = pool.stats().tiers[0].allocated
        monkeypatch.setattr(files, "_fallocate", refuse)
        park(pool, "kept", ids_of((1, 20 * BLOCK)))
        assert not all(hot_blocks(pool, "kept"))
        assert pool.stats().tiers[0].allocated == before, "nothing is given back for what is refused anyway"
        assert_parked(pool, "kept", ids_of((1, 20 * BLOCK)))
        assert_parked(pool, "other", OTHER)
        monkeypatch.undo()
        assert pool._hot is not None
        pool._hot._refused_until = 0.0
        park(pool, "next", OTHER, share=False)
        assert is_hot(pool, "next")
        check_pool(pool, [])


def test_records_that_have_no_segment_do_not_empty_a_tier_that_is_refused(base: Path, hot: Path) -> None:
    with open_tiers(base, hot, HYBRID, hot_capacity=400_000) as pool:
        park(pool, "other", OTHER)
        pool.flush()
        tier = pool._hot
        assert tier is not None
        while tier._drain_segment("checkpoints"):
            pass
        blocks = tier.space.blocks.used
        tier._refused_until = float("inf")
        park(pool, "kept", ids_of((1, 100)))
        assert tier.space.blocks.used >= blocks
        assert_parked(pool, "kept", ids_of((1, 100)))
        check_pool(pool, [])


def test_a_hot_file_that_is_cut_while_the_pool_is_open(base: Path, hot: Path) -> None:
    pool = open_tiers(base, hot)
    park(pool, "kept", KEPT)
    pool.flush()
    park(pool, "other", OTHER)
    os.truncate(hot / "layers" / "0001.kv", 4096)
    with pytest.raises(mmkv.PoolCorrupt, match="truncated"):
        park(pool, "kept", GROWN)
    pool._keep_spare()
    with pytest.raises(mmkv.PoolCorrupt, match="truncated"):
        pool.take("other", make_slot(UNIFORM, len(OTHER)))
    with pytest.raises(mmkv.MmkvError):
        pool.flush()
    with pytest.raises(mmkv.MmkvError):
        pool.close()
    with open_tiers(base, hot) as pool:
        assert pool.conversations() == ["kept"]
        assert_parked(pool, "kept", KEPT)


# What hangs


def test_a_take_whose_read_of_the_path_hangs(pool: mmkv.Pool, moves: Moves) -> None:
    moves.hold.clear()
    slot = make_slot(pool.layout, len(KEPT))
    take = pool.take("kept", slot)
    with pytest.raises(mmkv.TransferTimeout, match="layer 0 did not land") as caught:
        take.result(10)
    assert caught.value.layer == 0
    stats = pool.stats()
    assert stats.quarantined > 0
    # Others go on meanwhile.
    assert_parked(pool, "other", OTHER)
    park(pool, "more", ids_of((7, 600)))
    moves.hold.set()
    eventually(lambda: pool.stats().quarantined == 0)
    assert_nothing_lost(pool)


def test_a_prefetch_that_hangs_passes_its_deadline(pool: mmkv.Pool, moves: Moves) -> None:
    moves.hold.clear()
    with pytest.raises(mmkv.TransferTimeout):
        pool.prefetch("kept").result(10)
    assert pool.stats().quarantined > 0
    moves.hold.set()
    assert_nothing_lost(pool)


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_to_the_path_that_hangs(pool: mmkv.Pool, moves: Moves, durable: bool) -> None:
    moves.hold_writes = True
    moves.hold.clear()
    write = partial(park, pool, "kept", GROWN, durable=True) if durable else pool.flush
    with pytest.raises(mmkv.TransferTimeout):
        write()
    assert pool.stats().quarantined > 0
    # Whoever comes later is told, too, and does not wait for ever.
    with pytest.raises(mmkv.TransferTimeout):
        pool.flush()
    assert_parked(pool, "other", OTHER)
    moves.hold.set()
    assert_nothing_lost(pool)


@pytest.mark.parametrize("writes", [False, True])
def test_a_close_while_the_path_hangs_ends_and_loses_nothing(
    base: Path, hot: Path, moves: Moves, writes: bool, no_threads_left: None
) -> None:
    pool = open_tiers(base, hot, deadline=DEADLINE, writes=writes)
    moves.hold_writes = True
    moves.hold.clear()
    park(pool, "other", OTHER)
    if writes:
        eventually(lambda: moves.waiting > 0)
    done: list[BaseException] = []

    def close() -> None:
        try:
            pool.close()
        except mmkv.MmkvError as error:
            done.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert isinstance(done[0], mmkv.TransferTimeout)
    # The hardware is still at it: nobody else may have the files.
    with pytest.raises(mmkv.PoolLocked):
        open_tiers(base, hot)
    moves.hold.set()

    def opens() -> bool:
        try:
            with open_tiers(base, hot) as again:
                assert_parked(again, "other", OTHER)
                check_pool(again, [])
        except mmkv.PoolLocked:
            return False
        return True

    eventually(opens)


def test_a_close_whose_medium_is_broken_says_so_and_loses_nothing(base: Path, hot: Path, moves: Moves) -> None:
    pool = open_tiers(base, hot)
    park(pool, "kept", KEPT)
    pool.flush()
    park(pool, "kept", GROWN)
    park(pool, "other", OTHER)
    moves.fail_write = raising(errno.EIO)
    with pytest.raises(mmkv.MmkvError, match="Input/output error"):
        pool.close()
    moves.fail_write = None
    pool.close()
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", GROWN)
        assert_parked(pool, "other", OTHER)
        assert pool.stats().tiers[0].dirty == 4 * BLOCK_BYTES
        check_pool(pool, [])


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, mmkv.MmkvError), (errno.ENOSPC, mmkv.PoolFull)])
def test_a_close_that_cannot_write_its_claim_gives_the_locks_back(
    base: Path, hot: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[mmkv.MmkvError]
) -> None:
    pool = open_tiers(base, hot)
    park(pool, "kept", KEPT)

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("mmkv.warming._write_claim", refuse)
    with pytest.raises(mmkv.MmkvError, match=r"hot\.json") as raised:
        pool.close()
    assert type(raised.value) is kind
    monkeypatch.undo()
    with open_tiers(base, hot) as pool:
        assert_parked(pool, "kept", KEPT)


# The catalog


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "INSERT OR REPLACE INTO residents", "DELETE FROM residents"])
@pytest.mark.parametrize("what", ["take", "prefetch", "park", "flush", "durable"])
def test_whatever_cannot_be_noted_leaks_nothing(base: Path, hot: Path, statement: str, what: str) -> None:
    with open_tiers(base, hot, hot_capacity=6 * BLOCK_BYTES) as pool:
        park(pool, "kept", KEPT)
        make_cold(pool)
        park(pool, "other", OTHER)
        park(pool, "filler", ids_of((8, 4 * BLOCK)))
        catalog = pool._catalog
        real = catalog._db
        if what != "flush":
            pool.flush()
        broken = BrokenConnection(real, statement, sqlite3.OperationalError("disk I/O error"))
        with pool._lock:
            catalog._db = broken  # type: ignore[assignment]
        error = "disk I/O error"
        try:
            if what == "take":
                slot = make_slot(UNIFORM, len(KEPT))
                pool.take("kept", slot).result(10)
                assert_holds(slot, KEPT)
            elif what == "prefetch":
                pool.prefetch("kept").result(10)
            elif what == "flush":
                pool.flush()
            else:
                park(pool, "kept", GROWN, durable=what == "durable")
        except mmkv.MmkvError as raised:
            error = str(raised)
        finally:
            pool._traffic.wait_until_quiet()
            catalog._db = real
        assert "disk I/O error" in error
        assert not real.in_transaction
        check_pool(pool, [])
        ids = GROWN if pool.info("kept").tokens == len(GROWN) else KEPT
        assert_parked(pool, "kept", ids)
        assert_parked(pool, "other", OTHER)
        assert_parked(pool, "filler", ids_of((8, 4 * BLOCK)))
        check_pool(pool, [])
    crash_and_compare(base, hot, ids)


def crash_and_compare(base: Path, hot: Path, ids: Any) -> None:
    pool = open_tiers(base, hot, hot_capacity=6 * BLOCK_BYTES)
    assert_parked(pool, "kept", ids)
    crash(pool)
    with open_tiers(base, hot, hot_capacity=6 * BLOCK_BYTES) as pool:
        assert_parked(pool, "kept", ids)
        check_pool(pool, [])
