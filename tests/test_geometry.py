"""Geometry: every byte of every row has a place of its own, and runs find it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkv import Layer, Layout, Plane, State
from mmkv.geometry import ID_BYTES, Extent, Geometry, TokenRuns, block_tokens, choose_geometry

UNIT = 4096
token_bytes = st.sampled_from([1, 3, 8, 24, 48, 512, 816, 4096, 5000])
layers = st.lists(st.lists(token_bytes, max_size=3), min_size=1, max_size=3)


def layout_of(sizes: list[list[int]], state: int = 0) -> Layout:
    states = {"s": State("uint8", (state,))} if state else {}
    return Layout(
        [Layer({f"p{i}": Plane("uint8", (size,)) for i, size in enumerate(layer)}, states) for layer in sizes], "m"
    )


geometries = st.builds(
    lambda sizes, state, capacity: choose_geometry(layout_of(sizes, state), capacity),
    layers,
    st.sampled_from([1, 4000, 4097]),
    st.integers(1 << 28, 1 << 33),
)


@given(layers.filter(any))
def test_a_block_is_the_smallest_number_of_tokens_with_whole_units(sizes: list[list[int]]) -> None:
    tokens = block_tokens(layout_of(sizes))
    planes = [size for layer in sizes for size in layer] + [ID_BYTES]
    assert all(tokens * size % UNIT == 0 for size in planes)
    assert not any(all(n * size % UNIT == 0 for size in planes) for n in range(1, min(tokens, 5000)))


@given(geometries)
def test_regions_lie_in_their_segment_aligned_and_apart(geometry: Geometry) -> None:
    rows = geometry.segment_blocks * geometry.block_tokens
    for regions, segment_bytes in zip(geometry.plane_regions, geometry.layer_segment_bytes, strict=True):
        end = 0
        for start, size in regions.values():
            assert start % geometry.alignment == 0
            assert start >= end
            end = start + rows * size
        assert end <= segment_bytes
        assert segment_bytes % geometry.alignment == 0


@given(geometries)
def test_states_lie_in_their_record_apart(geometry: Geometry) -> None:
    for layer, spec in enumerate(geometry.layout.layers):
        end = 0
        for name, state in spec.state.items():
            start = geometry.state_offset(layer, name, 7) - geometry.state_offset(layer, name, 0)
            assert start == 7 * geometry.layer_record_bytes[layer]
            assert geometry.state_offsets[layer][name] >= end
            end = geometry.state_offsets[layer][name] + state.bytes
        assert end <= geometry.layer_record_bytes[layer]
        assert geometry.layer_record_bytes[layer] % UNIT == 0


@st.composite
def spans(draw: st.DrawFn) -> tuple[Geometry, list[Extent], int, int]:
    sizes = draw(layers.filter(any))
    layout = layout_of(sizes)
    geometry = Geometry(layout, block_tokens(layout), draw(st.integers(1, 4)), 0, UNIT)
    firsts = draw(st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=6))
    blocks = sorted(firsts) if draw(st.booleans()) else firsts
    extents: list[Extent] = []
    for block in blocks:
        if extents and extents[-1].first + extents[-1].blocks == block:
            extents[-1] = Extent(extents[-1].first, extents[-1].blocks + 1)
        else:
            extents.append(Extent(block, 1))
    total = len(blocks) * geometry.block_tokens
    start = draw(st.integers(0, total))
    return geometry, extents, start, draw(st.integers(start, total))


@given(spans())
def test_runs_give_every_token_its_one_place(case: tuple[Geometry, list[Extent], int, int]) -> None:
    geometry, extents, start, stop = case
    runs = geometry.token_runs(extents, start, stop)
    per_segment = geometry.segment_blocks * geometry.block_tokens
    numbers = [block for first, count in extents for block in range(first, first + count)]
    expected = np.concatenate([np.arange(geometry.block_tokens) + block * geometry.block_tokens for block in numbers])
    tokens = [np.arange(t, t + n) for t, n in zip(runs.token, runs.tokens, strict=True)]
    places = [
        np.arange(r, r + n) + s * per_segment for s, r, n in zip(runs.segment, runs.row, runs.tokens, strict=True)
    ]
    empty: list[np.ndarray[Any, Any]] = [np.zeros(0, dtype=np.int64)]
    assert (np.concatenate(empty + tokens) == np.arange(start, stop)).all()
    assert (np.concatenate(empty + places) == expected[start:stop]).all()
    assert (runs.row + runs.tokens <= per_segment).all(), "a run crosses the border of a segment"


@given(spans())
def test_every_byte_of_every_row_is_hit_by_exactly_one_run(case: tuple[Geometry, list[Extent], int, int]) -> None:
    geometry, extents, start, stop = case
    runs = geometry.token_runs(extents, start, stop)
    for layer, regions in enumerate(geometry.plane_regions):
        hits: list[tuple[int, int]] = []
        for name, (_, size) in regions.items():
            offsets = geometry.plane_offsets(runs, layer, name)
            hits += [(int(at), int(at + n * size)) for at, n in zip(offsets, runs.tokens, strict=True)]
            first = offsets // geometry.layer_segment_bytes[layer]
            last = (offsets + runs.tokens * size - 1) // geometry.layer_segment_bytes[layer]
            assert (first == runs.segment).all()
            assert (last == runs.segment).all()
        hits.sort()
        assert sum(end - begin for begin, end in hits) == (stop - start) * geometry.layout.layers[layer].token_bytes
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(hits)), "two runs overlap"


@given(spans())
def test_rows_of_a_plane_are_contiguous_in_a_run(case: tuple[Geometry, list[Extent], int, int]) -> None:
    geometry, extents, start, stop = case
    whole = geometry.token_runs(extents, start, stop)
    for token in {start, (start + stop) // 2, stop - 1} & set(range(start, stop)):
        one = geometry.token_runs(extents, token, token + 1)
        at = int(np.searchsorted(whole.token, token, side="right")) - 1
        for layer, regions in enumerate(geometry.plane_regions):
            for name, (_, size) in regions.items():
                inside = (token - whole.token[at]) * size
                found = geometry.plane_offsets(one, layer, name)[0]
                assert found == geometry.plane_offsets(whole, layer, name)[at] + inside


def test_the_ids_lie_in_order_of_their_blocks() -> None:
    geometry = Geometry(layout_of([[8]]), 512, 2, 0, UNIT)
    runs = TokenRuns(*(np.array([value]) for value in (3, 5, 0, 1)))
    assert geometry.id_offsets(runs).tolist() == [(3 * 2 * 512 + 5) * ID_BYTES]


@pytest.mark.parametrize("capacity", ["1MiB", 64 << 20, 1 << 30, 384 << 30, 4 << 40])
def test_a_segment_is_about_a_64th_of_the_capacity(capacity: int | str) -> None:
    size = 1 << 20 if isinstance(capacity, str) else capacity
    layout = layout_of([[512, 256, 48]] * 48) if size >= 1 << 30 else layout_of([[8]])
    geometry = choose_geometry(layout, size)
    assert max(geometry.layer_segment_bytes) <= 1 << 30
    assert geometry.segment_bytes <= size // 64 * (1 + 1 / 32) or geometry.segment_blocks == 1
    if max(geometry.layer_segment_bytes) < 1 << 29:
        assert geometry.segment_bytes >= size // 64 * 3 // 4 - geometry.block_bytes


def test_large_pools_align_regions_to_huge_pages_and_small_ones_do_not() -> None:
    layout = layout_of([[512, 256, 48]] * 48)
    assert choose_geometry(layout, 384 << 30).alignment == 2 << 20
    assert choose_geometry(layout, 1 << 30).alignment == UNIT


@given(geometries)
def test_sizes_survive_json(geometry: Geometry) -> None:
    assert Geometry.from_json(geometry.layout, geometry.to_json()) == geometry


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_tokens", 1024),
        ("segment_blocks", 0),
        ("segment_blocks", 1 << 50),
        ("segment_checkpoints", 1),
        ("alignment", 8192),
        ("alignment", True),
        ("segment_blocks", "3"),
    ],
)
def test_sizes_that_no_pool_has_are_refused(name: str, value: object) -> None:
    geometry = choose_geometry(layout_of([[8]]), 1 << 20)
    with pytest.raises(ValueError, match=name):
        Geometry.from_json(geometry.layout, geometry.to_json() | {name: value})


def test_the_smallest_capacity_holds_a_block_and_a_checkpoint() -> None:
    layout = layout_of([[8]], state=5000)
    least = 512 * (8 + ID_BYTES) + 8192
    with pytest.raises(ValueError, match=f"capacity of {least - 1} bytes is too small.*takes {least} bytes"):
        choose_geometry(layout, least - 1)
    assert choose_geometry(layout, least).smallest_capacity == least


@given(token_bytes)
def test_a_unit_is_the_least_common_multiple_of_a_row_and_4096(size: int) -> None:
    assert block_tokens(layout_of([[size]])) == max(512, math.lcm(size, UNIT) // size)
