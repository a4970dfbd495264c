"""Pools that are damaged, foreign or made to harm: one line and exit code 1, at little cost."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2
COMMANDS = [["list"], ["show", "chat"], ["stats"], ["rm", "chat"]]


def _change_description(path: Path, **changes: object) -> None:
    file = path / "pool.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _set(statement: str, *values: object) -> Callable[[Any], None]:
    return lambda pool: pool.run_sql(statement, *values)


def _close_and(change: Callable[[Path], object]) -> Callable[[Any], None]:
    def damage(pool: Any) -> None:
        pool.catalog.close()
        change(pool.path)

    return damage


def _replace_by_link(path: Path, name: str) -> None:
    file = path / name
    elsewhere = path.parent / f"elsewhere-{name}"
    if file.exists():
        file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _replace_by_pipe(path: Path) -> None:
    (path / "pool.json").unlink()
    os.mkfifo(path / "pool.json")


def _cut(path: Path) -> None:
    os.truncate(path / "catalog.sqlite3", 5000)


DAMAGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no description": (_close_and(lambda path: (path / "pool.json").unlink()), "is not a pool"),
    "description is no JSON": (_close_and(lambda path: (path / "pool.json").write_bytes(b"\x00{")), "damaged"),
    "description is nested": (_close_and(lambda path: (path / "pool.json").write_text("[" * 100_000)), "damaged"),
    "newer format": (_close_and(lambda path: _change_description(path, format=99)), "newer than"),
    "other fingerprint": (_close_and(lambda path: _change_description(path, fingerprint="0")), "fingerprint"),
    "no sizes": (_close_and(lambda path: _change_description(path, sizes={})), "sizes"),
    "description is a link": (_close_and(lambda path: _replace_by_link(path, "pool.json")), "cannot be read"),
    "catalog is a link": (_close_and(lambda path: _replace_by_link(path, "catalog.sqlite3")), "symbolic link"),
    "log is a link": (_close_and(lambda path: _replace_by_link(path, "catalog.sqlite3-wal")), "symbolic link"),
    "no catalog": (_close_and(lambda path: (path / "catalog.sqlite3").unlink()), "is missing"),
    "catalog is text": (_close_and(lambda path: (path / "catalog.sqlite3").write_text("hello " * 999)), "damaged"),
    "catalog is empty": (_close_and(lambda path: (path / "catalog.sqlite3").write_bytes(b"")), "not a catalog"),
    "catalog is cut": (_close_and(_cut), "damaged"),
    "newer catalog": (_set("PRAGMA user_version = 7"), "newer than"),
    "foreign catalog": (_set("PRAGMA application_id = 7"), "not a catalog"),
    "no table": (_set("DROP TABLE extents"), "tables"),
    "a view": (_set("CREATE VIEW v AS SELECT 1"), "tables"),
    "giant extent": (_set("UPDATE extents SET count = ?", 1 << 59), "blocks for its"),
    "giant extent and tokens": (
        lambda pool: [
            pool.run_sql("UPDATE extents SET count = ?", 1 << 40),
            pool.run_sql("UPDATE versions SET tokens = ?", 1 << 49),
        ],
        "outside the allocated segments",
    ),
    "extent far away": (_set("UPDATE extents SET first = ?", 1 << 59), "outside the allocated segments"),
    "extent before the start": (_set("UPDATE extents SET first = -1"), "damaged"),
    "extent is text": (_set("UPDATE extents SET first = 'x'"), "damaged"),
    "no tokens": (_set("UPDATE versions SET tokens = 0"), "damaged"),
    "too many tokens": (_set("UPDATE versions SET tokens = 1000000"), "blocks for its"),
    "negative segment": (_set("UPDATE segments SET number = -1 WHERE number = 0"), "damaged"),
    "no version": (_set("DELETE FROM versions"), "missing"),
    "endless time": (_set("UPDATE conversations SET parked = 9e999"), "a time"),
    "time of a geologist": (_set("UPDATE conversations SET taken = 1e15"), "a time"),
    "name is a blob": (_set("UPDATE conversations SET name = x'00ff'"), "damaged"),
    "name is no text": (_set("UPDATE conversations SET name = CAST(x'ff1b5b33316d' AS TEXT)"), "cannot be used"),
    "a checkpoint nowhere": (
        _set("INSERT INTO checkpoints (version, tokens, record, boundary) SELECT id, 1, 1 << 50, 0 FROM versions"),
        "checkpoints outside",
    ),
    "capacity is text": (_set("UPDATE properties SET value = '\"x\"' WHERE key = 'capacity'"), "capacity"),
    "capacity is giant": (
        _set("UPDATE properties SET value = ? WHERE key = 'capacity'", "9" * 4000), "capacity"
    ),
    "property is no JSON": (_set("UPDATE properties SET value = '{' WHERE key = 'capacity'"), "damaged"),
    "property is nested": (_set("UPDATE properties SET value = ? WHERE key = 'capacity'", "[" * 100_000), "damaged"),
    "owner is a list": (_set("INSERT INTO properties VALUES ('owner', '[]')"), "owner"),
    "another pool's catalog": (_set("UPDATE properties SET value = '\"x\"' WHERE key = 'uuid'"), "another pool"),
    "others can write": (lambda pool: pool.path.chmod(0o777), "can be written by others"),
    "a pipe as description": (
        _close_and(_replace_by_pipe), "not a plain file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(pool: Any, inspect: Callable[..., Any], damage: str, command: list[str]) -> None:
    pool.put("chat", 1, [(0, 1)])
    change, expected = DAMAGES[damage]
    change(pool)
    started = time.monotonic()
    result = inspect(command[0], pool.path, *command[1:])
    assert time.monotonic() - started < 5
    assert result.code == 1
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("mmkv-inspect: ")
    assert result.err.rstrip("\n").isprintable()
    assert expected in result.err


@pytest.mark.parametrize("stats", ["[]", '{"path": 1}', '{"capacity": "x"}', "null"])
def test_statistics_of_another_version_are_left_out(pool: Any, inspect: Callable[..., Any], stats: str) -> None:
    pool.put("chat", 1, [(0, 1)])
    pool.run_sql("INSERT INTO properties VALUES ('stats', ?)", stats)
    assert json.loads(inspect("stats", pool.path, "--json").out)["engine"] is None


def test_a_lock_that_is_a_pipe_or_garbage(pool: Any, inspect: Callable[..., Any]) -> None:
    os.mkfifo(pool.path / "lock")
    assert inspect("list", pool.path).code == 0
    (pool.path / "lock").unlink()
    (pool.path / "lock").write_text("[" * 4096)
    assert inspect("list", pool.path).code == 0


@pytest.mark.parametrize("path", ["missing", "file"])
def test_no_pool(tmp_path: Path, inspect: Callable[..., Any], path: str) -> None:
    (tmp_path / "file").write_text("x")
    result = inspect("list", tmp_path / path)
    assert result.code == 1
    assert ("does not exist" if path == "missing" else "is not a directory") in result.err


def test_hostile_numbers_take_no_memory(pool: Any) -> None:
    pool.put("chat", 1, [(0, 1)])
    pool.put("other", 1, [(1, 1)])
    pool.run_sql("UPDATE segments SET number = ? WHERE number = 15", (1 << 40) - 1)
    first = ((1 << 40) - 1) * pool.geometry.segment_blocks
    pool.run_sql("UPDATE extents SET first = ? WHERE first = 1", first)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    command = [sys.executable, "-m", "mmkv_inspect", "list", str(pool.path), "--json"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 2


def _drop_power() -> None:
    """Take root's power over permissions from this process and what it executes."""
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            if prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")


