"""What nobody has used for long goes, by a clock that cannot be set; what is in use or pinned stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mmkv
from mmkv import expiry
from tests.computed import UNIFORM, computed, ids_of, make_slot, park

HOUR = 3600.0


@dataclass
class Clock:
    """A clock that the test moves; the wall clock may be set, too."""

    offset: float = 0.0
    running: float = 0.0

    def time(self) -> float:
        return time.time() + self.offset + self.running

    def monotonic(self) -> float:
        return time.monotonic() + self.running


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(expiry, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def pool(path: Path, clock: Clock) -> Iterator[mmkv.Pool]:
    with opened(path) as pool:
        yield pool


def opened(path: Path, max_idle: float | None = HOUR, *, by_itself: bool = False) -> mmkv.Pool:
    """A pool that looks when the test says so, or by itself."""
    pool = mmkv.Pool.open(path, UNIFORM, capacity="4MiB", max_idle=max_idle)
    assert pool._housekeeping is not None
    if not by_itself:
        pool._housekeeping._chores = ()
    return pool


def look(pool: mmkv.Pool, clock: Clock, seconds: float) -> list[str]:
    """What is there after so many seconds."""
    clock.running += seconds
    assert pool._expiry is not None
    pool._expiry.drop_idle()
    return pool.conversations()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_what_is_idle_goes_and_what_is_used_stays(pool: mmkv.Pool, clock: Clock) -> None:
    for number in range(3):
        park(pool, f"chat-{number}", ids_of((number, 700)))
    assert len(look(pool, clock, 2)) == 3
    assert len(look(pool, clock, HOUR - 10)) == 3
    pool.take("chat-1", make_slot(UNIFORM, 700)).result()
    park(pool, "chat-2", ids_of((2, 800)))
    assert look(pool, clock, 20) == ["chat-1", "chat-2"]
    assert pool.stats().expirations == 1
    assert pool.stats().evictions == 0
    assert look(pool, clock, HOUR + 10) == []
    assert pool.stats().expirations == 3


def test_housekeeping_does_it(path: Path, clock: Clock) -> None:
    with opened(path, by_itself=True) as pool:
        park(pool, "chat", ids_of((1, 700)))
        clock.running += 10
        time.sleep(0.5)
        assert "chat" in pool
        clock.running += HOUR
        eventually(lambda: len(pool) == 0)


def test_what_is_pinned_or_leased_stays(pool: mmkv.Pool, clock: Clock) -> None:
    for name in ("pinned", "matched", "taken"):
        park(pool, name, ids_of((ord(name[0]), 700)))
    pool.pin("pinned")
    look(pool, clock, 2)
    with pool.match(ids_of((ord("m"), 700))) as match:
        assert match.conversation == "matched"
        assert look(pool, clock, 2 * HOUR) == ["pinned", "matched"]
    assert look(pool, clock, 2) == ["pinned"]
    pool.unpin("pinned")
    assert look(pool, clock, 2) == []


def test_what_is_being_parked_stays(pool: mmkv.Pool, clock: Clock) -> None:
    ids = ids_of((1, 1500))
    park(pool, "chat", ids[:700])
    look(pool, clock, 2)
    pool._traffic.enter_park("chat", lambda: None)
    assert look(pool, clock, 2 * HOUR) == ["chat"]
    pool._traffic.leave_park("chat")
    pool.park("chat", computed(UNIFORM, ids), ids).result()
    assert look(pool, clock, 2) == ["chat"], "it was used again"


@pytest.mark.parametrize("jump", [-30 * 86400.0, 30 * 86400.0])
def test_a_clock_that_is_set_drops_nothing(pool: mmkv.Pool, clock: Clock, jump: float) -> None:
    park(pool, "before", ids_of((1, 700)))
    look(pool, clock, 2)
    clock.offset = jump
    park(pool, "after", ids_of((2, 700)))
    # What the catalog would say of it, had the system's own clock been set.
    pool._ledger.conversations["after"].parked += jump
    look(pool, clock, 2)
    assert look(pool, clock, HOUR - 10) == ["before", "after"]
    assert look(pool, clock, 20) == []


def test_the_time_while_the_pool_was_closed_counts(path: Path, clock: Clock) -> None:
    with opened(path) as pool:
        park(pool, "old", ids_of((1, 700)))
        park(pool, "other", ids_of((2, 700)))
        pool.take("other", make_slot(UNIFORM, 700)).result()
    clock.offset = HOUR / 2
    with opened(path) as pool:
        assert look(pool, clock, 2) == ["old", "other"]
        # Half an hour before, half an hour since.
        assert look(pool, clock, HOUR / 2) == []
    assert len(mmkv.Pool.open(path, readonly=True)) == 0


def test_times_of_the_future_are_now(path: Path, clock: Clock) -> None:
    with opened(path) as pool:
        park(pool, "chat", ids_of((1, 700)))
    clock.offset = -86400.0
    with opened(path) as pool:
        assert look(pool, clock, HOUR - 10) == ["chat"]
        assert look(pool, clock, 20) == []


def test_a_fork_is_a_use_of_its_own(pool: mmkv.Pool, clock: Clock) -> None:
    park(pool, "chat", ids_of((1, 700)))
    look(pool, clock, 2)
    look(pool, clock, HOUR - 10)
    pool.fork("chat", "fork")
    assert look(pool, clock, 20) == ["fork"]


def test_a_name_that_comes_again_starts_anew(pool: mmkv.Pool, clock: Clock) -> None:
    park(pool, "chat", ids_of((1, 700)))
    look(pool, clock, 2)
    assert look(pool, clock, HOUR - 10) == ["chat"]
    pool.drop("chat")
    park(pool, "chat", ids_of((1, 700)))
    assert look(pool, clock, 20) == ["chat"]


def test_without_it_everything_stays(path: Path, clock: Clock) -> None:
    with opened(path, None, by_itself=True) as pool:
        park(pool, "chat", ids_of((1, 700)))
        clock.running += 1000 * HOUR
        time.sleep(0.5)
        assert "chat" in pool
        assert pool.stats().expirations == 0


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_a_bad_time_is_refused(path: Path, bad: float) -> None:
    with pytest.raises(ValueError, match=f"max_idle must be positive seconds or None, not {bad}"):
        opened(path, bad)
    assert not path.exists()
