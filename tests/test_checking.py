"""Checking a pool: nothing is found in a good one, what was done to a bad one is, and a repair keeps the rest."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv.checking import Check, check_pool, repair_pool
from mmkv.directory import OwnerLock
from tests.computed import HYBRID, UNIFORM, assert_parked, ids_of, park

CAPACITY = 16 << 20
CHAT, OTHER, THIRD = ids_of((1, 3000)), ids_of((2, 2000)), ids_of((3, 1500))


def fill(pool: mmkv.Pool) -> None:
    """Conversations that share, grow, were edited and forked; what is left of them is sound."""
    park(pool, "chat", CHAT[:1000], boundary=True)
    park(pool, "chat", CHAT)
    park(pool, "shares", ids_of((1, 2100), (9, 700)))
    pool.fork("chat", "fork")
    park(pool, "other", OTHER, namespace="apart", salt="apart")
    park(pool, "third", THIRD, durable=True)
    park(pool, "gone", ids_of((4, 4000)))
    pool.drop("gone")


@pytest.fixture(scope="module", params=[UNIFORM, HYBRID], ids=["planes", "states"])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed pool that is copied, never opened."""
    path = tmp_path_factory.mktemp("template") / "pool"
    with mmkv.Pool.open(path, request.param, capacity=CAPACITY) as pool:
        fill(pool)
    return path


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Path:
    """A closed pool."""
    return Path(shutil.copytree(template, tmp_path / "pool"))


