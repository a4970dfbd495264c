"""Whatever stands in a pool's files: opening it ends well or in words, and touches nothing else."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmkv
from mmkv.checking import check_pool, repair_pool
from mmkv.exporting import export_conversation
from tests.computed import HYBRID, ids_of, make_slot, park

CAPACITY = 2 << 20
IDS = ids_of((1, 1500))
_MEMORY = 1 << 30
_numbers = itertools.count()


@pytest.fixture(scope="module")
def little_memory() -> Iterator[None]:
    """Address space for what a pool needs, and a GiB more."""
    # What the first use of anything takes is not the pools'.
    np.zeros(1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Place:
    """A good pool with a hot tier, of which each example makes a copy, and what lies beside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "beside").mkdir()
        (directory / "beside/0000.kv").write_bytes(b"irreplaceable" * 1000)
        self.pool, self.hot = directory / "pool", directory / "hot"
        with mmkv.Pool.open(self.pool, HYBRID, capacity=CAPACITY, hot=self.hot, hot_capacity=CAPACITY) as pool:
            park(pool, "chat", IDS)
            park(pool, "other", ids_of((1, 1100), (2, 300)))
            pool.fork("chat", "fork")
        self.kept = directory / "kept"
        shutil.copytree(self.pool, self.kept / "pool")
        shutil.copytree(self.hot, self.kept / "hot")

    def restore(self) -> None:
        """Make both directories good again, in place: a hot tier knows its pool by the file's identity."""
        for of in ("pool", "hot"):
            target = self.directory / of
            target.mkdir(exist_ok=True)
            for file in [file for file in target.rglob("*") if not file.is_dir()]:
                if not (self.kept / of / file.relative_to(target)).exists():
                    file.unlink()
            for file in (self.kept / of).rglob("*"):
                if file.is_file():
                    restored = target / file.relative_to(self.kept / of)
                    restored.parent.mkdir(exist_ok=True)
                    restored.write_bytes(file.read_bytes())
                    os.utime(restored, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))

    def is_good(self) -> bool:
        """Whether all of it opens."""
        self.restore()
        with mmkv.Pool.open(self.pool) as pool:
            return len(pool.stats().tiers) == 2 and len(pool) == 3

    def run(self, damage: Callable[[Path, Path], None]) -> None:
        """Damage the pool, do with it what users do, and see that nothing else was touched."""
        self.restore()
        damage(self.pool, self.hot)
        # From errors on, the names of files may change; those beside stay.
        calls = (self._check, self._read, self._own, self._export, self._repair, self._own)
        for call in calls:
            error = None
            try:
                call()
            except (mmkv.MmkvError, ValueError, TypeError) as caught:
                error = caught
            assert self._open_files() == [], (call, error)
        assert self._open_files() == []
        assert {entry.name for entry in self.directory.iterdir()} <= {"beside", "pool", "hot", "kept", "file"}
        assert [entry.name for entry in (self.directory / "beside").iterdir()] == ["0000.kv"]
        assert (self.directory / "beside/0000.kv").read_bytes() == b"irreplaceable" * 1000

    def _open_files(self) -> list[str]:
        """What this process has open in the directory: after an error, nothing."""
        names = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                names.append(str(fd.readlink()))
        return [name for name in names if name.startswith(str(self.directory))]

    def _check(self) -> None:
        check_pool(self.pool)

    def _repair(self) -> None:
        repair_pool(self.pool)

    def _export(self) -> None:
        export_conversation(self.pool, "chat", self.directory / "file", replace=True)

    def _read(self) -> None:
        with mmkv.Pool.open(self.pool, readonly=True) as pool:
            self._look(pool)

    def _own(self) -> None:
        with mmkv.Pool.open(self.pool) as pool:
            self._look(pool)
            for name in pool.conversations()[:4]:
                with contextlib.suppress(mmkv.MmkvError, ValueError, TypeError):
                    pool.take(name, make_slot(HYBRID, 2000)).result(20)
            with contextlib.suppress(mmkv.MmkvError, ValueError, TypeError):
                park(pool, f"new {next(_numbers)}", ids_of((1, 600)))
            if "chat" in pool:
                pool.drop("chat")

    def _look(self, pool: mmkv.Pool) -> None:
        pool.stats()
        for name in pool.conversations()[:4]:
            pool.info(name)
        pool.match(IDS).close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, little_memory: None) -> Iterator[Place]:
    """In RAM, where a sync costs nothing."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("there is no tmpfs")
    directory = shm / f"mmkv-fuzz-{tmp_path_factory.mktemp('fuzz').parent.name}"
    directory.mkdir(mode=0o700)
    made = Place(directory)
    assert made.is_good()
    yield made
    assert made.is_good()
    shutil.rmtree(directory)


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )


INTEGERS = st.sampled_from([0, 1, -1, 2, 511, 2**20, 2**31, 2**40, 2**53, 2**60, 2**62, 2**63 - 1, -(2**63)])
ANYTHING = st.one_of(
    INTEGERS,
    st.sampled_from([1.5, -0.0, 1e300, float("inf"), "", "x", "chat", "\0", "9" * 5000, "é" * 3000, b"", b"\xff" * 8]),
    st.none(),
    st.binary(max_size=24),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["int8", "V3", "../..", "/", "/dev/null", "elsewhere", 10**400]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_of(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def change_json(data: st.DataObject, file: Path) -> None:
    value = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        value = replaced(value, data.draw(st.sampled_from(places_of(value))), data.draw(JSON))
    file.write_text(json.dumps(value))


@given(st.data())
@fuzz(50)
def test_descriptions(place: Place, data: st.DataObject) -> None:
    place.run(lambda pool, _: change_json(data, pool / "pool.json"))


@given(st.data())
@fuzz(20)
def test_claims(place: Place, data: st.DataObject) -> None:
    place.run(lambda _, hot: change_json(data, hot / "hot.json"))


@given(st.data())
@fuzz(25)
def test_layouts_that_are_consistent(place: Place, data: st.DataObject) -> None:
    """A description whose fingerprint fits its layout: all else is for the sizes to say."""

    def damage(pool: Path, _: Path) -> None:
        value = json.loads((pool / "pool.json").read_text())
        where = ("layout", *data.draw(st.sampled_from(places_of(value["layout"]))))
        value = replaced(value, where, data.draw(INTEGERS | JSON))
        with contextlib.suppress(ValueError):
            value["fingerprint"] = mmkv.Layout.from_json(value["layout"]).fingerprint
        value["sizes"][data.draw(st.sampled_from(sorted(value["sizes"])))] = data.draw(INTEGERS)
        (pool / "pool.json").write_text(json.dumps(value))

    place.run(damage)


@given(st.data())
@fuzz(90)
def test_rows(place: Place, data: st.DataObject) -> None:
    def damage(pool: Path, _: Path) -> None:
        # Also where an example ends in the midst of it.
        with contextlib.closing(sqlite3.connect(pool / "catalog.sqlite3", isolation_level=None)) as db:
            tables = ["conversations", "versions", "extents", "checkpoints", "segments", "residents", "properties"]
            for _ in range(data.draw(st.integers(1, 3))):
                table = data.draw(st.sampled_from(tables))
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
                column, key = data.draw(st.sampled_from(columns)), columns[0]
                rows = db.execute(f"SELECT {key} FROM {table}").fetchall()
                if not rows:
                    continue
                value = json.dumps(data.draw(JSON)) if table == "properties" else data.draw(ANYTHING)
                # What the tables themselves refuse is not for the reader to.
                with contextlib.suppress(sqlite3.Error):
                    db.execute(
                        f"UPDATE {table} SET {column} = ? WHERE {key} IS ?",
                        (value, data.draw(st.sampled_from(rows))[0]),
                    )

    place.run(damage)


@given(st.data())
@fuzz(45)
def test_bytes_of_a_catalog(place: Place, data: st.DataObject) -> None:
    def damage(pool: Path, _: Path) -> None:
        file = pool / "catalog.sqlite3"
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 12))):
            # Most of a page is empty: the headers are not.
            at = data.draw(st.integers(0, len(raw) // 4096 - 1)) * 4096 + data.draw(
                st.one_of(st.integers(0, 120), st.integers(0, 4095))
            )
            raw[at] = data.draw(st.integers(0, 255))
        file.write_bytes(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw), 4096, 5000]))]))

    place.run(damage)
