"""Signals that come amid a call: whatever they cut off, the pool and its catalog say the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.uninterrupted import uninterrupted
from tests.computed import UNIFORM, assert_parked, computed, ids_of
from tests.mirror import check_pool

MODULES = str(Path(mmkv.__file__).parent)


@pytest.fixture
def pool(ram_path: Path) -> Iterator[mmkv.Pool]:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", min_free_ram=0, deadline=1) as opened:
        yield opened


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Interrupt a call as it enters the library's `at`-th function. Whether it came to that."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(MODULES):
            count += 1
            if count == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def assert_sound(pool: mmkv.Pool) -> None:
    names = set(pool.conversations())
    check_pool(pool, [])
    with mmkv.Pool.open(pool.path, readonly=True) as reader:
        assert set(reader.conversations()) == names


def test_a_fork_is_whole_or_not_there(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    pool.park("a", computed(UNIFORM, ids), ids).result(30)
    for at in range(1, 400):
        done = not interrupted(lambda: pool.fork("a", "f"), at)
        assert_sound(pool)
        if "f" in pool:
            assert_parked(pool, "f", ids)
            pool.drop("f")
        if done:
            break
    assert done


def test_a_drop_is_whole_or_not_done(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1500))
    for at in range(1, 400):
        pool.park("a", computed(UNIFORM, ids), ids).result(30)
        done = not interrupted(lambda: pool.drop("a"), at)
        assert_sound(pool)
        if "a" in pool:
            assert_parked(pool, "a", ids)
            pool.drop("a")
        if done:
            break
    assert done


def test_a_step_is_done_to_its_end_and_then_the_signal_is_raised() -> None:
    done = threading.Event()

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(step)
    assert done.is_set()
    assert uninterrupted(lambda: 7) == 7
    with pytest.raises(ValueError, match="of the step"):
        uninterrupted(lambda: int("no number of the step"))


@pytest.mark.parametrize("kind", ["park", "take"])
def test_a_beginning_that_is_cut_off_meets_the_deadline(
    pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ids, other = ids_of((1, 700)), ids_of((2, 700))
    pool.park("a", computed(UNIFORM, ids), ids).result(30)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    calls: dict[str, Callable[[], Any]] = {
        "park": lambda: pool.park("b", computed(UNIFORM, other), other),
        "take": lambda: pool.take("a", mmkv.Slot.allocate(UNIFORM, 700)),
    }
    with monkeypatch.context() as patch:
        patch.setattr("mmkv.route.Route.start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls[kind]()
    deadline = time.monotonic() + 10
    while pool.stats().transfers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.stats().transfers == 0
    pool.park("b", computed(UNIFORM, other), other).result(30)
    assert_parked(pool, "b", other)
    assert_parked(pool, "a", ids)


def test_a_callback_that_exits_or_waits_holds_up_no_deadline(
    pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = ids_of((1, 700))
    pool.park("a", computed(UNIFORM, ids), ids).result(30)
    go = threading.Event()
    real = os.preadv

    def hang(*arguments: Any) -> int:
        if threading.current_thread().name == "mmkv-posix":
            go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    called = threading.Event()

    def wait(_: mmkv.Transfer) -> None:
        called.set()
        go.wait(30)

    first = pool.take("a", mmkv.Slot.allocate(UNIFORM, 700))
    first.add_done_callback(lambda _: sys.exit(1))
    first.add_done_callback(wait)
    with pytest.raises(mmkv.TransferTimeout):
        first.result(20)
    assert called.wait(5)
    with pytest.raises(mmkv.TransferTimeout):
        pool.take("a", mmkv.Slot.allocate(UNIFORM, 700)).result(20)
    go.set()
    assert "a callback" in caplog.text


def test_a_reader_ends_the_leases_of_matches_that_nobody_closed(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    pool.park("a", computed(UNIFORM, ids), ids).result(30)
    with mmkv.Pool.open(pool.path, readonly=True) as reader:
        for _ in range(50):
            with pytest.warns(ResourceWarning):
                reader.match(ids)
        assert reader.stats().leases == 0


def opaque(value: int) -> tuple[mmkv.PagedSlot, Any]:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})], "opaque", opaque_page_tokens=16)
    array = np.full((8, 128), value, np.int8)
    return mmkv.PagedSlot(layout, [{"k": array}], np.arange(8), 16, opaque=True), array


def test_a_part_of_an_opaque_page_is_no_prefix(ram_path: Path) -> None:
    slot, array = opaque(60)
    taken, found = opaque(0)
    ids = np.arange(60)
    with mmkv.Pool.open(ram_path / "pool", slot.layout, capacity="2MiB", min_free_ram=0) as pool:
        pool.park("a", slot, ids).result(30)
        with pytest.raises(ValueError, match="inside a page of 16 tokens"):
            pool.fork("a", "f", 50)
        pool.fork("a", "f", 48)
        # The engine went back by ten tokens, and computed their page anew.
        array[3] = 50
        assert pool.park("a", slot, ids[:50]).result(30).tokens_written > 0
        pool.take("a", taken).result(30)
        assert found[:4].tolist() == array[:4].tolist()


def test_one_chore_that_fails_starves_no_other(pool: mmkv.Pool, caplog: pytest.LogCaptureFixture) -> None:
    house = pool._housekeeping
    assert house is not None
    house.stop()
    called = threading.Event()

    def fail() -> None:
        raise OSError("a chore that fails")

    again = type(house)(
        pool._lock, pool._catalog, pool._traffic, drop=pool.drop, stats=pool._stats, chores=(fail, called.set)
    )
    assert called.wait(10)
    again.stop()
    assert len(caplog.records) == 1, "it is told once"
