"""rm: by a request beside an owner, and what it reports of each conversation."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmkv.catalog import Catalog
from mmkv.directory import OwnerLock


@pytest.fixture
def filled(pool: Any) -> Any:
    """Three conversations."""
    pool.put("old", 1, [(0, 1)], age=9 * 86400)
    pool.put("new", 1, [(1, 1)])
    pool.put("other", 1, [(2, 1)], namespace="tenant", age=9 * 86400, pinned=True)
    return pool


@contextlib.contextmanager
def _owner(pool: Any, carry_out: Callable[[Catalog, str], None] | None) -> Iterator[None]:
    """A thread that owns the pool and looks at its requests, or one that never does."""
    lock, stop = OwnerLock(pool.path), threading.Event()
    catalog = Catalog(pool.catalog.path)

    def serve() -> None:
        while not stop.wait(0.01):
            for request in catalog.requests() if carry_out else []:
                assert carry_out is not None
                assert request.action == "drop"
                carry_out(catalog, request.argument)
                catalog.remove_requests([request.id])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        catalog.close()
        lock.release()


def _drop(catalog: Catalog, name: str) -> None:
    catalog.drop([name])


def _names(pool: Any) -> list[str]:
    return [row.name for row in pool.catalog.load()]


def test_by_request(filled: Any, inspect: Callable[..., Any]) -> None:
    with _owner(filled, _drop):
        result = inspect("rm", filled.path, "new", "other", "new")
    assert (result.code, result.out, result.err) == (0, "dropped new\ndropped other\n", "")
    assert _names(filled) == ["old"]
    assert filled.catalog.requests() == []


def test_ids_that_are_not_there(filled: Any, inspect: Callable[..., Any]) -> None:
    with _owner(filled, _drop):
        result = inspect("rm", filled.path, "new", "no\x1bbody")
    assert (result.code, result.out) == (1, "dropped new\n")
    assert result.err == f"mmkv-inspect: {filled.path} holds no conversation 'no\\x1bbody'\n"


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--older-than", "7d"], ["old", "other"]),
        (["--older-than", "7d", "--namespace", ""], ["old"]),
        (["--namespace", "tenant"], ["other"]),
        (["--match", "o*"], ["old", "other"]),
        (["--model", "test/*"], ["old", "new", "other"]),
        (["--model", "*-7b", "--older-than", "1w", "--match", "old"], ["old"]),
        (["--model", "llama*"], []),
        (["--namespace", "none"], []),
    ],
)
def test_by_options(filled: Any, inspect: Callable[..., Any], options: list[str], gone: list[str]) -> None:
    with _owner(filled, _drop):
        dry = inspect("rm", filled.path, *options, "--dry-run")
        assert len(_names(filled)) == 3
        result = inspect("rm", filled.path, *options, "--yes")
    assert dry.code == 0
    assert dry.out.splitlines() == ([f"would drop {name}" for name in gone] or ["nothing to drop"])
    assert result.code == 0
    assert result.out.splitlines() == ([f"dropped {name}" for name in gone] or ["nothing to drop"])
    assert _names(filled) == [name for name in ["old", "new", "other"] if name not in gone]


def test_an_owner_that_does_not_answer(filled: Any, inspect: Callable[..., Any]) -> None:
    with _owner(filled, None):
        started = time.monotonic()
        result = inspect("rm", filled.path, "new", "--wait", "0.3")
        assert 0.3 <= time.monotonic() - started < 3
    assert (result.code, result.out) == (1, "")
    assert "'new' waits" in result.err
    assert [request[1:] for request in filled.catalog.requests()] == [("drop", "new")]


def test_an_owner_that_refuses(filled: Any, inspect: Callable[..., Any]) -> None:
    with _owner(filled, lambda catalog, name: None):
        result = inspect("rm", filled.path, "new")
    assert result.code == 1
    assert "'new' is still there" in result.err


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", ["new"]), (b"n\n", ["old", "new", "other"])])
def test_asks_before_it_drops_what_options_select(filled: Any, answer: bytes, left: list[str]) -> None:
    command = [sys.executable, "-m", "mmkv_inspect", "rm", str(filled.path), "--older-than", "7d"]
    main, side = pty.openpty()
    try:
        with _owner(filled, _drop):
            asking = subprocess.Popen(command, stdin=side, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            os.write(main, answer)
            out, _ = asking.communicate(timeout=30)
    finally:
        os.close(main)
        os.close(side)
    assert "Drop these 2 of 3 conversations (1 pinned, at least 2.2 MiB)?" in out
    assert asking.returncode == (0 if answer == b"y\n" else 1)
    assert _names(filled) == left
