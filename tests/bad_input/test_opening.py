"""What is wrong at an opening, or in the directory, is said, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmkv
from tests.bad_input.whole import CAPACITY, IDS, assert_whole
from tests.computed import (
    HYBRID,
    UNIFORM,
    make_slot,
)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"capacity": 0}, ValueError, "capacity must be a positive number of bytes, not 0"),
        ({"capacity": "lots"}, ValueError, "capacity must be bytes or a text such as '384GiB', not 'lots'"),
        ({"capacity": 1.5}, TypeError, "capacity must be bytes"),
        ({"capacity": 100}, ValueError, "a capacity of 100 bytes is too small: a block of this layout has 512 tokens"),
        ({"deadline": 0}, ValueError, "deadline must be positive seconds or None, not 0"),
        ({"checkpoints": -1}, ValueError, "checkpoints must be at least 0, not -1"),
        ({"checkpoints": 1.5}, TypeError, "checkpoints must be an integer"),
        ({"threads": 0}, ValueError, "threads must be at least 1"),
        ({"store": "magic"}, ValueError, "store must be one of auto, mapped, direct, posix, not 'magic'"),
        ({"min_free_ram": "some"}, ValueError, "min_free_ram must be bytes"),
        ({"layout": "layout"}, TypeError, "layout must be a Layout"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mmkv.Pool.open(tmp_path / "pool", **({"layout": UNIFORM, "capacity": CAPACITY} | options))
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity=CAPACITY):
        pass


def test_what_cannot_be_made_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(mmkv.MmkvError, match=r"^/proc/mmkv/pool cannot be made: no directory can be in /proc: "):
        mmkv.Pool.open("/proc/mmkv/pool", UNIFORM, capacity=CAPACITY)
    (tmp_path / "empty").mkdir(mode=0o700)
    for path in (tmp_path / "new" / "pool", tmp_path / "empty"):
        with pytest.raises(ValueError, match=r"has \d+ tokens, and it takes \d+ bytes"):
            mmkv.Pool.open(path, UNIFORM, capacity=100)
        with pytest.raises(ValueError, match=r"tokens, and with the states of one token count it takes \d+ bytes"):
            mmkv.Pool.open(path, HYBRID, capacity=100)
    with pytest.raises(ValueError, match="hot_capacity is 5, but there is no hot tier"):
        mmkv.Pool.open(tmp_path / "empty", UNIFORM, capacity=CAPACITY, catalog=tmp_path / "catalog", hot_capacity=5)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("hot", [None, False])
def test_rewarming_needs_a_hot_tier(tmp_path: Path, hot: Any) -> None:
    for path in (tmp_path / "pool", tmp_path / "there"):
        with pytest.raises(ValueError, match=r"rewarm is True, but the pool at .* has no hot tier: give one as hot="):
            mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, rewarm=True, hot=hot)
        assert not (tmp_path / "pool").exists()
        mmkv.Pool.open(tmp_path / "there", UNIFORM, capacity=CAPACITY).close()


def test_a_slot_of_another_layout_is_told_what_differs(pool: mmkv.Pool) -> None:
    other = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})] * 3, UNIFORM.model)
    with pytest.raises(mmkv.LayoutMismatch, match=r"the slot's layout is not that of the pool at .*: layer 0, plane"):
        pool.park("chat", make_slot(other, 10), range(10))


def test_what_is_within_is_not_offered(pool: mmkv.Pool) -> None:
    assert set(dir(mmkv)) == {*mmkv.__all__, "__version__"}
    transfer = pool.take("chat", make_slot(UNIFORM, len(IDS)))
    assert {name for name in dir(transfer) if not name.startswith("_")} == {
        "add_done_callback", "cancel", "done", "exception", "kind", "result", "stats", "tokens", "tokens_written",
        "verified", "wait", "what",
    }  # fmt: skip
    transfer.result()


def test_a_pool_needs_a_layout_and_a_capacity_to_be_created(tmp_path: Path) -> None:
    with pytest.raises(mmkv.PoolCorrupt, match="does not exist: give a layout and a capacity"):
        mmkv.Pool.open(tmp_path / "pool")
    with pytest.raises(mmkv.PoolCorrupt, match="does not exist"):
        mmkv.Pool.open(tmp_path / "pool", UNIFORM)
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(mmkv.PoolCorrupt, match="is not a pool: to create one there, give a layout"):
        mmkv.Pool.open(tmp_path / "empty", capacity=CAPACITY)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("readonly", [False, True])
def test_another_layout_or_model(closed: Path, readonly: bool) -> None:
    for layout, text in (
        (HYBRID, "it is of the model 'uniform', not 'hybrid'"),
        (mmkv.Layout(UNIFORM.layers * 2, "uniform"), "it has 3 layers, not 6"),
    ):
        with pytest.raises(mmkv.LayoutMismatch, match=text):
            mmkv.Pool.open(closed, layout, readonly=readonly)
    assert_whole(closed)


def test_a_directory_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear reader")
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=r"is not a pool and not empty \(it holds 'thesis.txt'\)"):
        mmkv.Pool.open(tmp_path, UNIFORM, capacity=CAPACITY)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(mmkv.PoolCorrupt, match=r"is not a pool: it has no pool\.json"):
        mmkv.Pool.open(tmp_path, readonly=True)


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a directory"):
        mmkv.Pool.open(tmp_path / "file", UNIFORM, capacity=CAPACITY)


def test_a_path_that_others_can_write(closed: Path) -> None:
    closed.chmod(0o770)
    with pytest.raises(ValueError, match=r"can be written by others .mode 0770.*run chmod 700"):
        mmkv.Pool.open(closed)
    closed.chmod(0o700)
    assert_whole(closed)


def test_a_second_owner(pool: mmkv.Pool) -> None:
    with pytest.raises(
        mmkv.PoolLocked, match=f"owned by process {os.getpid()}: close it there, or open .*readonly=True"
    ):
        mmkv.Pool.open(pool.path)


def test_a_newer_format(closed: Path) -> None:
    file = closed / "pool.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | {"format": 2}))
    for readonly in (False, True):
        with pytest.raises(mmkv.PoolCorrupt, match="format is 2, newer than 1, the newest that this version"):
            mmkv.Pool.open(closed, readonly=readonly)
    file.write_text(text)
    assert_whole(closed)


@pytest.mark.parametrize("damage", ["", "{", "null"])
def test_a_damaged_description(closed: Path, damage: str) -> None:
    file = closed / "pool.json"
    text = file.read_text()
    file.write_text(damage)
    with pytest.raises(mmkv.PoolCorrupt, match=r"pool\.json is damaged"):
        mmkv.Pool.open(closed, UNIFORM, capacity=CAPACITY)
    file.write_text(text)
    assert_whole(closed)


def test_a_description_that_is_gone(closed: Path) -> None:
    (closed / "pool.json").rename(closed.parent / "kept.json")
    with pytest.raises(mmkv.PoolCorrupt, match=r"but no pool\.json: it is what is left of a pool"):
        mmkv.Pool.open(closed, UNIFORM, capacity=CAPACITY)
    (closed.parent / "kept.json").rename(closed / "pool.json")
    assert_whole(closed)


def _scribble(file: Path) -> None:
    file.write_bytes(b"not a database, whatever its name says" * 200)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_scribble, "damaged: file is not a database"),
        (lambda file: os.truncate(file, 0), r"not a catalog|has lost its catalog|not hold"),
        (lambda file: os.truncate(file, file.stat().st_size // 2), "damaged"),
        (Path.unlink, "has lost its catalog"),
        (lambda file: (file.unlink(), file.mkdir()), "is missing"),
    ],
    ids=["scribbled", "emptied", "halved", "gone", "a directory"],
)
def test_a_damaged_catalog(closed: Path, damage: Callable[[Path], Any], text: str) -> None:
    file = closed / "catalog.sqlite3"
    kept = closed.parent / "kept.sqlite3"
    shutil.copy(file, kept)
    damage(file)
    with pytest.raises(mmkv.PoolCorrupt, match=text):
        mmkv.Pool.open(closed, UNIFORM, capacity=CAPACITY)
    if file.is_dir():
        file.rmdir()
    for left in closed.glob("catalog.sqlite3*"):
        left.unlink()
    kept.rename(file)
    assert_whole(closed)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE extents SET first = 1000000",
        "UPDATE extents SET count = count + 1",
        "DELETE FROM extents",
        "UPDATE versions SET tokens = tokens + 5000",
        "UPDATE versions SET hashes = x''",
        "DELETE FROM segments",
        "INSERT INTO segments (kind, number) VALUES ('blocks', 10000)",
        "UPDATE properties SET value = '\"other\"' WHERE key = 'uuid'",
        "UPDATE properties SET value = '-1' WHERE key = 'capacity'",
        "UPDATE properties SET value = '{' WHERE key = 'capacity'",
    ],
)
def test_a_catalog_that_lists_what_cannot_be(closed: Path, statement: str) -> None:
    kept = closed.parent / "kept.sqlite3"
    shutil.copy(closed / "catalog.sqlite3", kept)
    db = sqlite3.connect(closed / "catalog.sqlite3")
    with db:
        db.execute(statement)
    db.close()
    for readonly in (False, True):
        with pytest.raises(mmkv.PoolCorrupt):
            mmkv.Pool.open(closed, readonly=readonly)
    for left in closed.glob("catalog.sqlite3*"):
        left.unlink()
    kept.rename(closed / "catalog.sqlite3")
    assert_whole(closed)
