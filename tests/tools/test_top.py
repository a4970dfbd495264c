"""top: what it shows of a running engine, of one that hangs and of one that is gone."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mmkv
from mmkv.directory import OwnerLock
from mmkv.info import PoolStats, TierStats, TransferStats
from mmkv_inspect.sampling import Sample, State, rates_between, read_sample
from mmkv_inspect.top import frame

STATS = PoolStats(
    path="mapped", capacity=1 << 30, allocated=1 << 29, used=1 << 28, free=1, conversations=4, leases=1, transfers=1,
    quarantined=0, free_runs=3, largest_free_run=1 << 20, fragmentation=0.25, parks=10, takes=9, hits=8, misses=1,
    evictions=5, failures=0, bytes_parked=10**10, bytes_taken=2 * 10**10,
    tiers=(
        TierStats("hot", "/dev/shm/hot", "tmpfs", 1 << 28, 1 << 28, 252 << 20, 3 << 20, 0, "it is gone\x1b"),
        TierStats("path", "/mnt/kv\x1b", "ext4", 1 << 30, 1 << 29, 1 << 28, 0, 4096),
    ),
    under_way=(TransferStats("take of 'chat\x1b[31m'", "take", 48, 12, 10**10, 0.5),),
)  # fmt: skip


@pytest.fixture
def owned(pool: Any) -> Iterator[Any]:
    """A pool whose lock this process holds."""
    lock = OwnerLock(pool.path)
    pool.catalog.set_property("owner", {"pid": os.getpid(), "host": "here", "started": time.time() - 60})
    yield pool
    lock.release()


def note(pool: Any, stats: PoolStats = STATS, ago: float = 0.0) -> None:
    pool.catalog.set_property("stats", {**asdict(stats), "noted": time.time() - ago})


def text_of(sample: Sample, before: Sample | None = None) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(frame(sample, before and rates_between(before, sample)))
    return capture.get()


def test_one_frame(owned: Any, inspect: Callable[..., Any]) -> None:
    note(owned)
    result = inspect("top", owned.path, "--once")
    assert result.code == 0
    assert all(line.isprintable() for line in result.out.splitlines())
    for text in (
        f"owned by process {os.getpid()} on here; figures 0.", "test/model-7b", "98.4%", "252.0 MiB", "3.0 MiB",
        r"/mnt/kv\x1b", r"take of 'chat\x1b[31m'", "12/48", "20.00", "0.5s", "4.0 KiB", "Spills",
        r"hot: it is gone\x1b",
    ):  # fmt: skip
        assert text in result.out, text
    # Into a pipe it is one frame, too.
    assert "owned by process" in inspect("top", owned.path).out


@pytest.mark.parametrize("width", [80, 60])
def test_no_column_vanishes_in_a_narrow_terminal(owned: Any, width: int) -> None:
    note(owned)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(frame(read_sample(owned.path, None), None))
    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines[1:])
    for text in ("Tier", "hot", "path", "98.4", "tmp", "12/4", "GB/s"):
        assert any(text in line for line in lines), text


def test_json(owned: Any, inspect: Callable[..., Any]) -> None:
    note(owned, ago=1)
    value = json.loads(inspect("top", owned.path, "--json").out)
    assert (value["state"], value["owner"]["pid"], value["requests"]) == ("live", os.getpid(), 0)
    assert 1 <= value["age"] < 5
    assert value["engine"]["tiers"][0]["name"] == "hot"
    assert value["engine"]["under_way"][0]["layers_done"] == 12


def test_an_owner_that_notes_nothing_while_transfers_are_under_way_hangs(owned: Any) -> None:
    note(owned, ago=30)
    sample = read_sample(owned.path)
    assert sample.state is State.STALE
    assert "stale figures, 30s old" in text_of(sample)
    note(owned, replace(STATS, under_way=()), ago=50)
    sample = read_sample(owned.path)
    assert sample.state is State.LIVE, "nothing changes in an engine that does nothing"
    assert "nothing under way" in text_of(sample)


def test_an_owner_that_is_gone(pool: Any) -> None:
    assert "nobody has owned this pool yet" in text_of(read_sample(pool.path))
    pool.catalog.set_property("owner", {"pid": 4242, "host": "there", "started": time.time() - 60})
    note(pool, ago=20)
    sample = read_sample(pool.path)
    assert sample.state is State.GONE
    assert "the owner is gone: process 4242 on there left these figures, 20s old" in text_of(sample)
    assert "Was under way" in text_of(sample)


def test_figures_of_a_former_owner_do_not_count(owned: Any) -> None:
    note(owned, ago=3600)
    owned.catalog.add_request("drop", "x")
    sample = read_sample(owned.path)
    assert sample.state is State.SILENT
    assert "has noted no figures yet; 1 request waits" in text_of(sample)
    assert rates_between(sample, sample) is None


def later(sample: Sample, seconds: float, **changes: Any) -> Sample:
    assert sample.stats is not None
    now = sample.now + seconds
    return replace(sample, now=now, noted=now, stats=replace(sample.stats, **changes))


def test_rates_count_bytes_as_they_move(owned: Any) -> None:
    note(owned)
    first = read_sample(owned.path)
    moving = (replace(STATS.under_way[0], bytes=3 * 10**10),)
    rates = rates_between(first, later(first, 2, parks=14, hits=9, bytes_parked=11 * 10**9, under_way=moving))
    assert rates is not None
    assert rates.parks == pytest.approx(2, rel=0.1)
    assert rates.hits == pytest.approx(0.5, rel=0.1)
    assert rates.takes == 0
    assert rates.bytes_parked == pytest.approx(5e8, rel=0.1)
    assert rates.bytes_taken == pytest.approx(1e10, rel=0.1)
    # The take ended: what was under way is booked, and only what came since counts.
    done = later(first, 1, takes=10, bytes_taken=3 * 10**10, under_way=())
    assert rates_between(first, done).bytes_taken == pytest.approx(0, abs=1)
    assert "2.0/s" in text_of(later(first, 2, parks=14), first)


def test_rates_after_a_pause_are_those_of_its_end(owned: Any) -> None:
    idle = replace(STATS, under_way=())
    note(owned, idle, ago=50)
    first = read_sample(owned.path)
    assert rates_between(first, replace(first, now=first.now + 1)).parks == 0
    # Nothing was noted for 50 seconds, for nothing changed; ten parks have come since the last look.
    rates = rates_between(first, later(first, 1, parks=20))
    assert rates.parks == pytest.approx(5)


def test_rates_of_two_owners_are_none(owned: Any) -> None:
    note(owned)
    first = read_sample(owned.path)
    other = later(replace(first, owner=replace(first.owner, pid=1)), 1)
    assert rates_between(first, other) is None


def test_a_terminal_is_written_anew_until_the_user_has_seen_enough(tmp_path: Path) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (64,))})] * 2, "test/top")
    with mmkv.Pool.open(tmp_path / "pool", layout, capacity="16MiB") as pool:
        pool.park("a", mmkv.Slot.allocate(layout, 100), range(100)).result()
        master, terminal = pty.openpty()
        command = [sys.executable, "-m", "mmkv_inspect", "top", str(pool.path), "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
        with subprocess.Popen(command, stdin=terminal, stdout=terminal, env=environment) as process:
            os.close(terminal)
            seen = b""
            deadline = time.monotonic() + 20
            while seen.count(b"owned by process") < 3:
                assert time.monotonic() < deadline
                seen += os.read(master, 1 << 16)
            process.send_signal(signal.SIGINT)
            while process.poll() is None:
                assert time.monotonic() < deadline
                try:
                    seen += os.read(master, 1 << 16)
                except OSError:
                    break
            assert process.wait(20) == 0
        os.close(master)
    assert b"Traceback" not in seen


def test_no_pool(inspect: Callable[..., Any], tmp_path: Path) -> None:
    assert inspect("top", tmp_path).code == 1
    assert inspect("top", tmp_path, "--interval", "0").code == 2
