"""check, export and import as commands."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv_inspect.progress import Meter

_LAYOUT = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (64,))}, {"s": mmkv.State("int8", (9,))})] * 2, "test/care")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed pool of two conversations."""
    slot = mmkv.Slot.allocate(_LAYOUT, 2000)
    with mmkv.Pool.open(tmp_path / "pool", _LAYOUT, capacity="16MiB") as pool:
        pool.park("chat", slot, np.arange(2000)).result()
        pool.park("\x1b[31m", slot, np.arange(500) + 5000).result()
    return tmp_path / "pool"


def _run_sql(path: Path, statement: str) -> None:
    db = sqlite3.connect(path / "catalog.sqlite3", isolation_level=None)
    db.execute(statement)
    db.close()


def test_check_of_a_good_pool(path: Path, inspect: Callable[..., Any]) -> None:
    result = inspect("check", path)
    assert (result.code, result.out, result.err) == (0, "2 conversations, 2 versions: fine\n", "")
    found = json.loads(inspect("check", path, "--json").out)
    assert (found["fine"], found["findings"], found["done"]) == (True, [], [])
    with mmkv.Pool.open(path):
        assert inspect("check", path).code == 0
        result = inspect("check", path, "--fix")
        assert (result.code, result.out) == (1, "")
        assert "owns the pool" in result.err


def test_check_and_fix(path: Path, inspect: Callable[..., Any]) -> None:
    _run_sql(path, "UPDATE versions SET hashes = zeroblob(length(hashes)) WHERE tokens = 2000")
    _run_sql(path, "INSERT INTO extents VALUES (77, 0, 0, 1, 1)")
    result = inspect("check", path)
    assert result.code == 1
    assert "error: hash-mismatch: version 1 of 'chat' has ids at tokens 0 to" in result.out
    assert "warning: extent-without-version: 1 rows of extents are of version 77" in result.out
    assert result.out.endswith("2 conversations, 2 versions: 1 error, 1 warning\n")
    dry = inspect("check", path, "--dry-run")
    assert "would drop 'chat'" in dry.out
    assert inspect("check", path).out == result.out
    assert json.loads(inspect("check", path, "--dry-run", "--json").out)["would_do"]
    fixed = inspect("check", path, "--fix")
    assert fixed.code == 0
    assert "done: drop 'chat'" in fixed.out
    assert fixed.out.endswith("1 conversation, 1 version: fine\n")
    assert inspect("check", path).code == 0
    assert inspect("check", path, "--fix", "--dry-run").code == 2


def test_check_prints_no_controls(path: Path, inspect: Callable[..., Any]) -> None:
    _run_sql(path, "UPDATE versions SET tokens = 1 WHERE tokens = 500")
    for options in ([], ["--dry-run"], ["--json"], ["--fix"]):
        result = inspect("check", path, *options)
        assert (result.out + result.err).replace("\n", "").isprintable()


@pytest.mark.parametrize("command", ["check", "export", "import"])
def test_there_is_no_pool(tmp_path: Path, inspect: Callable[..., Any], command: str) -> None:
    arguments = {"check": [], "export": ["chat", tmp_path / "f"], "import": [tmp_path / "f"]}[command]
    result = inspect(command, tmp_path / "none", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)


def test_export_and_import(
    path: Path, tmp_path: Path, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.safetensors"
    with mmkv.Pool.open(path):
        result = inspect("export", path, "chat", file)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("wrote chat to ")
    assert inspect("export", path, "chat", file).code == 1
    assert inspect("export", path, "chat", file, "--force").code == 0
    assert inspect("export", path, "chat", file, "--force", "--namespace", "x").code == 1
    monkeypatch.setenv("MMKV_POOL", str(path))
    assert inspect("export", "chat", tmp_path / "second").code == 0
    assert (tmp_path / "second").read_bytes() == file.read_bytes()
    result = inspect("import", path, file)
    assert (result.code, result.out) == (1, "")
    assert "exists already" in result.err
    assert inspect("import", path, file, "--replace").code == 0
    assert inspect("import", path, file, "copy", "--namespace", "guests").code == 0
    rows = {row["conversation"]: row for row in json.loads(inspect("list", path, "--json").out)}
    assert (rows["copy"]["namespace"], rows["copy"]["tokens"], rows["copy"]["checkpoints"]) == ("guests", 2000, [2000])
    with mmkv.Pool.open(path):
        assert "owned by process" in inspect("import", path, file, "third").err
    file.write_bytes(file.read_bytes()[:-1])
    result = inspect("import", path, file, "fourth")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert inspect("check", path).code == 0


def test_verify(path: Path, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = inspect("verify", path, "--all")
    assert result.code == 0
    assert re.fullmatch(r"2 conversations, .*GB/s: fine\n", result.out)
    assert result.err == "", "no progress where there is no terminal"
    found = json.loads(inspect("verify", path, "chat", "--json").out)
    assert (found["conversations"], found["corrupt"], found["unverified"]) == (1, [], 0)
    monkeypatch.setenv("MMKV_POOL", str(path))
    assert inspect("verify", "chat").out.startswith("1 conversation, ")
    assert inspect("verify", "nobody").code == 1
    for wrong in (["verify"], ["verify", path, "chat", "--all"]):
        assert inspect(*wrong).code == 2


def test_verify_finds_a_flipped_bit(path: Path, inspect: Callable[..., Any]) -> None:
    _run_sql(path, "UPDATE units_of_blocks SET checksums = zeroblob(length(checksums)) WHERE tokens < 512")
    result = inspect("verify", path, "--all")
    assert result.code == 1
    assert "corrupt: '\\x1b[31m': layer 0, 'k', tokens 0 to 499 (blocks " in result.out
    assert "corrupt: 'chat': layer -1, 'token_ids', tokens 1536 to 1999 (blocks " in result.out
    assert result.out.endswith(" units differ\n")
    with mmkv.Pool.open(path):
        assert "owns the pool" in inspect("verify", path, "--all", "--quarantine").err
    assert "units differ, now in quarantine" in inspect("verify", path, "--all", "--quarantine").out
    result = inspect("verify", path, "--all")
    assert result.code == 1
    assert "2 blocks or checkpoints were in quarantine" in result.out
    assert "Corrupt             2 blocks and 0 checkpoints in quarantine" in inspect("stats", path).out
    assert len(json.loads(inspect("stats", path, "--json").out)["corrupt"]) == 2
    assert "0 of 500" in inspect("list", path).out
    assert "0 of 2,000; the others need bytes that are in quarantine" in inspect("show", path, "chat").out
    assert json.loads(inspect("show", path, "chat", "--json").out)["usable_tokens"] == 0, "no checkpoint is before"
    _run_sql(path, "INSERT INTO quarantine VALUES ('blocks', 77, 0, 'k', 0.0)")
    assert len(json.loads(inspect("stats", path, "--json").out)["corrupt"]) == 2, "nobody holds it"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Meter("read") as meter:
        meter.show(1 << 20, 4 << 20)
        meter.show(4 << 20, 4 << 20)
    shown = capsys.readouterr().err
    assert "read 4.0 MiB of 4.0 MiB, 100 %" in shown or "100 %" in shown
    assert shown.endswith("\r")
