"""Power loss: what was not synced is old bytes, or new ones, page by page, and the catalog is any state since its sync.

What was flushed or parked durable is there byte by byte afterwards, and nothing is served that never was on the medium.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from mmkv.store.files import PoolFile
from tests.computed import HYBRID, UNIFORM, Ids, assert_holds, ids_of, make_slot, park
from tests.crashed import crash, idle_writers
from tests.mirror import check_pool

PAGE = 4096
SEEDS = range(int(os.environ.get("MMKV_POWER_LOSSES", "2")))
CAPACITY = 700_000


class Medium:
    """Knows what is on the medium of a pool's directory, as its syncs tell.

    Of a file that is its bytes at its last sync; what came later is there or not, page by page. Of the catalog it is
    what it was at its last synced transaction, or any state after.
    """

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.synced: dict[Path, bytes] = {}
        self.catalogs: list[dict[str, bytes]] = []
        sync, transaction = PoolFile.sync, Catalog.transaction

        def noted_sync(file: PoolFile) -> None:
            sync(file)
            if file.path.is_relative_to(base):
                self.synced[file.path] = file.path.read_bytes()

        @contextmanager
        def noted_transaction(catalog: Catalog, *, synced: bool = False) -> Iterator[Any]:
            with transaction(catalog, synced=synced) as db:
                yield db
            if not catalog.path.is_relative_to(base):
                return
            if synced:
                self.catalogs.clear()
            self.catalogs.append(self._catalog())

        monkeypatch.setattr(PoolFile, "sync", noted_sync)
        monkeypatch.setattr(Catalog, "transaction", noted_transaction)

    def _catalog(self) -> dict[str, bytes]:
        return {
            file.name: file.read_bytes() for file in self.base.glob("catalog.sqlite3*") if file.suffix != ".sqlite3-shm"
        }

    def lose_power(self, rng: random.Random) -> None:
        """Leave what may be on the medium."""
        for file in [self.base / "tokens.kv", *(self.base / "layers").iterdir()]:
            now = file.read_bytes()
            before = self.synced.get(file, b"").ljust(len(now), b"\0")
            share = rng.choice([0.0, 0.5, 1.0])
            with file.open("r+b") as stream:
                for start in range(0, len(now), PAGE):
                    if now[start : start + PAGE] != before[start : start + PAGE] and rng.random() >= share:
                        stream.seek(start)
                        stream.write(before[start : start + PAGE])
        kept = rng.choice([self.catalogs[0], rng.choice(self.catalogs)])
        for file in self.base.glob("catalog.sqlite3*"):
            file.unlink()
        for name, content in kept.items():
            (self.base / name).write_bytes(content)
            (self.base / name).chmod(0o600)
        self.synced.clear()
        for file in [self.base / "tokens.kv", *(self.base / "layers").iterdir()]:
            self.synced[file] = file.read_bytes()
        self.catalogs = [self._catalog()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
@pytest.mark.parametrize("tiers", [1, 2])
def test_after_a_loss_of_power_what_was_flushed_is_there_and_nothing_else(  # noqa: PLR0915
    request: pytest.FixtureRequest,
    tmp_path: Path,
    ram_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    layout: mmkv.Layout,
    tiers: int,
) -> None:
    rng = random.Random(seed)
    base, hot = tmp_path / "pool", ram_path / "hot"
    options = {"hot": hot, "hot_capacity": 250_000} if tiers == 2 else {}
    medium = Medium(base, monkeypatch)
    # What each conversation ever was, and how much of that must not be fallen back behind.
    history: dict[str, list[Ids]] = {}
    safe: dict[str, int] = {}
    newest: dict[str, Ids] = {}
    made = 0

    def note(pool: mmkv.Pool) -> None:
        for name in list(newest):
            if name not in pool:
                # Evicted, or dropped: the medium may still know it.
                del newest[name]
                safe.pop(name, None)
                continue
            versions = history.setdefault(name, [])
            if not versions or not np.array_equal(versions[-1], newest[name]):
                versions.append(newest[name])
            if pool.info(name).synced:
                safe[name] = len(versions) - 1

    for boot in range(3):
        for module in ("mmkv.opening", "mmkv.pool", *(["mmkv.warming"] if tiers == 2 else [])):
            monkeypatch.setattr(f"{module}.boot_id", lambda boot=boot: f"boot {boot}")
        with idle_writers():
            pool = mmkv.Pool.open(base, layout, capacity=CAPACITY, min_free_ram=0, **options)
        request.addfinalizer(partial(crash, pool))
        assert set(pool.conversations()) >= set(safe), "what was on the medium is gone"
        newest.clear()
        for name in pool.conversations():
            tokens = pool.info(name).tokens
            slot = make_slot(layout, tokens)
            pool.take(name, slot).result(10)
            version = pool._ledger.conversations[name].version
            ids = pool._space.read_ids(version.extents, 0, tokens)
            assert version.row.synced, f"{name!r} is served and was not on the medium"
            known = [index for index, one in enumerate(history[name]) if np.array_equal(one, ids)]
            assert known[-1] >= safe.get(name, 0), f"{name!r} is older than what was on the medium"
            assert_holds(slot, ids)
            newest[name] = ids
        check_pool(pool, [])
        note(pool)
        for _ in range(25):
            what = rng.choices(["new", "grow", "edit", "flush", "flush one", "drop", "take"], [3, 6, 2, 1, 2, 1, 2])[0]
            name = rng.choice(sorted(newest)) if newest else ""
            made += 1
            more = ids_of((1000 * seed + made, rng.randint(100, 1800)))
            durable = rng.random() < 0.2
            try:
                if what == "new" or not newest:
                    name = f"chat {rng.randrange(8)}"
                    park(pool, name, more, durable=durable)
                    newest[name] = more
                elif what in ("grow", "edit"):
                    kept = newest[name] if what == "grow" else newest[name][: rng.randrange(len(newest[name]))]
                    park(pool, name, np.concatenate([kept, more]), durable=durable)
                    newest[name] = np.concatenate([kept, more])
                elif what == "flush":
                    pool.flush()
                elif what == "flush one":
                    pool.flush(name)
                elif what == "drop":
                    pool.drop(name)
                else:
                    pool.take(name, make_slot(layout, len(newest[name]))).result(10)
            except mmkv.PoolFull:
                pass
            note(pool)
        crash(pool)
        medium.lose_power(rng)
        if tiers == 2 and rng.random() < 0.5:
            shutil.rmtree(hot)
