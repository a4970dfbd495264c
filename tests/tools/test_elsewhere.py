"""Pools whose catalog lies elsewhere, and pools on shared file systems."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import medium as medium_module
from mmkv.medium import medium_of
from mmkv_inspect import reading, surroundings

LAYOUT = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (64,))})] * 2, "test/elsewhere")


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    place = tmp_path / "catalogs"
    place.mkdir(mode=0o700)
    return place / "pool.sqlite3"


@pytest.fixture
def path(tmp_path: Path, catalog: Path) -> Path:
    """A pool with two conversations, which nobody owns."""
    with mmkv.Pool.open(tmp_path / "kv", LAYOUT, capacity="16MiB", catalog=catalog) as pool:
        slot = mmkv.Slot.allocate(LAYOUT, 1000)
        for number in range(2):
            pool.park(f"chat-{number}", slot, range(number, 1000)).result()
    return tmp_path / "kv"


def test_every_command_finds_it(path: Path, catalog: Path, inspect: Callable[..., Any]) -> None:
    given = ("--catalog", catalog)
    rows = json.loads(inspect("list", path, *given, "--json").out)
    assert {row["conversation"] for row in rows} == {"chat-0", "chat-1"}
    assert "Newest version" in inspect("show", path, "chat-0", *given).out
    stats = inspect("stats", path, *given)
    assert (stats.code, str(catalog) in stats.out) == (0, True)
    assert json.loads(inspect("stats", path, *given, "--json").out)["catalog"] == str(catalog)
    assert "the owner is gone" in inspect("top", path, *given, "--once").out
    assert inspect("rm", path, "chat-0", *given).out == "dropped chat-0\n"
    with mmkv.Pool.open(path, catalog=catalog) as pool:
        assert inspect("rm", path, "chat-1", *given).out == "dropped chat-1\n"
        assert len(pool) == 0


@pytest.mark.parametrize("command", [["list"], ["show", "chat-0"], ["stats"], ["top"], ["rm", "chat-0"]])
def test_without_it_every_command_says_to_give_it(path: Path, inspect: Callable[..., Any], command: list[str]) -> None:
    result = inspect(command[0], path, *command[1:])
    assert result.code == 1
    assert "lies elsewhere: say where" in result.err
    assert "--catalog FILE" in result.err


def test_another_catalog_is_refused(path: Path, tmp_path: Path, pool: Any, inspect: Callable[..., Any]) -> None:
    other = tmp_path / "catalogs" / "other"
    mmkv.Pool.open(tmp_path / "other", LAYOUT, capacity="16MiB", catalog=other).close()
    assert "belongs to another pool" in inspect("list", path, "--catalog", other).err
    assert "lies in its directory" in inspect("list", pool.path, "--catalog", other).err
    assert "missing" in inspect("list", path, "--catalog", tmp_path / "catalogs/missing").err


@pytest.mark.parametrize(("fs_type", "reach"), [("nfs4", "also on other hosts"), ("fuse.x", "on this host only")])
def test_stats_and_probe_tell_how_far_locks_reach(
    pool: Any, inspect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fs_type: str, reach: str
) -> None:
    def faked(path: Path) -> medium_module.Medium:
        return replace(medium_of(path), fs_type=fs_type, options=("rw",))

    monkeypatch.setattr(reading, "medium_of", faked)
    monkeypatch.setattr(surroundings, "medium_of", faked)
    assert f"shared: its locks hold {reach}" in inspect("stats", pool.path).out
    medium = json.loads(inspect("stats", pool.path, "--json").out)["medium"]
    assert medium == {"fs_type": fs_type, "shared": True, "locks_across_hosts": fs_type == "nfs4"}
    found = json.loads(inspect("probe", pool.path, "--json").out)
    assert found["medium"]["locks_across_hosts"] is (fs_type == "nfs4")
    assert any("do not reach other hosts" in line for line in found["advice"]) is (fs_type != "nfs4")
