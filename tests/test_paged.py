"""Paged slots: pages in any order park and take the same bytes as contiguous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.geometry import TokenRuns

PAGE = 16


def layout_of(opaque: int | None = None) -> mmkv.Layout:
    layer = mmkv.Layer({"k": mmkv.Plane("int8", (4, 8)), "v": mmkv.Plane("uint16", (4,))})
    return mmkv.Layout([layer] * 3, "paged", opaque_page_tokens=opaque)


def paged_arrays(layout: mmkv.Layout, pages: int, xp: Any = np) -> list[dict[str, Any]]:
    return [
        {name: xp.zeros((pages, PAGE, *plane.shape), plane.dtype) for name, plane in layer.planes.items()}
        for layer in layout.layers
    ]


def rows_of(array: Any, table: np.ndarray[Any, Any], tokens: int) -> Any:
    return array[table].reshape(-1, *array.shape[2:])[:tokens]


def fill(slot: mmkv.Slot, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer in slot.arrays:
        for array in layer.values():
            array[:] = rng.integers(0, 100, array.shape)


@pytest.fixture
def pool_path(ram_path: Path) -> Path:
    return ram_path / "pool"


@pytest.mark.parametrize("tokens", [1, 15, 16, 700, 1024, 1500])
def test_a_paged_slot_gives_and_takes_the_rows_of_a_plain_one(pool_path: Path, tokens: int, xp: Any) -> None:
    layout, rng = layout_of(), np.random.default_rng(tokens)
    ids = np.arange(tokens)
    plain = mmkv.Slot.allocate(layout, 2048)
    fill(plain, 1)
    table = rng.permutation(200)[:128]
    arrays = paged_arrays(layout, 200, xp)
    paged = mmkv.PagedSlot(layout, arrays, table, PAGE)
    with mmkv.Pool.open(pool_path, layout, capacity="4MiB") as pool:
        pool.park("a", plain, ids).result()
        pool.take("a", paged).result()
        for layer, expected in zip(arrays, plain.arrays, strict=True):
            for name, array in layer.items():
                got = array.get() if xp is not np else array
                np.testing.assert_array_equal(rows_of(got, table, tokens), expected[name][:tokens])
                # Not one byte of another page, nor of a row behind.
                assert not rows_of(got, table, 2048)[tokens:].any()
                assert not np.delete(got, table, axis=0).any()
        pool.park("b", paged, ids + 1).result()
        back = mmkv.Slot.allocate(layout, 2048)
        pool.take("b", back).result()
        for layer, expected in zip(back.arrays, plain.arrays, strict=True):
            for name in layer:
                np.testing.assert_array_equal(layer[name][:tokens], expected[name][:tokens])


def test_only_new_rows_move(pool_path: Path) -> None:
    layout = layout_of()
    arrays = paged_arrays(layout, 100)
    slot = mmkv.PagedSlot(layout, arrays, np.arange(100)[::-1], PAGE)
    with mmkv.Pool.open(pool_path, layout, capacity="4MiB") as pool:
        pool.park("a", slot, np.arange(1000)).result()
        assert pool.park("a", slot, np.arange(1037)).result().tokens_written == 37
        for layer in arrays:
            for array in layer.values():
                array[:] = 7
        assert pool.take("a", slot, have=1000).result().tokens_written == 37
        for layer in arrays:
            for array in layer.values():
                rows = rows_of(array, np.arange(100)[::-1], 1600)
                assert (rows[:1000] == 7).all()
                assert (rows[1000:1037] == 0).all()
                assert (rows[1037:] == 7).all()


def opaque_slot(layout: mmkv.Layout, seed: int) -> tuple[mmkv.PagedSlot, list[dict[str, Any]], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    table = rng.permutation(200)[:128]
    arrays: list[dict[str, Any]] = [
        {name: rng.integers(0, 255, (200, PAGE * plane.token_bytes), dtype=np.uint8) for name, plane in planes.items()}
        for planes in (layer.planes for layer in layout.layers)
    ]
    for layer in arrays:
        layer["v"] = layer["v"].view(np.uint16)
        layer["k"] = layer["k"].view(np.int8)
    return mmkv.PagedSlot(layout, arrays, table, PAGE, opaque=True), arrays, table


@pytest.mark.parametrize(("first", "second"), [(1000, 1100), (1008, 1100), (1000, 1001), (500, 2000)])
def test_opaque_pages_move_whole(pool_path: Path, first: int, second: int) -> None:
    layout = layout_of(PAGE)
    slot, arrays, table = opaque_slot(layout, 1)
    with mmkv.Pool.open(pool_path, layout, capacity="4MiB") as pool:
        pool.park("a", slot, np.arange(first)).result()
        # The engine goes on: the last page's bytes change as a whole.
        for layer in arrays:
            for array in layer.values():
                array[table[first // PAGE :]] += 1
        receipt = pool.park("a", slot, np.arange(second)).result()
        assert receipt.tokens_written <= second - first + 512
        target, taken, target_table = opaque_slot(layout, 2)
        pool.take("a", target).result()
        pages = -(-second // PAGE)
        for got, expected in zip(taken, arrays, strict=True):
            for name in got:
                np.testing.assert_array_equal(got[name][target_table[:pages]], expected[name][table[:pages]])


def test_a_former_version_keeps_its_opaque_page(pool_path: Path) -> None:
    layout = layout_of(PAGE)
    slot, arrays, table = opaque_slot(layout, 1)
    before = [{name: array.copy() for name, array in layer.items()} for layer in arrays]
    with mmkv.Pool.open(pool_path, layout, capacity="4MiB") as pool:
        pool.park("a", slot, np.arange(1000)).result()
        with pool.match(np.arange(1000)) as match:
            assert match.tokens == 1000
            for layer in arrays:
                for array in layer.values():
                    array += 1
            pool.park("a", slot, np.arange(1001)).result()
            target, taken, target_table = opaque_slot(layout, 2)
            pool.take(match, target).result()
        for got, expected in zip(taken, before, strict=True):
            for name in got:
                np.testing.assert_array_equal(got[name][target_table[:63]], expected[name][table[:63]])


def test_a_prefix_ends_at_a_page_where_pages_are_opaque(pool_path: Path) -> None:
    layout = layout_of(PAGE)
    slot, *_ = opaque_slot(layout, 1)
    with mmkv.Pool.open(pool_path, layout, capacity="4MiB") as pool:
        pool.park("a", slot, np.arange(1000)).result()
        with pytest.raises(ValueError, match="take 496 or 512"):
            pool.take("a", slot, tokens=500)
        with pytest.raises(ValueError, match="have is 9"):
            pool.take("a", slot, have=9)
        with pool.match(np.arange(500)) as match:
            assert match.tokens == 496
            assert pool.take(match, slot).result().tokens == 496


def test_place_splits_at_pages_and_joins_neighbours() -> None:
    layout = layout_of()
    slot = mmkv.PagedSlot(layout, paged_arrays(layout, 10), [3, 4, 9, 0], PAGE)
    one = np.array([0])
    runs, rows = slot.place(TokenRuns(one, np.array([100]), np.array([5]), np.array([50])))
    assert rows.tolist() == [3 * PAGE + 5, 9 * PAGE, 0]
    assert runs.tokens.tolist() == [27, 16, 7]
    assert runs.token.tolist() == [5, 32, 48]
    assert runs.row.tolist() == [100, 127, 143]
    runs, rows = slot.place(TokenRuns(*[np.zeros(0, np.int64)] * 4))
    assert not len(rows)
    assert not len(runs.tokens)


def test_bad_pages_are_refused() -> None:
    layout = layout_of()
    arrays = paged_arrays(layout, 10)
    with pytest.raises(ValueError, match="names page 10, but the arrays hold pages 0 to 9"):
        mmkv.PagedSlot(layout, arrays, [1, 10], PAGE)
    with pytest.raises(ValueError, match="page 4 twice"):
        mmkv.PagedSlot(layout, arrays, [4, 1, 4], PAGE)
    with pytest.raises(TypeError, match="page_table"):
        mmkv.PagedSlot(layout, arrays, [1.5], PAGE)
    with pytest.raises(ValueError, match=r"layer 0, plane 'k'.*not \(pages, 8, 4, 8\)"):
        mmkv.PagedSlot(layout, arrays, [1], 8)
    with pytest.raises(ValueError, match="opaque_page_tokens is None"):
        mmkv.PagedSlot(layout, arrays, [1], PAGE, opaque=True)
    with pytest.raises(ValueError, match="opaque"):
        mmkv.Slot.allocate(layout_of(PAGE), 100)
    with pytest.raises(ValueError, match="whole pages must fill a block"):
        mmkv.Pool.open("/dev/shm/never", layout_of(48), capacity="4MiB")
