"""A pool over the lives of processes: reopened, killed, forked, read beside its owner, after another boot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from tests.computed import HYBRID, UNIFORM, Ids, assert_parked, computed, ids_of, make_slot, park
from tests.mirror import check_pool

CAPACITY = 4 << 20
ROOT = Path(__file__).parent.parent


def opened(path: Path, layout: mmkv.Layout | None = UNIFORM, **options: object) -> mmkv.Pool:
    capacity = CAPACITY if layout is not None else None
    return mmkv.Pool.open(path, layout, capacity=capacity, **options)  # type: ignore[arg-type]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test started; they end with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def run(code: str, children: list[subprocess.Popen[str]], *arguments: object) -> subprocess.Popen[str]:
    """Run a script that prints a line when it is ready; it finds the tests' modules."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    children.append(process)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


# Reopening


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=lambda layout: layout.model)
def test_what_was_parked_is_there_after_a_close(pool_dir: Path, layout: mmkv.Layout) -> None:
    texts = {f"chat {seed}": ids_of((seed, 300 + 500 * seed)) for seed in range(4)}
    with opened(pool_dir, layout) as pool:
        for name, ids in texts.items():
            park(pool, name, ids, namespace="n")
        pool.pin("chat 1")
        pool.fork("chat 3", "fork")
        order = pool.conversations()
    with opened(pool_dir, None) as pool:
        assert pool.layout == layout
        assert pool.stats().capacity == CAPACITY
        assert pool.conversations() == order
        assert pool.info("chat 1").pinned
        assert pool.info("chat 1").namespace == "n"
        for name, ids in (texts | {"fork": texts["chat 3"]}).items():
            assert_parked(pool, name, ids)
        with pool.match(texts["chat 2"], namespace="n") as match:
            assert (match.conversation, match.tokens) == ("chat 2", 1300)
        check_pool(pool, [])
        assert park(pool, "chat 2", texts["chat 2"], namespace="n").tokens_written == 0


def test_the_order_of_use_is_there_after_a_close(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        for seed, name in enumerate("abc"):
            park(pool, name, ids_of((seed, 100)))
        assert_parked(pool, "a", ids_of((0, 100)))
        park(pool, "b", ids_of((1, 150)))
        assert pool.conversations() == ["c", "a", "b"]
        taken = pool.info("a").taken
    with opened(pool_dir) as pool:
        assert pool.conversations() == ["c", "a", "b"]
        assert pool.info("a").taken == taken


def test_a_capacity_given_at_reopening_counts(pool_dir: Path) -> None:
    opened(pool_dir).close()
    with mmkv.Pool.open(pool_dir, capacity="2MiB") as pool:
        assert pool.stats().capacity == 2 << 20
    with mmkv.Pool.open(pool_dir) as pool:
        assert pool.stats().capacity == 2 << 20


def test_creating_touches_none_of_the_capacity(pool_dir: Path) -> None:
    started = time.monotonic()
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="384GiB") as pool:
        assert time.monotonic() - started < 2
        assert pool.stats().allocated == 0
    assert sum(file.stat().st_blocks * 512 for file in pool_dir.rglob("*.kv")) == 0


