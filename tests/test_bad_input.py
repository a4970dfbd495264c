"""Bad input: an error that says what is wrong and what to do, and nothing lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from tests.computed import (
    HYBRID,
    UNIFORM,
    Ids,
    assert_parked,
    assert_untouched,
    computed,
    ids_of,
    make_slot,
    park,
    rows,
)
from tests.mirror import check_pool

CAPACITY = 4 << 20
IDS = ids_of((1, 1000))


@pytest.fixture
def pool(pool_dir: Path) -> Iterator[mmkv.Pool]:
    """A pool with one conversation, which is whole after the test."""
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        yield pool
        assert_parked(pool, "chat", IDS)
        check_pool(pool, [])


@pytest.fixture
def closed(pool_dir: Path) -> Path:
    """The directory of a closed pool with one conversation."""
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
    return pool_dir


def assert_whole(path: Path) -> None:
    with mmkv.Pool.open(path, UNIFORM) as pool:
        assert_parked(pool, "chat", IDS)
        check_pool(pool, [])


# What comes by a call


@pytest.mark.parametrize("name", ["", "n" * 513])
def test_a_conversation_id_has_1_to_512_characters(pool: mmkv.Pool, name: str) -> None:
    slot = computed(UNIFORM, IDS)
    for call in (lambda: pool.park(name, slot, IDS), lambda: pool.fork("chat", name)):
        with pytest.raises(ValueError, match=f"a conversation's id has 1 to 512 characters, not {len(name)}: "):
            call()


@pytest.mark.parametrize("name", [None, 5, b"chat", ["chat"]])
def test_a_conversation_id_is_a_string(pool: mmkv.Pool, name: Any) -> None:
    slot = computed(UNIFORM, IDS)
    for call in (lambda: pool.park(name, slot, IDS), lambda: pool.take(name, slot), lambda: pool.drop(name)):
        with pytest.raises(TypeError, match="a conversation's id"):
            call()


def test_a_conversation_id_is_valid_unicode(pool: mmkv.Pool) -> None:
    with pytest.raises(ValueError, match="no valid Unicode"):
        pool.park("\ud800", computed(UNIFORM, IDS), IDS)


@pytest.mark.parametrize("name", ["../../x", "/etc", "a/b", "\x1b[31m", "\0", "%s", "n" * 512])
def test_an_id_full_of_slashes_and_escapes_is_as_good_as_any(pool: mmkv.Pool, name: str) -> None:
    park(pool, name, IDS)
    assert_parked(pool, name, IDS)
    pool.drop(name)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([], ValueError, "one token at least"),
        ([1.5], TypeError, "must be integers, not float64"),
        ("text", TypeError, "not str"),
        ([[1]], ValueError, "one-dimensional"),
        ([2**64], ValueError, "64 bits"),
        (range(2001), ValueError, "the slot holds 2000 tokens, fewer than the 2001"),
    ],
)
def test_ids_that_are_none_or_too_many(pool: mmkv.Pool, ids: Any, error: type[Exception], text: str) -> None:
    slot = make_slot(UNIFORM, 2000)
    with pytest.raises(error, match=text):
        pool.park("other", slot, ids)
    with pytest.raises(error, match=text):
        pool.swap(slot, leaving="other", leaving_ids=ids, arriving="chat")
    assert_untouched(slot)
    assert pool.conversations() == ["chat"]


def test_a_slot_that_is_too_small(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 999, fill=3)
    with pytest.raises(ValueError, match="the slot holds 999 tokens, fewer than the 1000"):
        pool.take("chat", slot)
    assert_untouched(slot, 3)


@pytest.mark.parametrize(
    "layout", [HYBRID, mmkv.Layout(UNIFORM.layers, "another model"), mmkv.Layout(UNIFORM.layers[:2], "uniform")]
)
def test_a_slot_of_another_layout_or_model(pool: mmkv.Pool, layout: mmkv.Layout) -> None:
    slot = make_slot(layout, 2000, fill=3)
    for call in (
        lambda: pool.take("chat", slot),
        lambda: pool.park("chat", slot, IDS),
        lambda: pool.swap(slot, leaving="a", leaving_ids=IDS, arriving="chat"),
    ):
        with pytest.raises(mmkv.LayoutMismatch, match="is not that of the pool at"):
            call()
    assert_untouched(slot, 3)


@pytest.mark.parametrize("slot", [None, [], np.zeros(5), "slot"])
def test_what_is_no_slot(pool: mmkv.Pool, slot: Any) -> None:
    with pytest.raises(TypeError, match="slot must be a"):
        pool.park("other", slot, IDS)
    with pytest.raises(TypeError, match="slot must be a"):
        pool.take("chat", slot)


def test_a_read_only_slot_can_be_parked_and_not_taken_into(pool: mmkv.Pool) -> None:
    slot = computed(UNIFORM, IDS)
    for *_, array in rows(slot):
        array.base.flags.writeable = False
    arrays = [{name: array.view() for name, array in layer.items()} for layer in slot.arrays]
    for layer in arrays:
        for array in layer.values():
            array.flags.writeable = False
    frozen = mmkv.Slot(UNIFORM, arrays)
    with pytest.raises(ValueError, match="layer 0, plane 'k': the array is read-only"):
        pool.take("chat", frozen)
    assert pool.park("other", frozen, IDS, share=False).result(30).tokens_written == 1000


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tokens": 0}, ValueError, "tokens must be at least 1, not 0"),
        ({"tokens": 1001}, ValueError, "tokens is 1001, but 'chat' has 1000"),
        ({"tokens": 1.0}, TypeError, "tokens must be an integer, not 1.0"),
        ({"tokens": True}, TypeError, "tokens must be an integer"),
        ({"have": -1}, ValueError, "have must be at least 0, not -1"),
        ({"have": 1001}, ValueError, "have is 1001, more than the 1000"),
        ({"have": 5, "tokens": 4}, ValueError, "have is 5, more than the 4"),
        ({"have": "5"}, TypeError, "have must be an integer"),
    ],
)
def test_counts_that_make_no_sense(pool: mmkv.Pool, options: dict[str, Any], error: type[Exception], text: str) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with pytest.raises(error, match=text):
        pool.take("chat", slot, **options)
    assert_untouched(slot, 3)


@pytest.mark.parametrize("namespace", [None, 5, b"n"])
def test_a_namespace_is_a_string(pool: mmkv.Pool, namespace: Any) -> None:
    with pytest.raises(TypeError, match="namespace must be a string"):
        pool.match(IDS, namespace=namespace)
    with pytest.raises(TypeError, match="namespace must be a string"):
        pool.park("other", computed(UNIFORM, IDS), IDS, namespace=namespace)


def test_a_match_after_its_lease(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with pool.match(IDS) as match:
        pass
    for call in (lambda: pool.take(match, slot), lambda: pool.fork(match, "b")):
        with pytest.raises(ValueError, match="its lease is over; use it inside its with block, or match again"):
            call()
    match.close()
    assert pool.stats().leases == 0
    assert_untouched(slot, 3)


def test_a_match_of_another_pool(pool: mmkv.Pool, tmp_path: Path) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with mmkv.Pool.open(tmp_path / "second", UNIFORM, capacity=CAPACITY) as other:
        park(other, "b", IDS)
        with other.match(IDS) as match, pytest.raises(ValueError, match="made by another pool"):
            pool.take(match, slot)
    assert_untouched(slot, 3)


def test_a_match_that_nobody_closed_gives_its_lease_back(pool: mmkv.Pool) -> None:
    match: mmkv.Match | None = pool.match(IDS)
    assert pool.stats().leases == 1
    with pytest.warns(ResourceWarning, match="was not closed"):
        match = None
    assert match is None
    pool._release_orphans()
    assert pool.stats().leases == 0


def test_use_after_close(pool_dir: Path) -> None:
    pool = mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY)
    park(pool, "chat", IDS)
    match = pool.match(IDS)
    pool.close()
    pool.close()
    slot = make_slot(UNIFORM, 1000, fill=3)
    calls: list[Callable[[], Any]] = [
        lambda: pool.park("chat", slot, IDS),
        lambda: pool.take("chat", slot),
        lambda: pool.take(match, slot),
        lambda: pool.swap(slot, leaving="b", leaving_ids=IDS, arriving="chat"),
        lambda: pool.match(IDS),
        lambda: pool.fork("chat", "b"),
        lambda: pool.drop("chat"),
        lambda: pool.pin("chat"),
        lambda: pool.unpin("chat"),
        lambda: pool.info("chat"),
        lambda: pool.resize("8MiB"),
        pool.flush,
        pool.stats,
        pool.conversations,
        lambda: len(pool),
        lambda: "chat" in pool,
    ]
    for call in calls:
        with pytest.raises(mmkv.PoolClosed, match=r"cannot be used: it was closed"):
            call()
    match.close()
    assert_untouched(slot, 3)
    assert "closed" in repr(pool)


# What comes at opening


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


# Layer files


def files_of(path: Path) -> list[Path]:
    return [path / "tokens.kv", *sorted(path.glob("layers/*"))]


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(bytes(file.stat().st_size))
    new.rename(file)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "is truncated: it has"),
        (Path.unlink, "is missing"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is not a plain file"),
        (lambda file: (file.rename(file.with_suffix(".x")), file.symlink_to(file.with_suffix(".x"))), "symbolic link"),
    ],
    ids=["cut", "gone", "a pipe", "a link"],
)
def test_a_damaged_layer_file_of_a_closed_pool(
    closed: Path, which: int, damage: Callable[[Path], Any], text: str
) -> None:
    damage(files_of(closed)[which])
    for readonly in (False, True):
        with pytest.raises(mmkv.PoolCorrupt, match=text):
            mmkv.Pool.open(closed, readonly=readonly)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("damage", [_cut, Path.unlink, _replace], ids=["cut", "gone", "replaced"])
def test_a_damaged_layer_file_of_an_open_pool(pool_dir: Path, which: int, damage: Callable[[Path], Any]) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        damage(files_of(pool_dir)[which])
        with pytest.raises(mmkv.PoolCorrupt, match=r"truncated|deleted or replaced"):
            pool.take("chat", make_slot(UNIFORM, 1000)).result(30)
        with pytest.raises(mmkv.PoolCorrupt, match=r"truncated|deleted or replaced"):
            park(pool, "other", ids_of((2, 700)))
        assert pool.conversations() == ["chat"]


def test_a_file_that_is_cut_while_it_is_read_is_an_error(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        # As if it happened after the take has looked.
        pool._space.require_whole = lambda: None  # type: ignore[method-assign]
        os.truncate(files_of(pool_dir)[1], 100)
        with pytest.raises(
            mmkv.TransferError, match=r"layer 0, 'k': .*0000\.kv ends at 100 bytes.*truncated"
        ) as caught:
            pool.take("chat", make_slot(UNIFORM, 1000)).result(30)
        assert (caught.value.layer, caught.value.plane) == (0, "k")
        os.truncate(files_of(pool_dir)[0], 100)
        with pytest.raises(mmkv.PoolCorrupt, match=r"tokens\.kv ends at 100 bytes"):
            pool.match(IDS)


def test_a_file_that_is_cut_while_it_is_written_is_not_committed(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        slot = computed(UNIFORM, ids_of((2, 700)))
        begin = mmkv.Transfer.begin

        def cut(transfer: mmkv.Transfer) -> None:
            os.truncate(files_of(pool_dir)[1], 100)
            begin(transfer)

        monkeypatch.setattr(mmkv.Transfer, "begin", cut)
        with pytest.raises(mmkv.PoolCorrupt, match="truncated"):
            pool.park("other", slot, ids_of((2, 700))).result(30)
        assert pool.conversations() == ["chat"]


# File systems and limits


def test_too_few_open_files_for_all_layers(tmp_path: Path) -> None:
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        import mmkv
        layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})] * 80, "80 layers")
        try:
            mmkv.Pool.open(sys.argv[1], layout, capacity="16MiB")
        except mmkv.MmkvError as error:
            print(type(error).__name__, error)
        small = mmkv.Layout(layout.layers[:20], "20 layers")
        with mmkv.Pool.open(sys.argv[1] + "-small", small, capacity="16MiB") as pool:
            slot = mmkv.Slot.allocate(small, 10)
            pool.park("chat", slot, range(10)).result(10)
            print(len(pool))
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "pool"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    ).stdout.splitlines()  # fmt: skip
    assert "MmkvError" in shown[0]
    assert "too many open files" in shown[0]
    assert "ulimit -n" in shown[0]
    assert shown[1] == "1", "what the failed open took is given back"
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})] * 80, "80 layers")
    with mmkv.Pool.open(tmp_path / "pool", layout, capacity="16MiB") as pool:
        park(pool, "chat", IDS)
        assert_parked(pool, "chat", IDS)


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "mmkv-test", where], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_file_system(small_fs: Path) -> None:
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        parked: dict[str, Ids] = {}

        def park_for_ever() -> None:
            for seed in itertools.count():
                ids = ids_of((seed, 1000))
                park(pool, f"chat {seed}", ids)
                parked[f"chat {seed}"] = ids
                pool.pin(f"chat {seed}")

        with pytest.raises(mmkv.PoolFull, match=r"nothing can be dropped.*no room on the file system.*free some space"):
            park_for_ever()
        assert len(parked) > 3
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        check_pool(pool, [])
        pool.drop("chat 0")
        park(pool, "again", ids_of((200, 1000)))
        parked.pop("chat 0")
    with mmkv.Pool.open(small_fs / "pool") as pool:
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        check_pool(pool, [])


def test_a_file_system_that_others_fill(small_fs: Path) -> None:
    ids = ids_of((1, 1000))
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", ids)
        fill(small_fs / "filler")
        assert_parked(pool, "chat", ids)
        with pytest.raises(mmkv.PoolFull):
            park(pool, "large", ids_of((2, 20000)))
        assert_parked(pool, "chat", ids)
    (small_fs / "filler").unlink()
    with mmkv.Pool.open(small_fs / "pool") as pool:
        assert_parked(pool, "chat", ids)
        check_pool(pool, [])


def test_a_full_file_system_does_not_keep_requests_from_being_carried_out(small_fs: Path) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (256,))})], "large blocks")
    with mmkv.Pool.open(small_fs / "pool", layout, capacity="4MiB") as pool:
        segment = pool._space.geometry.segment_bytes
        for seed in range(8):
            park(pool, f"chat {seed}", ids_of((seed, 500)))
        pool._keep_spare()
        with (small_fs / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, os.statvfs(small_fs).f_bavail * 4096 - segment + 4096)
        # From now on every round of housekeeping finds no room for a spare segment.
        while pool._space.blocks.free:
            park(pool, f"chat {len(pool)}", ids_of((len(pool), 500)))
        catalog = Catalog(small_fs / "pool" / "catalog.sqlite3")
        catalog.add_request("drop", "chat 2")
        catalog.close()
        deadline = time.monotonic() + 1
        while "chat 2" in pool:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_no_room_to_create_a_pool(small_fs: Path) -> None:
    fill(small_fs / "filler")
    with pytest.raises(mmkv.PoolFull):
        mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB")
    (small_fs / "filler").unlink()
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", IDS)
        assert_parked(pool, "chat", IDS)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue


def test_a_read_only_file_system(small_fs: Path) -> None:
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", IDS)
    subprocess.run(["mount", "-o", "remount,ro", small_fs], check=True)
    with pytest.raises(mmkv.MmkvError, match="Read-only file system"):
        mmkv.Pool.open(small_fs / "pool")
    with pytest.raises(mmkv.MmkvError, match="cannot be made: Read-only file system"):
        mmkv.Pool.open(small_fs / "new", UNIFORM, capacity="64MiB")
    with mmkv.Pool.open(small_fs / "pool", readonly=True) as pool:
        assert pool.conversations() == ["chat"]
        with pool.match(IDS) as match:
            assert match.tokens == 1000
    subprocess.run(["mount", "-o", "remount,rw", small_fs], check=True)
    assert_whole(small_fs / "pool")


def test_too_little_free_ram_is_pool_full(ram_path: Path) -> None:
    if not ram_path.is_relative_to("/dev/shm"):
        pytest.skip("no tmpfs")
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity=CAPACITY, min_free_ram="64TiB") as pool:
        with pytest.raises(mmkv.PoolFull, match=r"RAM is short: .* are available, .* must stay free"):
            park(pool, "chat", IDS)
        assert pool.stats().allocated == 0


def test_a_file_size_limit_is_pool_full(pool_dir: Path) -> None:
    code = """
        import resource, sys
        from tests.computed import *
        pool = mmkv.Pool.open(sys.argv[1], UNIFORM, capacity="64MiB")
        park(pool, "chat", ids_of((1, 1000)))
        pool.pin("chat")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            for seed in range(2, 60):
                park(pool, str(seed), ids_of((seed, 5000)))
                pool.pin(str(seed))
        except mmkv.PoolFull as error:
            print("full")
        assert_parked(pool, "chat", ids_of((1, 1000)))
        print("fine")
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), pool_dir],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    ).stdout.split()  # fmt: skip
    assert shown == ["full", "fine"]