def run_sql(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path / "catalog.sqlite3", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def codes(check: Check) -> set[str]:
    return {finding.code for finding in check.findings}


def serious(check: Check) -> set[str]:
    return {finding.code for finding in check.findings if finding.severity != "note"}


def conversations(path: Path) -> set[str]:
    with mmkv.Pool.open(path) as pool:
        return set(pool.conversations())


def test_a_good_pool(filled: Path) -> None:
    check = check_pool(filled)
    assert check.findings == ()
    assert (check.is_fine, check.conversations) == (True, 5)
    assert repair_pool(filled) == ([], check)


def test_a_good_pool_beside_its_owner(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, HYBRID, capacity=CAPACITY) as pool:
        fill(pool)
        for tokens in range(100, 3000, 300):
            park(pool, "busy", ids_of((7, tokens)))
            assert check_pool(pool_dir).findings == ()
        with pytest.raises(mmkv.PoolLocked, match=f"process {os.getpid()} owns the pool"):
            repair_pool(pool_dir)


def test_a_good_pool_of_two_tiers(ram_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with mmkv.Pool.open(path, HYBRID, capacity=CAPACITY, hot=ram_path / "hot", hot_capacity=CAPACITY) as pool:
        fill(pool)
        assert serious(check_pool(path)) == set()
    assert serious(check_pool(path)) == set()


_CHAT = "(SELECT version FROM conversations WHERE name = 'chat')"
_THIRD = "(SELECT version FROM conversations WHERE name = 'third')"
_OTHER = "(SELECT version FROM conversations WHERE name = 'other')"
_FORMER = (
    "INSERT INTO versions SELECT 500, conversation, tokens, created, boot, 0, hashes, NULL FROM versions "
    f"WHERE id = {_CHAT}"
)
_OTHERS = (
    f"INSERT INTO extents SELECT {_THIRD}, 0, 0, first, (SELECT tokens FROM versions WHERE id = {_THIRD}) / 512 + 1 "
    f"FROM extents WHERE version = {_CHAT} AND ordinal = 0"
)

# What is done, what is found of it, and who is gone after the repair.
ROWS: dict[str, tuple[list[str], set[str], set[str]]] = {
    "an orphaned version": (
        ["INSERT INTO versions SELECT 500, 400, tokens, created, boot, 1, hashes, NULL FROM versions LIMIT 1"],
        {"version-without-conversation"},
        set(),
    ),
    "a former version": (
        [_FORMER],
        {"version-superseded"},
        set(),
    ),
    "rows of no version": (
        ["INSERT INTO extents VALUES (999, 0, 0, 1, 1)", "INSERT INTO checkpoints VALUES (999, 1, 0, 1, 0, NULL)"],
        {"extent-without-version", "checkpoint-without-version"},
        set(),
    ),
    "rows of another tier": (
        [f"INSERT INTO extents VALUES ({_CHAT}, 1, 0, 1, 1)"], {"extent-without-version"}, set()
    ),
    "no newest version": ([f"DELETE FROM versions WHERE id = {_THIRD}"], {"conversation-without-version"}, {"third"}),
    "blocks far away": (
        [f"UPDATE extents SET first = 1 << 50 WHERE version = {_THIRD}"], {"extent-outside"}, {"third"}
    ),
    "blocks before the start": (
        [f"UPDATE extents SET first = -5 WHERE version = {_THIRD}"], {"row-invalid"}, {"third"}
    ),
    "too few blocks": (
        [f"UPDATE extents SET count = count - 1 WHERE version = {_OTHER} AND ordinal = 0"], {"blocks-count"}, {"other"}
    ),
    "too few hashes": ([f"UPDATE versions SET hashes = x'' WHERE id = {_THIRD}"], {"hashes-count"}, {"third"}),
    "other hashes": (
        [f"UPDATE versions SET hashes = zeroblob(length(hashes)) WHERE id = {_THIRD}"], {"hash-mismatch"}, {"third"}
    ),
    "others' blocks": (
        [f"DELETE FROM extents WHERE version = {_THIRD}",
         _OTHERS],
        {"hash-mismatch", "blocks-count"},
        {"third"},
    ),
    "a name that is no text": (
        ["UPDATE conversations SET name = x'00ff' WHERE name = 'third'"],
        {"row-invalid", "version-without-conversation"},
        {"third"},
    ),
    "a name that is no Unicode": (
        ["UPDATE conversations SET name = CAST(x'ff1b' AS TEXT) WHERE name = 'third'"],
        {"row-invalid", "version-without-conversation"},
        {"third"},
    ),
    "a counter at its end": (["UPDATE conversations SET used = 1 << 60 WHERE name = 'chat'"], {"counter-high"}, set()),
    "a resident of nothing": (["INSERT INTO residents VALUES ('blocks', 1 << 40, 1, 0)"], {"hot-missing"}, set()),
    "a segment of no kind": (["INSERT INTO segments VALUES (0, 'x', 1)"], {"row-invalid"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("damage", ROWS)
def test_rows_that_do_not_fit(filled: Path, damage: str) -> None:
    statements, expected, gone = ROWS[damage]
    everyone = conversations(filled)
    run_sql(filled, *statements)
    check = check_pool(filled)
    assert serious(check) & expected, check.findings
    assert not check.is_fine
    assert all(finding.text and finding.advice for finding in check.findings)
    before = (filled / "catalog.sqlite3").read_bytes()
    assert check_pool(filled).actions
    assert (filled / "catalog.sqlite3").read_bytes() == before
    done, left = repair_pool(filled)
    assert done
    assert serious(left) == set(), left.findings
    assert conversations(filled) == everyone - gone
    with mmkv.Pool.open(filled) as pool:
        assert_parked(pool, "chat", CHAT)


def test_a_fallback_is_gone_back_to(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", CHAT[:1000], durable=True)
        park(pool, "chat", CHAT)
        if pool._ledger.conversations["chat"].fallback is None:
            pytest.skip("the temporary directory is in RAM, where nothing waits to be synced")
        shutil.copytree(path, tmp_path / "copy")
    run_sql(tmp_path / "copy", f"UPDATE versions SET hashes = zeroblob(length(hashes)) WHERE id = {_CHAT}")
    done, left = repair_pool(tmp_path / "copy")
    assert any("go back to version" in action.text for action in done)
    assert serious(left) == set()
    with mmkv.Pool.open(tmp_path / "copy") as pool:
        assert_parked(pool, "chat", CHAT[:1000])


def test_a_block_of_two(filled: Path) -> None:
    """The one whose ids are in the block keeps it; where no ids tell, nobody does."""
    run_sql(
        filled,
        f"UPDATE extents SET first = (SELECT first FROM extents WHERE version = {_CHAT} AND ordinal = 0) "
        f"WHERE version = {_THIRD} AND ordinal = (SELECT max(ordinal) FROM extents WHERE version = {_THIRD})",
    )
    check = check_pool(filled)
    assert codes(check) & {"block-twice", "hash-mismatch", "extents-overlap"}
    repair_pool(filled)
    assert check_pool(filled).is_fine
    assert conversations(filled) >= {"chat", "fork", "shares"}


def test_a_tail_of_two(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        for name, seed in (("one", 1), ("two", 2)):
            park(pool, name, ids_of((seed, 100)))
        park(pool, "chat", CHAT)
    run_sql(pool_dir, "UPDATE extents SET first = (SELECT min(first) FROM extents e WHERE e.version IN (1, 2)) "
                      "WHERE version IN (1, 2)")  # fmt: skip
    check = check_pool(pool_dir)
    # Which of the two it is, nothing tells but ids that no hash covers.
    assert codes(check) <= {"block-twice"}
    if check.findings:
        assert "drop 'one'" in [action.text for action in check.actions]


def test_a_record_of_two(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, HYBRID, capacity=CAPACITY) as pool:
        park(pool, "one", ids_of((1, 100)))
        park(pool, "two", ids_of((2, 200)))
        park(pool, "chat", CHAT)
    run_sql(pool_dir, "UPDATE checkpoints SET record = 0 WHERE version IN (1, 2)")
    check = check_pool(pool_dir)
    assert "record-twice" in codes(check)
    repair_pool(pool_dir)
    assert check_pool(pool_dir).is_fine
    assert conversations(pool_dir) == {"chat"}


# Files


def _one(path: Path) -> Path:
    return sorted(path.glob("layers/*.kv"))[0]


FILES: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "missing": (lambda path: _one(path).unlink(), "file-missing", False),
    "a link": (
        lambda path: (_one(path).rename(path.parent / "x"), _one_link(path)), "file-not-plain", False
    ),
    "a pipe": (lambda path: (_one(path).unlink(), os.mkfifo(path / "layers/0000.kv")), "file-not-plain", False),
    "long": (lambda path: os.truncate(_one(path), 1 << 30), "file-long", True),
    "short": (lambda path: os.truncate(_one(path), 4096), "file-short", True),
    "ids cut": (lambda path: os.truncate(path / "tokens.kv", 100), "file-short", True),
    "foreign": (lambda path: (path / "layers/9999.kv").touch(), "file-foreign", False),
    "readable by all": (lambda path: _one(path).chmod(0o644), "file-mode", False),
    "catalog scribbled": (lambda path: (path / "catalog.sqlite3").write_bytes(b"x" * 9000), "pool-unreadable", False),
    "catalog gone": (lambda path: (path / "catalog.sqlite3").unlink(), "pool-unreadable", False),
    "description gone": (lambda path: (path / "pool.json").unlink(), "pool-unreadable", False),
}  # fmt: skip


def _one_link(path: Path) -> None:
    (path / "layers/0000.kv").symlink_to(path.parent / "x")


@pytest.mark.parametrize("damage", FILES)
def test_files_that_do_not_fit(filled: Path, damage: str) -> None:
    change, code, repairable = FILES[damage]
    if damage in ("missing", "a link", "a pipe") and _one(filled).name != "0000.kv":
        pytest.skip("the first layer has no planes")
    change(filled)
    assert code in codes(check_pool(filled))
    if repairable:
        repair_pool(filled)
        assert check_pool(filled).is_fine
        assert conversations(filled) <= {"chat", "fork", "shares", "other", "third"}


def test_every_byte_of_a_catalog_may_be_wrong(filled: Path) -> None:
    """Whatever SQLite makes of it, the check says so, in words."""
    file = filled / "catalog.sqlite3"
    whole = file.read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:at] + bytes(b ^ 0x55 for b in whole[at : at + 40]) + whole[at + 40 :])
        check_pool(filled)
        for left in filled.glob("catalog.sqlite3-*"):
            left.unlink()
    file.write_bytes(whole)
    assert check_pool(filled).is_fine


# Two tiers


@pytest.fixture
def warm(ram_path: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A pool with a hot tier, copied while its owner runs, so that the path lacks some of it; and the hot directory."""
    path, hot = tmp_path / "pool", ram_path / "hot"
    with mmkv.Pool.open(path, UNIFORM, capacity=CAPACITY, hot=hot, hot_capacity=CAPACITY) as pool:
        fill(pool)
    return path, hot


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("UPDATE residents SET dirty = 1", "synced-dirty"),
        ("UPDATE residents SET hot = 1 << 39", "resident-outside"),
        ("UPDATE residents SET hot = 0 WHERE kind = 'blocks'", "hot-twice"),
        ("UPDATE residents SET hot = -1", "row-invalid"),
        ("UPDATE properties SET value = '[7777]' WHERE key = 'hot_generations'", "hot-stale"),
        ("UPDATE properties SET value = '5' WHERE key = 'hot_generations'", "property-invalid"),
    ],
)
def test_residents_that_do_not_fit(warm: tuple[Path, Path], statement: str, code: str) -> None:
    path, _ = warm
    run_sql(path, statement)
    check = check_pool(path)
    assert code in codes(check), check.findings
    _, left = repair_pool(path)
    if code in ("synced-dirty", "resident-outside", "hot-twice", "row-invalid"):
        assert serious(left) == set()
        with mmkv.Pool.open(path) as pool:
            assert_parked(pool, "chat", CHAT)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (shutil.rmtree, "hot-missing"),
        (lambda hot: (hot / "hot.json").write_text("{"), "hot-missing"),
        (lambda hot: (hot / "layers/0000.kv").unlink(), "file-missing"),
        (lambda hot: os.truncate(hot / "layers/0000.kv", 10), "file-short"),
        (lambda hot: (hot / "letter.txt").touch(), "file-foreign"),
    ],
)
def test_a_hot_tier_that_does_not_fit(warm: tuple[Path, Path], damage: Callable[[Path], Any], code: str) -> None:
    path, hot = warm
    damage(hot)
    assert code in codes(check_pool(path))


def test_a_repair_waits_for_nobody(filled: Path) -> None:
    lock = OwnerLock(filled)
    try:
        with pytest.raises(mmkv.PoolLocked, match="end it before a repair"):
            repair_pool(filled)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("UPDATE units_of_blocks SET checksums = x'00'", "checksums-invalid"),
        ("UPDATE units_of_blocks SET tokens = 0", "checksums-invalid"),
        ("UPDATE units_of_blocks SET tokens = 1", "checksums-short"),
        ("INSERT INTO quarantine VALUES ('others', 0, 0, 'k', 0.0)", "row-invalid"),
    ],
)
def test_checksums_that_cannot_be_are_forgotten(filled: Path, change: str, code: str) -> None:
    run_sql(filled, change)
    check = check_pool(filled)
    assert codes(check) == {code}
    done, left = repair_pool(filled)
    assert done
    assert left.is_fine
    with mmkv.Pool.open(filled, verify="always") as pool:
        assert_parked(pool, "chat", CHAT)


def test_what_is_in_quarantine_is_told(filled: Path) -> None:
    with mmkv.Pool.open(filled) as pool:
        number = pool._ledger.conversations["third"].version.extents[0].first
    run_sql(filled, f"INSERT INTO quarantine VALUES ('blocks', {number}, 1, 'k', 0.0)")
    run_sql(filled, "INSERT INTO quarantine VALUES ('blocks', 7777, 1, 'k', 0.0)")
    check = check_pool(filled)
    assert [finding.code for finding in check.findings] == ["in-quarantine"]
    assert not check.is_fine
    assert repair_pool(filled)[0] == []


def test_what_has_no_checksums_is_noted(filled: Path) -> None:
    run_sql(filled, "DELETE FROM units_of_blocks")
    check = check_pool(filled)
    assert codes(check) == {"checksums-missing"}
    assert check.is_fine