def test_files_are_their_users_alone(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        park(pool, "chat", ids_of((1, 100)))
        modes = {path.name: path.stat().st_mode & 0o777 for path in [pool_dir, *pool_dir.rglob("*")]}
    assert {modes.pop(pool_dir.name), modes.pop("layers")} == {0o700}
    assert set(modes.values()) == {0o600}


def test_names_never_become_paths(pool_dir: Path) -> None:
    names = ["../../etc/passwd", "/", ".", "a\0b", "\x1b[2J", "ü" * 512, "'; DROP TABLE versions; --"]
    with opened(pool_dir) as pool:
        before = {path.relative_to(pool_dir) for path in pool_dir.rglob("*")}
        for seed, name in enumerate(names):
            park(pool, name, ids_of((seed, 100)))
        assert {path.relative_to(pool_dir) for path in pool_dir.rglob("*")} == before
    with opened(pool_dir) as pool:
        assert pool.conversations() == names
        for seed, name in enumerate(names):
            assert_parked(pool, name, ids_of((seed, 100)))


# Killed and forked

OWNER = """
    import sys, time
    from tests.test_lifetime import *
    pool = opened(Path(sys.argv[1]), deadline=None)
    park(pool, "chat", ids_of((1, 1000)))
    print("ready", flush=True)
"""


def test_what_was_parked_is_there_after_a_kill(pool_dir: Path, children: list[subprocess.Popen[str]]) -> None:
    owner = run(OWNER + "    time.sleep(60)", children, pool_dir)
    assert line_of(owner) == "ready"
    with pytest.raises(mmkv.PoolLocked, match=f"owned by process {owner.pid}") as caught:
        opened(pool_dir)
    assert caught.value.pid == owner.pid
    owner.kill()
    owner.wait()
    with opened(pool_dir) as pool:
        assert_parked(pool, "chat", ids_of((1, 1000)))
        check_pool(pool, [])


FORKING = (
    OWNER
    + """
    import os, warnings
    warnings.simplefilter("ignore")
    match = pool.match(ids_of((1, 1000)))
    transfer = pool.park("other", computed(UNIFORM, ids_of((2, 3000))), ids_of((2, 3000)))
    child = os.fork()
    if child == 0:
        seen = []
        for call in (
            lambda: pool.take("chat", make_slot(UNIFORM, 1000)), lambda: pool.match([1]), lambda: pool.stats(),
            lambda: transfer.result(), lambda: len(pool), lambda: pool.drop("chat"),
        ):
            try:
                call()
            except mmkv.PoolClosed as error:
                seen.append(str(error))
        match.close()
        pool.close()
        print(len(seen), all("forked child" in text for text in seen), repr(pool), flush=True)
        if sys.argv[2] == "leave":
            sys.exit()
        time.sleep(60)
    transfer.result(10)
    if sys.argv[2] == "leave":
        os.waitpid(child, 0)
        park(pool, "chat", ids_of((1, 1500)))
        assert_parked(pool, "chat", ids_of((1, 1500)))
        assert_parked(pool, "other", ids_of((2, 3000)))
        match.close()
        pool.close()
        print("fine", flush=True)
    time.sleep(60)
"""
)


def test_a_forked_child_has_no_pool_and_its_end_does_no_harm(
    pool_dir: Path, children: list[subprocess.Popen[str]]
) -> None:
    process = run(FORKING, children, pool_dir, "leave")
    assert line_of(process) == "ready"
    assert line_of(process).startswith("6 True Pool(")
    assert line_of(process) == "fine"
    with opened(pool_dir) as pool:
        assert_parked(pool, "chat", ids_of((1, 1500)))
        check_pool(pool, [])


def test_a_forked_child_does_not_keep_the_lock(pool_dir: Path, children: list[subprocess.Popen[str]]) -> None:
    process = run(FORKING, children, pool_dir, "stay")
    assert line_of(process) == "ready"
    assert line_of(process).startswith("6 True")
    process.kill()
    process.wait()
    with opened(pool_dir) as pool:
        assert_parked(pool, "chat", ids_of((1, 1000)))


@pytest.mark.parametrize("ended", ["close", "kill"])
def test_the_lock_goes_to_the_next_owner(pool_dir: Path, children: list[subprocess.Popen[str]], ended: str) -> None:
    owner = run(
        OWNER + "    input()\n    pool.close()\n    print('closed', flush=True)\n    time.sleep(60)", children, pool_dir
    )
    assert line_of(owner) == "ready"
    if ended == "kill":
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    else:
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert line_of(owner) == "closed"
    with opened(pool_dir) as pool:
        assert len(pool) == 1


# Beside the owner


def test_a_reader_sees_what_its_owner_does(pool_dir: Path) -> None:
    ids = ids_of((1, 1000))
    with opened(pool_dir) as owner:
        park(owner, "a", ids[:600])
        with opened(pool_dir, None, readonly=True) as reader:
            assert reader.conversations() == ["a"]
            with reader.match(ids) as match:
                assert match.tokens == 600
                park(owner, "a", ids)
                park(owner, "b", ids_of((2, 3000)))
                assert sorted(reader.conversations()) == ["a", "b"]
                assert reader.stats().leases == 0
            with reader.match(ids) as match:
                assert match.tokens == 1000
            assert reader.info("b").tokens == 3000
            owner.resize("2MiB")
            assert reader.stats().capacity == 2 << 20
            owner.drop("a")
            assert "a" not in reader
            assert len(reader) == 1


def test_a_reader_cannot_change_anything(pool_dir: Path) -> None:
    with opened(pool_dir) as owner:
        park(owner, "a", ids_of((1, 100)))
    with opened(pool_dir, None, readonly=True) as reader:
        slot = make_slot(UNIFORM, 100)
        for call in (
            lambda: reader.park("b", slot, [1]),
            lambda: reader.take("a", slot),
            lambda: reader.drop("a"),
            lambda: reader.pin("a"),
            lambda: reader.fork("a", "b"),
            lambda: reader.resize("8MiB"),
            reader.flush,
            lambda: reader.swap(slot, leaving="b", leaving_ids=[1], arriving="a"),
        ):
            with pytest.raises(mmkv.MmkvError, match="opened with readonly=True"):
                call()
        with opened(pool_dir) as owner:
            assert_parked(owner, "a", ids_of((1, 100)))


def test_a_request_in_the_catalog_is_carried_out_within_a_second(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        for seed, name in enumerate("abc"):
            park(pool, name, ids_of((seed, 100)))
        other = Catalog(pool_dir / "catalog.sqlite3")
        other.add_request("drop", "b")
        other.add_request("drop", "nobody")
        other.add_request("sing", "a song")
        eventually(lambda: pool.conversations() == ["a", "c"], 1)
        eventually(lambda: other.requests() == [], 1)
        other.close()


def test_a_request_that_no_owner_saw_is_carried_out_by_the_next(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        park(pool, "a", ids_of((1, 100)))
    other = Catalog(pool_dir / "catalog.sqlite3")
    other.add_request("drop", "a")
    other.close()
    with opened(pool_dir) as pool:
        eventually(lambda: len(pool) == 0, 1)


# Synced or not


def another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mmkv.opening", "mmkv.pool"):
        monkeypatch.setattr(f"{module}.boot_id", lambda: "another boot")


def killed(path: Path, code: str, children: list[subprocess.Popen[str]]) -> None:
    """Let a process do things to the pool, and kill it."""
    process = run(
        OWNER + textwrap.indent(textwrap.dedent(code), "    ") + "\n    print('done', flush=True)\n    time.sleep(60)",
        children,
        path,
    )
    assert line_of(process) == "ready"
    assert line_of(process) == "done"
    process.kill()
    process.wait()


def state_of(path: Path) -> dict[str, tuple[int, bool]]:
    with opened(path) as pool:
        found = {name: (pool.info(name).tokens, pool.info(name).synced) for name in pool.conversations()}
        for name, (tokens, _) in found.items():
            assert_parked(pool, name, ids_of((1, 5000))[:tokens])
        check_pool(pool, [])
    return found


def test_what_was_not_synced_is_gone_after_another_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[str]]
) -> None:
    killed(tmp_path / "pool", "park(pool, 'durable', ids_of((1, 5000))[:700], durable=True)", children)
    another_boot(monkeypatch)
    assert state_of(tmp_path / "pool") == {"durable": (700, True)}


def test_in_the_same_boot_what_was_not_synced_is_there(tmp_path: Path, children: list[subprocess.Popen[str]]) -> None:
    killed(tmp_path / "pool", "park(pool, 'durable', ids_of((1, 5000))[:700], durable=True)", children)
    with opened(tmp_path / "pool") as pool:
        assert not pool.info("chat").synced
        assert_parked(pool, "chat", ids_of((1, 1000)))


@pytest.mark.parametrize(
    "sync", ["park(pool, 'chat', ids_of((1, 5000))[:1000], durable=True)", "pool.flush()", "pool.flush('chat')"]
)
def test_the_last_synced_version_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[str]], sync: str
) -> None:
    code = f"""
        ids = ids_of((1, 5000))
        park(pool, 'chat', ids[:1000])
        {sync}
        for tokens in (1200, 1700, 800, 2500):
            park(pool, 'chat', ids[:tokens])
    """
    killed(tmp_path / "pool", code, children)
    another_boot(monkeypatch)
    assert state_of(tmp_path / "pool") == {"chat": (1000, True)}
    assert state_of(tmp_path / "pool") == {"chat": (1000, True)}


