"""Reading back all that is parked."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv import audit
from mmkv.audit import audit_pool
from tests.computed import HYBRID, UNIFORM, assert_parked, ids_of, park
from tests.test_checks import flip, flip_at, matched


@pytest.fixture(params=["ram", "disk", "tiers"])
def pool(request: pytest.FixtureRequest, tmp_path: Path, ram_path: Path) -> Iterator[mmkv.Pool]:
    hot: dict[str, Any] = {"hot": ram_path / "hot", "hot_capacity": "4MiB"} if request.param == "tiers" else {}
    where = ram_path if request.param == "ram" else tmp_path
    with mmkv.Pool.open(where / "pool", HYBRID, capacity="8MiB", **hot) as opened:
        park(opened, "chat", ids_of((1, 700)))
        park(opened, "chat", ids_of((1, 700), (2, 900)))
        park(opened, "other", ids_of((1, 600), (3, 100)))
        opened.fork("chat", "fork", 700)
        yield opened


def test_what_is_whole_is_fine_beside_its_owner_and_without(pool: mmkv.Pool) -> None:
    told: list[tuple[int, int]] = []
    for _ in range(2):
        found = audit_pool(pool.path, progress=lambda *so_far: told.append(so_far))
        assert (found.conversations, found.corrupt) == (3, ())
        assert (found.unverified, found.quarantined, found.lost) == (0, 0, 0)
        assert found.bytes > 1600 * HYBRID.token_bytes
        assert told[-1] == (found.bytes, found.bytes)
        some = audit_pool(pool.path, ["other"])
        assert (some.conversations, some.corrupt) == (1, ())
        assert some.bytes < found.bytes
        pool.close()
    with pytest.raises(mmkv.ConversationNotFound, match="no conversation 'nobody'"):
        audit_pool(pool.path, ["nobody"])


def test_a_flipped_bit_is_found(pool: mmkv.Pool) -> None:
    pool.flush()
    flip(pool, "chat", 600, layer=0, plane="v")
    found = audit_pool(pool.path)
    (one,) = found.corrupt
    # The first block is shared by all; the second one of `chat` by its fork alone.
    assert one.conversations == ("chat", "fork")
    assert (one.layer, one.plane, one.tokens, one.tier) == (0, "v", (512, 1024), "path")
    assert audit_pool(pool.path, ["other"]).corrupt == ()
    assert audit_pool(pool.path, ["fork"]).corrupt == (one,)


def test_a_flipped_bit_in_the_hot_tier_is_found(tmp_path: Path, ram_path: Path) -> None:
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity="8MiB", hot=ram_path / "hot", hot_capacity="4MiB") as pool:
        park(pool, "chat", ids_of((1, 700)))
        pool.flush()
        assert pool._hot is not None
        number = pool._ledger.conversations["chat"].version.extents[0].first
        place = pool._hot.residents["blocks"].places(np.array([number]))
        offset, _ = pool._hot.space.geometry.plane_regions[1]["k"]
        assert place[0] == 0
        flip_at(ram_path / "hot" / "layers" / "0001.kv", offset + 5)
        assert [(one.tier, one.layer, one.plane) for one in audit_pool(pool.path).corrupt] == [("hot", 1, "k")]


def test_a_flipped_bit_of_a_state_and_of_an_id(pool: mmkv.Pool) -> None:
    pool.flush()
    points = pool._ledger.conversations["chat"].version.row.checkpoints
    file = pool._space.states[3]
    assert file is not None
    flip_at(file.path, pool._space.geometry.state_offset(3, "window", points[-1].record))
    runs = pool._space.geometry.token_runs(pool._ledger.conversations["other"].version.extents, 650, 651)
    flip_at(pool.path / "tokens.kv", int(pool._space.geometry.id_offsets(runs)[0]))
    found = {(one.conversations, one.layer, one.plane, one.tokens) for one in audit_pool(pool.path).corrupt}
    assert found == {(("other",), -1, "token_ids", (512, 700)), (("chat",), 3, "window", (0, 1600))}


def test_what_differs_is_put_into_quarantine_when_asked(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700), (2, 900))
    pool.flush()
    flip(pool, "chat", 1100, layer=3)
    with pytest.raises(mmkv.PoolLocked, match="end it first"):
        audit_pool(pool.path, quarantine=True)
    pool.close()
    assert len(audit_pool(pool.path, quarantine=True).corrupt) == 1
    assert audit_pool(pool.path).quarantined == 1
    with mmkv.Pool.open(pool.path) as again:
        assert matched(again, ids) == 700
        with pytest.raises(mmkv.ConversationCorrupt):
            again.take("chat", mmkv.Slot.allocate(HYBRID, 1600))
        park(again, "chat", ids)
        assert_parked(again, "chat", ids)
    assert audit_pool(pool.path, quarantine=True).corrupt == ()


def test_what_has_no_checksums_is_counted(ram_path: Path) -> None:
    with mmkv.Pool.open(ram_path / "pool", HYBRID, capacity="8MiB", verify="never") as pool:
        park(pool, "chat", ids_of((1, 1300)))
        found = audit_pool(pool.path)
        assert (found.unverified, found.corrupt, found.bytes) == (3 + 1, (), 0)


def test_a_lost_hot_tier_is_told(tmp_path: Path, ram_path: Path) -> None:
    hot = ram_path / "hot"
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity="8MiB", hot=hot, hot_capacity="4MiB") as pool:
        pool._writer.stop()
        park(pool, "chat", ids_of((1, 700)))
        (hot / "hot.json").rename(hot / "moved")
        assert audit_pool(pool.path).lost == 2
        (hot / "moved").rename(hot / "hot.json")
        assert audit_pool(pool.path).lost == 0


def test_a_file_that_is_cut_is_an_error(ram_path: Path) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids_of((1, 700)))
    os.truncate(pool.path / "layers" / "0001.kv", 100)
    with pytest.raises(mmkv.PoolCorrupt, match="truncated"):
        audit_pool(pool.path)


def test_no_alarm_beside_an_engine_that_parks_and_drops(ram_path: Path) -> None:
    """Blocks change hands while they are read."""
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="2MiB", min_free_ram=0) as pool:
        ended = threading.Event()

        def engine() -> None:
            turn = 0
            while not ended.is_set():
                turn += 1
                park(pool, f"c{turn % 3}", ids_of((turn % 5, 1 + turn * 97 % 1500), (turn, 200)))
                if turn % 7 == 0:
                    pool.drop(pool.conversations()[0])

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            for _ in range(30):
                assert audit_pool(pool.path).corrupt == ()
        finally:
            ended.set()
            thread.join()


def test_what_the_owner_changed_is_looked_at_again(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="2MiB", min_free_ram=0) as pool:
        ids = ids_of((1, 1300))
        park(pool, "chat", ids)
        known = audit.known_of
        looks = 0

        def change(*arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            found = known(*arguments)
            if looks == 1:
                # The blocks of what is about to be read go to somebody else.
                pool.drop("chat")
                park(pool, "next", ids_of((2, 1300)))
            return found

        monkeypatch.setattr(audit, "known_of", change)
        assert audit_pool(pool.path).corrupt == ()
        assert looks > 1
