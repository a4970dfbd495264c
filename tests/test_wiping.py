"""What was dropped is overwritten, in every file of both tiers, and nothing else is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv.space import KINDS
from mmkv.store.files import PoolFile
from tests.computed import HYBRID, UNIFORM, assert_parked, computed, ids_of, park
from tests.crashed import crash
from tests.mirror import check_pool

LAYOUTS = pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
IDS, OTHERS = ids_of((1, 1500)), ids_of((2, 700))


@pytest.fixture(params=["ram", "disk", "two tiers"])
def places(request: pytest.FixtureRequest, tmp_path: Path, ram_path: Path) -> dict[str, Any]:
    if request.param == "two tiers":
        return {"path": tmp_path / "pool", "hot": ram_path / "hot", "hot_capacity": "2MiB"}
    return {"path": (ram_path if request.param == "ram" else tmp_path) / "pool"}


def opened(places: dict[str, Any], layout: mmkv.Layout, **options: Any) -> mmkv.Pool:
    defaults = {"capacity": "4MiB", "wipe_on_drop": True}
    return mmkv.Pool.open(layout=layout, min_free_ram=0, **{**defaults, **places, **options})


def without_chores(pool: mmkv.Pool) -> mmkv.Pool:
    """A pool whose background does nothing."""
    assert pool._housekeeping is not None
    pool._housekeeping._chores = ()
    return pool


def found(places: dict[str, Any], layout: mmkv.Layout, ids: Any) -> bool:
    """Whether some rows of a conversation, its states or its ids are anywhere in the files."""
    slot = computed(layout, ids)
    wanted = [array[700:704].tobytes() for layer in slot.arrays for array in layer.values() if array[700:704].any()]
    wanted += [
        array.reshape(-1)[:16].tobytes() for layer in slot.state for array in layer.values() if array.nbytes > 64
    ]
    wanted.append(ids[600:604].tobytes())
    files = [
        file for name in ("path", "hot") if name in places for file in places[name].rglob("*.[ks]*") if file.is_file()
    ]
    files = [file for file in files if file.suffix in (".kv", ".state")]
    held = [file.read_bytes() for file in files]
    return any(piece in text for piece in wanted for text in held)


@LAYOUTS
def test_what_is_dropped_is_nowhere(places: dict[str, Any], layout: mmkv.Layout) -> None:
    with opened(places, layout) as pool:
        park(pool, "kept", OTHERS)
        park(pool, "dropped", IDS)
        pool.flush()
        assert found(places, layout, IDS)
        pool.drop("dropped")
        deadline = time.monotonic() + 10
        while found(places, layout, IDS):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert_parked(pool, "kept", OTHERS)
        check_pool(pool, [])
    with opened(places, layout) as pool:
        assert_parked(pool, "kept", OTHERS)


@LAYOUTS
def test_closing_wipes_what_is_left(places: dict[str, Any], layout: mmkv.Layout) -> None:
    pool = without_chores(opened(places, layout))
    park(pool, "dropped", IDS)
    park(pool, "kept", OTHERS)
    pool.drop("dropped")
    pool.close()
    assert not found(places, layout, IDS)
    with opened(places, layout) as pool:
        assert_parked(pool, "kept", OTHERS)


@LAYOUTS
def test_after_a_crash_opening_wipes(places: dict[str, Any], layout: mmkv.Layout) -> None:
    pool = without_chores(opened(places, layout))
    park(pool, "kept", OTHERS)
    park(pool, "dropped", IDS)
    pool.flush()
    pool.drop("dropped")
    crash(pool)
    with opened(places, layout) as pool:
        assert not found(places, layout, IDS)
        assert_parked(pool, "kept", OTHERS)


def test_what_was_dropped_without_is_wiped_when_it_is_asked_for(places: dict[str, Any]) -> None:
    with opened(places, UNIFORM, wipe_on_drop=False) as pool:
        park(pool, "dropped", IDS)
        pool.flush()
        pool.drop("dropped")
        park(pool, "kept", OTHERS[:50])
    assert found(places, UNIFORM, IDS)
    with opened(places, UNIFORM) as pool:
        assert not found(places, UNIFORM, IDS)
        assert_parked(pool, "kept", OTHERS[:50])


def test_blocks_are_used_again_and_evicted_ones_wiped(places: dict[str, Any]) -> None:
    with opened(places, UNIFORM) as pool:
        for seed in range(40):
            park(pool, f"chat {seed}", ids_of((seed, 3000)))
            assert_parked(pool, f"chat {seed}", ids_of((seed, 3000)))
        assert pool.stats().evictions > 2
        check_pool(pool, [])
    assert not found(places, UNIFORM, ids_of((0, 3000)))


def test_a_medium_that_refuses_keeps_the_blocks(places: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(places, UNIFORM) as pool:
        without_chores(pool)
        park(pool, "dropped", IDS)
        # So that no write of it is under way, which holds the blocks.
        pool.flush()
        pool.drop("dropped")
        with monkeypatch.context() as patched:

            def refused(self: PoolFile, view: memoryview, offset: int) -> bool:
                raise mmkv.MmkvError("no")

            patched.setattr(PoolFile, "write", refused)
            with pytest.raises(mmkv.MmkvError, match="no"):
                pool._wipe_freed()
        assert pool._space.unsettled
        pool._wipe_freed()
        assert not pool._space.unsettled
        park(pool, "new", OTHERS)
        assert_parked(pool, "new", OTHERS)


def segments_agree(pool: mmkv.Pool) -> None:
    for tier in pool._tier_spaces():
        for kind in KINDS:
            assert set(pool._catalog.segments(kind, tier.tier)) == tier.allocator(kind).segments


def test_ram_that_is_short_for_a_while_costs_no_conversation(tmp_path: Path, ram_path: Path) -> None:
    places = {"path": tmp_path / "pool", "hot": ram_path / "hot", "hot_capacity": "2MiB"}
    parked = {f"chat {seed}": ids_of((seed, 3000)) for seed in range(12)}
    with opened(places, UNIFORM, capacity="16MiB") as pool:
        assert pool._hot is not None
        without_chores(pool)
        for number, (name, ids) in enumerate(parked.items()):
            park(pool, name, ids)
            if number == 6:
                pool.flush()
                pool.drop("chat 0")
                pool._hot.space.min_free_ram = 1 << 50
                for _ in range(6):
                    pool._relieve_ram()
                    segments_agree(pool)
                pool._hot.space.min_free_ram = 0
        segments_agree(pool)
        del parked["chat 0"]
    with opened(places, UNIFORM) as pool:
        assert set(pool.conversations()) == set(parked)
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        check_pool(pool, [])


def test_a_hot_tier_that_is_made_smaller(tmp_path: Path, ram_path: Path) -> None:
    places = {"path": tmp_path / "pool", "hot": ram_path / "hot", "hot_capacity": "2MiB"}
    parked = {f"chat {seed}": ids_of((seed, 3000)) for seed in range(8)}
    with opened(places, UNIFORM, capacity="16MiB") as pool:
        for name, ids in parked.items():
            park(pool, name, ids)
    places["hot_capacity"] = "200KiB"
    with opened(places, UNIFORM) as pool:
        segments_agree(pool)
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        assert pool._hot is not None
        assert pool._hot.space.allocated_bytes <= 200 << 10


def test_a_segment_in_use_is_not_given_back(places: dict[str, Any]) -> None:
    with opened(places, UNIFORM) as pool:
        park(pool, "kept", OTHERS)
        segment = pool._ledger.conversations["kept"].version.extents[0].first // pool._space.blocks.segment_length
        with pytest.raises(ValueError, match="in use"):
            pool._space.give_back("blocks", segment)
        segments_agree(pool)
        assert_parked(pool, "kept", OTHERS)


def test_what_is_in_quarantine_at_the_end_is_not_taken_for_wiped(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(places, UNIFORM) as pool:
        without_chores(pool)
        with monkeypatch.context() as patched:
            patched.setattr(type(pool._traffic), "is_quiet", property(lambda _: False))
            pool._wipe_all()
        assert pool._catalog.get_property("wiped") is False
        pool._wipe_all()
        assert pool._catalog.get_property("wiped") is True