def _powerless(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmkv_inspect", *map(str, arguments)]
    try:
        return subprocess.run(command, preexec_fn=_drop_power, capture_output=True, text=True, check=False)
    except subprocess.SubprocessError:
        pytest.skip("root cannot give up its power here")


@pytest.fixture
def fixed(pool: Any) -> Iterator[Path]:
    """A copy of a pool in use, its log beside it, that may be read, not written."""
    pool.put("chat", 1, [(0, 1)])
    copy = pool.path.parent / "fixed"
    shutil.copytree(pool.path, copy)
    for file in copy.rglob("*"):
        file.chmod(0o500 if file.is_dir() else 0o400)
    copy.chmod(0o500)
    yield copy
    copy.chmod(0o700)
    (copy / "layers").chmod(0o700)


@pytest.mark.parametrize("closed", [False, True])
def test_a_directory_that_may_only_be_read(fixed: Path, pool: Any, closed: bool) -> None:
    if closed:
        # The last connection writes the log back and deletes it.
        pool.catalog.close()
        fixed.chmod(0o700)
        for file in fixed.glob("catalog*"):
            file.unlink()
        shutil.copy(pool.path / "catalog.sqlite3", fixed)
        fixed.chmod(0o500)
    before = sorted(file.name for file in fixed.iterdir())
    assert ("catalog.sqlite3-wal" in before) is not closed
    ended = _powerless("list", fixed, "--json")
    assert sorted(file.name for file in fixed.iterdir()) == before
    assert ended.returncode == 0, ended.stderr
    assert [row["conversation"] for row in json.loads(ended.stdout)] == ["chat"]


def test_a_log_whose_index_cannot_be_made(fixed: Path) -> None:
    fixed.chmod(0o700)
    (fixed / "catalog.sqlite3-shm").unlink()
    fixed.chmod(0o500)
    ended = _powerless("list", fixed)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "copy the pool's directory" in ended.stderr


def test_rm_in_a_directory_that_may_only_be_read(fixed: Path) -> None:
    ended = _powerless("rm", fixed, "chat")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("name", ["catalog.sqlite3", "pool.json", "."])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_permission_denied(fixed: Path, name: str, command: list[str]) -> None:
    (fixed / name).chmod(0)
    ended = _powerless(command[0], fixed, *command[1:])
    fixed.chmod(0o700)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "permission denied" in ended.stderr.lower()
