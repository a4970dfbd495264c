"""A real pool in another process: looked at while it parks, told to drop, killed, and tidied afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mmkv

# Parks three conversations for good, then goes on growing and dropping one until it is told to end.
_ENGINE = """
import sys, threading
import numpy as np
import mmkv

layer = mmkv.Layer({"k": mmkv.Plane("int8", (64,))}, {"s": mmkv.State("int8", (100,))})
layout = mmkv.Layout([layer] * 3, "test/engine")
slot = mmkv.Slot.allocate(layout, 20_000)
ids = np.arange(20_000)
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
with mmkv.Pool.open(sys.argv[1], layout, capacity="64MiB") as pool:
    for number in range(3):
        pool.park(f"chat-{number}", slot, ids[:3000] + number * 100_000, namespace=f"tenant-{number}").result()
    pool.pin("chat-0")
    pool.take("chat-1", slot).result()
    print("ready", flush=True)
    while not end.is_set():
        for tokens in range(1000, 20_000, 1000):
            pool.park("busy", slot, ids[:tokens] - 1_000_000).result()
        try:
            pool.drop("busy")
        except mmkv.ConversationNotFound:
            pass
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the engine keeps its pool."""
    return tmp_path / "engine-pool"


@pytest.fixture
def engine(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the pool and parks without a pause."""
    command = [sys.executable, "-c", _ENGINE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.communicate(timeout=60)


def _rows(result: Any) -> dict[str, dict[str, Any]]:
    assert result.code == 0, result.err
    return {row["conversation"]: row for row in json.loads(result.out)}


def test_looking_while_it_parks(engine: subprocess.Popen[str], path: Path, inspect: Callable[..., Any]) -> None:
    for _ in range(25):
        rows = _rows(inspect("list", path, "--json"))
        assert {"chat-0", "chat-1", "chat-2"} <= rows.keys() <= {"chat-0", "chat-1", "chat-2", "busy"}
        assert rows["chat-0"]["pinned"] is True
        assert rows["chat-0"]["tokens"] == 3000
        assert rows["chat-0"]["checkpoints"] == [3000]
        assert rows["chat-0"]["owned_bytes"] == rows["chat-0"]["bytes"]
        assert inspect("show", path, "chat-2").code == 0
        stats = json.loads(inspect("stats", path, "--json").out)
        assert stats["problems"] == []
        assert stats["owner"]["alive"] is True
        assert stats["owner"]["pid"] == engine.pid
        assert 0 < stats["used"] <= stats["allocated"] <= stats["capacity"] == 64 << 20
    deadline = time.monotonic() + 10
    while not (
        stats["engine"] and stats["engine"]["parks"] > 3 and _rows(inspect("list", path, "--json"))["chat-1"]["taken"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        stats = json.loads(inspect("stats", path, "--json").out)
    assert stats["engine"]["moved"]["posix"] > 0


def test_dropping_beside_it(engine: subprocess.Popen[str], path: Path, inspect: Callable[..., Any]) -> None:
    started = time.monotonic()
    result = inspect("rm", path, "chat-0", "chat-2", "nobody")
    assert time.monotonic() - started < 2
    assert (result.code, result.out) == (1, "dropped chat-0\ndropped chat-2\n")
    assert "chat-1" in (rows := _rows(inspect("list", path, "--json")))
    assert not {"chat-0", "chat-2"} & rows.keys()
    assert inspect("rm", path, "--namespace", "tenant-1", "--model", "test/*", "--yes").out == "dropped chat-1\n"
    assert json.loads(inspect("stats", path, "--json").out)["requests"] == 0
    assert engine.poll() is None


def test_after_it_was_killed(engine: subprocess.Popen[str], path: Path, inspect: Callable[..., Any]) -> None:
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    assert {"chat-0", "chat-1", "chat-2"} <= _rows(inspect("list", path, "--json")).keys()
    stats = json.loads(inspect("stats", path, "--json").out)
    assert stats["owner"]["alive"] is False
    assert stats["owner"]["pid"] == engine.pid
    # Nobody owns it: rm does for the moment.
    assert inspect("rm", path, "chat-1").out == "dropped chat-1\n"
    with mmkv.Pool.open(path) as pool:
        assert "chat-1" not in pool
        assert "chat-2" in pool
        assert inspect("rm", path, "chat-2").out == "dropped chat-2\n"
        assert "chat-2" not in pool
    assert inspect("rm", path, "chat-2").code == 1


def test_figures_are_those_of_the_pool(path: Path, inspect: Callable[..., Any]) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (64,))})] * 2, "test/figures")
    slot = mmkv.Slot.allocate(layout, 4000)
    with mmkv.Pool.open(path, layout, capacity="16MiB") as pool:
        pool.park("a", slot, range(4000)).result()
        pool.fork("a", "b", 1500)
        pool.park("c", slot, range(10_000, 11_000)).result()
        pool.drop("a")
    # On a disk, what was freed counts as held until it is needed, or until the pool is opened anew.
    with mmkv.Pool.open(path) as pool:
        rows, stats = _rows(inspect("list", path, "--json")), json.loads(inspect("stats", path, "--json").out)
        assert rows.keys() == set(pool.conversations())
        for name, shown in rows.items():
            info = pool.info(name)
            assert (shown["bytes"], shown["owned_bytes"]) == (info.bytes, info.owned_bytes)
            assert (shown["tokens"], shown["extents"]) == (info.tokens, info.extents)
        own = pool.stats()
        for name in ("capacity", "allocated", "used", "free", "free_runs", "largest_free_run", "fragmentation"):
            assert stats[name] == getattr(own, name), name