def test_a_fork_of_what_was_not_synced_is_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[str]]
) -> None:
    code = """
        ids = ids_of((1, 5000))
        park(pool, 'kept', ids[:1300], durable=True)
        pool.fork('kept', 'fork')
        park(pool, 'shares', ids[:2000])
    """
    killed(tmp_path / "pool", code, children)
    another_boot(monkeypatch)
    assert state_of(tmp_path / "pool") == {"kept": (1300, True)}


def test_a_closed_pool_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "pool") as pool:
        park(pool, "chat", ids_of((1, 5000))[:1000])
        assert not pool.info("chat").synced
    another_boot(monkeypatch)
    assert state_of(tmp_path / "pool") == {"chat": (1000, True)}


def test_durable_parks_sync_before_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "pool") as pool:
        events: list[str] = []
        real_sync, real_put = pool._space.sync, pool._catalog.put_version
        monkeypatch.setattr(pool._space, "sync", lambda: (events.append("data"), real_sync()))

        def put(*arguments: object, **options: object) -> object:
            events.append("synced" if options["synced"] else "not synced")
            return real_put(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(pool._catalog, "put_version", put)
        park(pool, "durable", ids_of((1, 100)), durable=True)
        assert events == ["data", "synced"]
        assert pool.info("durable").synced
        events.clear()
        park(pool, "other", ids_of((2, 100)))
        assert events == ["not synced"]


def test_on_a_disk_freed_blocks_wait_for_the_transaction_that_freed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.resize(8 * pool._space.geometry.segment_bytes)
        synced: list[int] = []
        real = pool._catalog.sync
        monkeypatch.setattr(pool._catalog, "sync", lambda: (synced.append(pool._space.blocks.unsettled), real()))
        park(pool, "a", ids_of((1, 4096)))
        park(pool, "b", ids_of((2, 4096)))
        pool.drop("a")
        assert pool._space.blocks.unsettled == 8
        park(pool, "c", ids_of((3, 4096)))
        assert synced
        assert synced[0] == 8
        assert_parked(pool, "b", ids_of((2, 4096)))


def test_on_a_disk_what_was_freed_in_an_earlier_life_is_synced_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[str]]
) -> None:
    killed(tmp_path / "pool", "pool.flush()\npool.drop('chat')", children)
    synced: list[bool] = []
    real = Catalog.sync
    monkeypatch.setattr(Catalog, "sync", lambda catalog: (synced.append(True), real(catalog)))
    with opened(tmp_path / "pool") as pool:
        assert pool._space.blocks.free > 0
        assert synced, "a loss of power could bring back the conversation, whose blocks others have then"


