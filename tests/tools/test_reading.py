"""list, show and stats: what they print and what they count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mmkv.directory import OwnerLock
from mmkv.info import PoolStats, TierStats, TransferStats
from mmkv_inspect import tables
from mmkv_inspect.reading import read_pool

HOSTILE = "a\x1b[31mb\u202e [red]c[/red] :smile:\n"

STATS = PoolStats(
    path="mapped", capacity=1 << 28, allocated=1 << 24, used=1 << 20, free=1, conversations=4, leases=1, transfers=2,
    quarantined=4096, free_runs=3, largest_free_run=1 << 20, fragmentation=0.25, parks=10, takes=9, hits=8, misses=1,
    evictions=5, failures=0, bytes_parked=1 << 30, bytes_taken=1 << 31, moved={"mapped": 3 << 30},
    tiers=(
        TierStats("hot", "/dev/shm/hot", "tmpfs", 1 << 26, 1 << 25, 1 << 24, 1 << 20, 8192),
        TierStats("path", "/mnt/kv", "ext4", 1 << 28, 1 << 24, 1 << 20, 0, 4096),
    ),
    under_way=(TransferStats("park of 'a'", "park", 4, 1, 1 << 20, 0.5),), spills=2,
)  # fmt: skip


@pytest.fixture
def filled(pool: Any) -> Any:
    """Four conversations, two of which share a block, the last one parked last."""
    tokens = pool.geometry.block_tokens
    pool.put("old", 5 * tokens, [(20, 5)], age=9 * 86400, taken=5 * 86400)
    pool.put("chat-42", 3 * tokens - 10, [(0, 3)], age=300, taken=20, pinned=True)
    pool.put("fork-of-42", 2 * tokens, [(0, 1), (10, 1)], namespace="tenant-7", age=90_000)
    pool.put("chat-1", 1, [(4, 1)], age=2)
    return pool


@pytest.mark.parametrize("width", [100, 80, 60])
def test_a_narrow_terminal_breaks_lines_and_cuts_nothing(
    filled: Any, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "agent-7f3e9c52-0b1d-4a77-9e0c-8d1f5b2a6c31"
    filled.put(name, 1000, [(30, 2)], namespace="tenant-7", taken=3, pinned=True)
    columns = {}

    def noted(titles: Any, rows: Any, room: int) -> list[int]:
        widths = fitted(titles, rows, room)
        columns.update(zip([title for title, _ in titles], widths, strict=True))
        assert sum(widths) == room
        return widths

    fitted = tables._fitted
    monkeypatch.setattr(tables, "_fitted", noted)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(tables, "_console", lambda _=None: Console(markup=False, width=width, color_system=None))
    infos = read_pool(filled.path, None).infos()
    tables.print_list(infos, len(infos), time.time(), hot=True)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert name in "".join(line[: columns["ID"]].strip() for line in lines)
    assert min(columns.values()) >= 3
    assert columns["ID"] >= 8
    if width == 100:
        # Between its words, not within, while there are shorter ids to be had.
        assert columns["Size"] >= len("MiB")
        assert columns["ID"] > 16


def names(result: Any) -> list[str]:
    return [row["conversation"] for row in json.loads(result.out)]


def test_list_counts(filled: Any, inspect: Callable[..., Any]) -> None:
    result = inspect("list", filled.path, "--json")
    assert result.code == 0
    rows = {row["conversation"]: row for row in json.loads(result.out)}
    block = filled.geometry.block_bytes
    assert rows["chat-42"]["bytes"] == 3 * block
    assert rows["chat-42"]["owned_bytes"] == 2 * block
    assert rows["fork-of-42"]["owned_bytes"] == block
    assert rows["fork-of-42"]["extents"] == 2
    assert rows["fork-of-42"]["namespace"] == "tenant-7"
    assert rows["chat-42"]["pinned"] is True
    assert rows["fork-of-42"]["taken"] is None
    assert rows["old"]["tokens"] == 5 * filled.geometry.block_tokens


def test_list_table(filled: Any, inspect: Callable[..., Any]) -> None:
    result = inspect("list", filled.path)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == [
        "ID", "Namespace", "Tokens", "Size", "Alone", "Extents", "Ckpts", "Age", "Taken", "Pinned",
    ]  # fmt: skip
    assert " ".join(lines[2].split()) == "fork-of-42 tenant-7 1,024 2.2 MiB 1.1 MiB 2 0 1d1h never"
    assert " ".join(lines[3].split()) == "chat-42 1,526 3.3 MiB 2.2 MiB 1 0 5m 20s yes"
    assert lines[-1] == "4 conversations, 5,111 tokens"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["chat-1", "fork-of-42", "chat-42", "old"]),
        (["--reverse"], ["old", "chat-42", "fork-of-42", "chat-1"]),
        (["--sort", "id"], ["chat-1", "chat-42", "fork-of-42", "old"]),
        (["--sort", "namespace", "--reverse"], ["fork-of-42", "old", "chat-42", "chat-1"]),
        (["--sort", "tokens"], ["old", "chat-42", "fork-of-42", "chat-1"]),
        (["--sort", "size", "--limit", "2"], ["old", "chat-42"]),
        (["--sort", "alone"], ["old", "chat-42", "chat-1", "fork-of-42"]),
        (["--sort", "extents"], ["fork-of-42", "chat-1", "chat-42", "old"]),
        (["--sort", "checkpoints"], ["chat-1", "fork-of-42", "chat-42", "old"]),
        (["--sort", "age"], ["old", "fork-of-42", "chat-42", "chat-1"]),
        (["--sort", "taken"], ["chat-1", "fork-of-42", "old", "chat-42"]),
        (["--sort", "pinned"], ["chat-42", "chat-1", "fork-of-42", "old"]),
        (["--namespace", "tenant-7"], ["fork-of-42"]),
        (["--namespace", ""], ["chat-1", "chat-42", "old"]),
        (["--match", "chat-*"], ["chat-1", "chat-42"]),
        (["--match", "CHAT-*"], []),
        (["--pinned"], ["chat-42"]),
        (["--larger-than", "3MiB"], ["chat-42", "old"]),
        (["--older-than", "1d"], ["fork-of-42", "old"]),
        (["--older-than", "1d", "--namespace", ""], ["old"]),
    ],
)
def test_list_sorts_and_filters(
    filled: Any, inspect: Callable[..., Any], options: list[str], expected: list[str]
) -> None:
    assert names(inspect("list", filled.path, "--json", *options)) == expected


def test_list_tells_how_many_it_left_out(filled: Any, inspect: Callable[..., Any]) -> None:
    assert inspect("list", filled.path, "--pinned").out.splitlines()[-1] == "1 of 4 conversations, 1,526 tokens"
    assert inspect("list", filled.path, "--match", "x").out == "0 of 4 conversations, 0 tokens\n"


def test_an_empty_pool(pool: Any, inspect: Callable[..., Any]) -> None:
    assert inspect("list", pool.path).out == "0 conversations, 0 tokens\n"
    assert inspect("list", pool.path, "--json").out == "[]\n"
    assert inspect("stats", pool.path).code == 0
    assert inspect("show", pool.path, "x").code == 1


@pytest.mark.parametrize("command", [["list"], ["show", HOSTILE], ["list", "--json"], ["show", HOSTILE, "--json"]])
def test_ids_cannot_reach_the_terminal(pool: Any, inspect: Callable[..., Any], command: list[str]) -> None:
    pool.put(HOSTILE, 1, [(0, 1)], namespace="\x1b]0;title\x07[bold]")
    result = inspect(command[0], pool.path, *command[1:])
    assert result.code == 0
    assert all(line.isprintable() for line in result.out.splitlines())
    if "--json" not in command:
        assert r"a\x1b[31mb\u202e [red]c[/red] :smile:\n" in result.out
        assert r"\x1b]0;title\x07[bold]" in result.out
    else:
        value = json.loads(result.out)
        assert (value[0] if isinstance(value, list) else value)["conversation"] == HOSTILE


def test_a_long_id_is_never_cut_in_a_pipe(pool: Any, inspect: Callable[..., Any]) -> None:
    name = "x" * 512
    pool.put(name, 1, [(0, 1)], namespace="y" * 300)
    assert any(line.split()[:2] == [name, "y" * 300] for line in inspect("list", pool.path).out.splitlines())


def test_no_colour_in_a_pipe_and_folding_on_a_terminal(filled: Any) -> None:
    command = [sys.executable, "-m", "mmkv_inspect", "list", str(filled.path)]
    piped = subprocess.run(command, capture_output=True, check=True, text=True, env=os.environ | {"COLUMNS": "40"})
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) > 60
    main, side = os.openpty()
    try:
        environment = os.environ | {"COLUMNS": "70", "TERM": "xterm"}
        subprocess.run(command, stdout=side, check=True, env=environment)
        shown = os.read(main, 1 << 16).decode()
    finally:
        os.close(main)
        os.close(side)
    assert "\x1b[1m" in shown
    plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[2m", "")
    assert max(map(len, plain.splitlines())) <= 70


def test_a_reader_that_ends_early_is_no_traceback(filled: Any) -> None:
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "mmkv_inspect", "list", str(filled.path), *options]
        reading, writing = os.pipe()
        os.close(reading)
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writing)
        assert "Traceback" not in ended.stderr
        assert "Exception" not in ended.stderr


def test_a_terminal_of_another_encoding(pool: Any) -> None:
    pool.put("日本語", 1, [(0, 1)])
    command = [sys.executable, "-m", "mmkv_inspect", "list", str(pool.path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert rb"\u65e5\u672c\u8a9e" in shown


def test_show(hybrid_pool: Any, inspect: Callable[..., Any]) -> None:
    tokens = hybrid_pool.geometry.block_tokens
    former = hybrid_pool.put("chat", 2 * tokens, [(0, 2)], checkpoints=[(2 * tokens, 0)], synced=True)
    hybrid_pool.put(
        "chat", 3 * tokens - 1, [(0, 2), (7, 1)], checkpoints=[(2 * tokens, 0), (3 * tokens - 1, 5)],
        keep_fallback=former.id,
    )  # fmt: skip
    result = inspect("show", hybrid_pool.path, "chat")
    assert result.code == 0
    for text in ("1,535 tokens in 3 blocks", "0 to 1 ", "7 to 7", "1,024 to 1,534", "Checkpoint at", "not yet"):
        assert text in result.out
    assert "Kept until the newest version is synced: number 1" in result.out
    value = json.loads(inspect("show", hybrid_pool.path, "chat", "--json").out)
    assert value["version"]["extents"] == [{"first": 0, "blocks": 2}, {"first": 7, "blocks": 1}]
    assert value["version"]["checkpoints"][1] == {"tokens": 3 * tokens - 1, "record": 5, "boundary": False}
    assert value["checkpoints"] == [2 * tokens, 3 * tokens - 1]
    assert value["fallback"]["id"] == former.id
    # No other conversation holds what its own former version holds, too.
    assert value["owned_bytes"] == value["bytes"]


def test_show_of_an_id_like_an_option(pool: Any, inspect: Callable[..., Any]) -> None:
    pool.put("--json", 1, [(0, 1)])
    assert "--json" in inspect("show", pool.path, "--", "--json").out


def test_stats(filled: Any, inspect: Callable[..., Any]) -> None:
    filled.catalog.set_property("stats", asdict(STATS))
    filled.catalog.add_request("drop", "x")
    value = json.loads(inspect("stats", filled.path, "--json").out)
    geometry, segments = filled.geometry, filled.catalog.segments("blocks")
    blocks = len(segments) * geometry.segment_blocks
    assert value["used"] == 10 * geometry.block_bytes
    assert value["allocated"] == len(segments) * geometry.segment_bytes
    # Blocks 0 to 2, 4, 10 and 20 to 24 are held.
    assert value["free_runs"] == 4
    assert value["largest_free_run"] == (blocks - 25) * geometry.block_bytes
    assert value["fragmentation"] == pytest.approx(1 - (blocks - 25) / (blocks - 10))
    assert value["capacity"] == 1 << 28
    assert value["requests"] == 1
    assert value["engine"]["moved"] == {"mapped": 3 << 30}
    assert value["owner"]["alive"] is False
    assert value["model"] == "test/model-7b"
    assert value["problems"] == []
    shown = inspect("stats", filled.path).out
    for text in ("256.0 MiB", "3.0 GiB by mapped", "0 to 3", "k int8[4, 128]", "When the pool was last open", "none"):
        assert text in shown


def test_a_hot_tier_is_shown_where_there_is_one(filled: Any, inspect: Callable[..., Any]) -> None:
    filled.catalog.set_property("stats", asdict(replace(STATS, tiers=STATS.tiers[1:])))
    for command in (["list"], ["show", "chat-42"]):
        assert "Dirty" not in inspect(command[0], filled.path, *command[1:]).out
    shown = inspect("stats", filled.path).out
    assert "/mnt/kv" in shown
    assert "Spills" not in shown
    filled.catalog.set_property("stats", asdict(STATS))
    lines = inspect("list", filled.path).out.splitlines()
    assert lines[0].split()[4:8] == ["Alone", "Hot", "Dirty", "Extents"]
    assert " ".join(lines[3].split()) == "chat-42 1,526 3.3 MiB 2.2 MiB 0 B 0 B 1 0 5m 20s yes"
    assert "In the hot tier" in inspect("show", filled.path, "chat-42").out
    shown = inspect("stats", filled.path).out
    assert "Spills to the path" in shown
    row = next(line for line in shown.splitlines() if line.startswith("hot "))
    assert " ".join(row.split()) == "hot 16.0 MiB 25.0% 64.0 MiB 32.0 MiB 1.0 MiB 8.0 KiB tmpfs /dev/shm/hot"
    assert json.loads(inspect("list", filled.path, "--json").out)[0]["hot_bytes"] == 0


def test_figures_that_make_no_sense_are_left_out(filled: Any, inspect: Callable[..., Any]) -> None:
    good = asdict(STATS)
    tier = good["tiers"][0]
    for bad in (
        {"tiers": 5}, {"tiers": ["x"]}, {"tiers": [{**tier, "name": "cold"}]}, {"tiers": [{**tier, "used": -1}]},
        {"under_way": "abc"}, {"under_way": [{}]}, {"moved": {"x": "y"}}, {"fragmentation": float("inf")},
    ):  # fmt: skip
        filled.catalog.set_property("stats", {**good, **bad})
        assert json.loads(inspect("stats", filled.path, "--json").out)["engine"] is None
    # What an older owner did not note is as if it had none.
    del good["tiers"]
    filled.catalog.set_property("stats", good)
    assert json.loads(inspect("stats", filled.path, "--json").out)["engine"]["tiers"] == []


def test_stats_beside_an_owner(filled: Any, inspect: Callable[..., Any]) -> None:
    lock = OwnerLock(filled.path)
    try:
        filled.catalog.set_property("owner", {"pid": os.getpid(), "host": "h\x1b", "path": "posix", "started": 1.0})
        filled.catalog.set_property("stats", asdict(STATS))
        value = json.loads(inspect("stats", filled.path, "--json").out)
        assert value["owner"] == {"alive": True, "pid": os.getpid(), "host": "h\x1b", "path": "posix", "started": 1.0}
        shown = inspect("stats", filled.path).out
        assert rf"process {os.getpid()} on h\x1b, since 1970" in shown
        assert "Since the pool was opened" in shown
    finally:
        lock.release()


def test_stats_of_files_that_are_cut_or_gone(filled: Any, inspect: Callable[..., Any]) -> None:
    (filled.path / "layers" / "0002.kv").unlink()
    os.truncate(filled.path / "tokens.kv", 10)
    result = inspect("stats", filled.path)
    assert result.code == 1
    assert "0002.kv is missing" in result.out
    assert "tokens.kv is truncated: it has 10 bytes" in result.out
    assert len(json.loads(inspect("stats", filled.path, "--json").out)["problems"]) == 2
    assert inspect("list", filled.path).code == 0


def test_the_pool_from_the_environment(
    filled: Any, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert inspect("list").code == 2
    assert inspect("show", "chat-42").code == 2
    monkeypatch.setenv("MMKV_POOL", str(filled.path))
    assert "chat-42" in inspect("list").out
    assert "chat-42" in inspect("show", "chat-42").out
    assert inspect("stats").code == 0
    assert inspect("list", tmp_path).code == 1
    # What deletes wants its pool said.
    assert inspect("rm", "chat-42").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "POOL", "--sort", "colour"],
        ["list", "POOL", "--limit", "0"],
        ["list", "POOL", "--larger-than", "big"],
        ["list", "POOL", "--older-than", "7"],
        ["list", "POOL", "extra"],
        ["stats"],
        ["frobnicate"],
        ["rm", "POOL"],
        ["rm", "POOL", "x", "--match", "y"],
        ["rm", "POOL", "--match", "*"],
    ],
)
def test_wrong_usage(pool: Any, inspect: Callable[..., Any], arguments: list[str]) -> None:
    pool.put("x", 1, [(0, 1)])
    result = inspect(*(pool.path if argument == "POOL" else argument for argument in arguments))
    assert result.code == 2
    assert "Usage: mmkv-inspect" in result.err
    assert "Error: " in result.err


@pytest.mark.parametrize("command", [[], ["list"], ["show"], ["stats"], ["rm"]])
def test_help(inspect: Callable[..., Any], command: list[str]) -> None:
    result = inspect(*command, "--help")
    assert result.code == 0
    assert "Examples:" in result.out
    assert f"mmkv-inspect {' '.join(command)}".strip() in result.out