def test_on_a_disk_no_page_of_a_former_version_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of((1, 1600))
    with opened(tmp_path / "pool") as pool:
        park(pool, "chat", ids[:700], durable=True)
        held = {
            n
            for first, count in pool._ledger.conversations["chat"].version.extents
            for n in range(first, first + count)
        }
        park(pool, "chat", ids)
        park(pool, "chat", ids[:800])
        version = pool._ledger.conversations["chat"].version
        kept = version.extents[0]
        assert kept.first in held
        assert set(_numbers(version.extents)) & held == {kept.first}


def _numbers(extents: object) -> list[int]:
    return [n for first, count in extents for n in range(first, first + count)]  # type: ignore[attr-defined]


# Interrupted creation and growth


def test_a_creation_that_was_interrupted_is_finished(pool_dir: Path) -> None:
    opened(pool_dir).close()
    for left in ("layers/0001.kv", "tokens.kv", "catalog.sqlite3"):
        (pool_dir / left).unlink()
        with opened(pool_dir) as pool:
            park(pool, "chat", ids_of((1, 100)))
            assert_parked(pool, "chat", ids_of((1, 100)))
            pool.drop("chat")
            for segment in list(pool._space.blocks.segments):
                pool._room._settle()
                pool._space.give_back("blocks", segment)
            pool._space.trim()
    (pool_dir / "catalog.sqlite3").unlink()
    (pool_dir / "catalog.sqlite3").touch()
    with opened(pool_dir) as pool:
        assert len(pool) == 0
    (pool_dir / "catalog.sqlite3").unlink()
    with pytest.raises(mmkv.PoolCorrupt, match="was interrupted: give a capacity"):
        mmkv.Pool.open(pool_dir)


def test_growth_that_was_interrupted_leaks_no_space(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        park(pool, "chat", ids_of((1, 1000)))
        end = max(pool._space.blocks.segments) + 1
        for file in pool._space.files("blocks")[:2]:
            file.allocate(end + 2)
    with opened(pool_dir) as pool:
        check_pool(pool, [])
        assert_parked(pool, "chat", ids_of((1, 1000)))


def test_the_owner_is_told_in_the_catalog(pool_dir: Path) -> None:
    with opened(pool_dir) as pool:
        catalog = Catalog(pool_dir / "catalog.sqlite3", readonly=True)
        assert catalog.get_property("owner")["pid"] == os.getpid()
        park(pool, "chat", ids_of((1, 100)))
        eventually(lambda: (catalog.get_property("stats") or {}).get("parks") == 1)
        assert json.dumps(catalog.get_property("stats"))
        catalog.close()


def test_slots_of_one_process_may_be_parked_in_several_pools(pool_dir: Path, tmp_path: Path) -> None:
    ids: Ids = ids_of((1, 1000))
    slot = computed(UNIFORM, ids)
    with opened(pool_dir) as one, opened(tmp_path / "second") as other:
        for transfer in [pool.park("chat", slot, ids) for pool in (one, other)]:
            transfer.result(30)
        assert_parked(one, "chat", ids)
        other.drop("chat")
        assert_parked(one, "chat", np.array(ids))
