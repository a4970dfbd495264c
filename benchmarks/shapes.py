"""Figures of other shapes: a conversation in 64 extents, heads as planes of their own, pages in random order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

import mmkv
from benchmarks.contenders import wait_until_locked
from benchmarks.decode import DecodeLoop
from benchmarks.memory import DeviceMemory, PlaneRows, allocate_slot, rows_of
from benchmarks.rig import Rig
from benchmarks.work import Ids, heads_layout, new_ids, wipe
from mmkv.catalog import Catalog
from mmkv.geometry import block_tokens

__all__ = ["EXTENTS", "HEADS", "PAGE_TOKENS", "SHAPE_FIGURES", "fragment", "measure_shapes"]

EXTENTS = 64
HEADS = 8
# 16 tokens of 1,024 bytes: pieces of 16 KiB.
PAGE_TOKENS, PAGED_ROW = 16, 1024
SHAPE_FIGURES = {
    "extents": ("extents_take", "extents_park"),
    "heads": ("heads_take", "heads_park"),
    "paged": ("paged_take", "paged_park", "decode_paged"),
}


def measure_shapes(rig: Rig, chosen: Collection[str]) -> None:
    """Measure the chosen figures, each on a pool of its own."""
    measures: dict[str, Callable[[Rig], None]] = {"extents": _extents, "heads": _heads, "paged": _paged}
    for name, measure in measures.items():
        if name in chosen:
            with rig.group(*SHAPE_FIGURES[name]):
                measure(rig)


def _round(
    rig: Rig,
    pool: mmkv.Pool,
    slot: mmkv.Slot | mmkv.PagedSlot,
    rows: Sequence[PlaneRows],
    tokens: int,
    entries: int,
) -> tuple[list[float], list[float], str]:
    """Park new bytes and take them back, several times beside RAM; the first time counts as a warm-up.

    `entries` is how many entries of the arrays' first axis hold the tokens.
    """
    parks: list[float] = []
    takes: list[float] = []
    paths: set[str] = set()

    def park(ids: Ids) -> None:
        paths.add(pool.park("shape", slot, ids).result().path)

    def take() -> None:
        paths.add(pool.take("shape", slot).result().path)

    for turn in range(rig.repeats + 1):
        rig.ram()
        rig.noise.forget("shape")
        rig.noise.write("shape", rows, 0, entries)
        ids = new_ids(tokens)
        parked = rig.seconds(partial(park, ids))
        wipe(rig.memory, rows)
        taken = rig.seconds(take)
        rig.noise.require("shape", rows, entries, "mmkv")
        if pool.info("shape").tokens != tokens:
            raise RuntimeError(f"{pool.info('shape').tokens} of {tokens} tokens are parked")
        if turn:
            parks.append(parked)
            takes.append(taken)
        if turn < rig.repeats:
            pool.drop("shape")
    return parks, takes, "+".join(sorted(paths))


def _note(rig: Rig, name: str, size: int, found: tuple[list[float], list[float], str], **details: Any) -> None:
    parks, takes, path = found
    rig.rates(f"{name}_take", takes, rig.take_speed, size, path=path, **details)
    rig.rates(f"{name}_park", parks, rig.park_speed, size, path=path, **details)


def _extents(rig: Rig) -> None:
    tokens = rig.tokens
    per_block = block_tokens(rig.layout)
    blocks = -(-tokens // per_block)
    run = max(1, blocks // EXTENTS)
    # Of each run of free blocks and the one that stays between two of them.
    needed = -(-blocks // run) * (run + 1)
    with rig.pool("extents", rig.layout) as pool:
        fragment(rig, pool, needed, run)
        found = _round(rig, pool, rig.slot, rig.rows, tokens, tokens)
        extents = pool.info("shape").extents
        if extents < min(EXTENTS, blocks):
            raise RuntimeError(f"the conversation lies in {extents} extents, not in {EXTENTS}")
        _note(rig, "extents", rig.bytes, found, extents=extents, extent_tokens=run * per_block)


def fragment(rig: Rig, pool: mmkv.Pool, blocks: int, run: int) -> None:
    """Let a pool grow to so many blocks at least, of which all runs of free ones are `run` blocks long."""
    per_block = block_tokens(rig.layout)
    count = 0
    while count < blocks or pool.stats().largest_free_run:
        pool.park(f"filler-{count}", rig.slot, new_ids(per_block)).result()
        count += 1
        if count == blocks:
            # No spare segment from now on.
            pool.resize(pool.stats().allocated)
    catalog = Catalog(pool.path / "catalog.sqlite3", readonly=True)
    try:
        lies_at = {row.name: row.version.extents[0].first for row in catalog.load(hashes=False)}
    finally:
        catalog.close()
    for name, block in lies_at.items():
        if block % (run + 1) != run:
            pool.drop(name)
    wait_until_locked(pool)


def _heads(rig: Rig) -> None:
    if any(plane.token_bytes % HEADS for plane in rig.layout.layers[0].planes.values()):
        raise RuntimeError(f"planes of {rig.layout.layers[0].token_bytes} bytes do not part into {HEADS} heads")
    layout = heads_layout(rig.layout, HEADS)
    slot = allocate_slot(rig.memory, layout, rig.tokens)
    rows = rows_of(slot.arrays)
    with rig.pool("heads", layout) as pool:
        _settle(rig, pool, slot, rig.tokens)
        found = _round(rig, pool, slot, rows, rig.tokens, rig.tokens)
        _note(rig, "heads", rig.bytes, found, planes=len(rows))
    del slot, rows
    _trim(rig)


def _settle(rig: Rig, pool: mmkv.Pool, slot: mmkv.Slot | mmkv.PagedSlot, tokens: int) -> None:
    """Let a pool grow and page-lock what it needs."""
    rig.park(pool, "settle", slot, new_ids(tokens))
    pool.drop("settle")


def _paged(rig: Rig) -> None:
    layers = len(rig.layout.layers)
    planes = {name: mmkv.Plane("uint8", (PAGED_ROW,)) for name in ("k", "v")}
    layout = mmkv.Layout([mmkv.Layer(planes)] * layers, model="pages")
    pages = max(1, rig.bytes // layout.token_bytes // PAGE_TOKENS)
    tokens = pages * PAGE_TOKENS
    arrays = [{name: rig.memory.allocate((pages, PAGE_TOKENS, PAGED_ROW)) for name in planes} for _ in range(layers)]
    table = np.random.default_rng(0).permutation(pages)
    slot = mmkv.PagedSlot(layout, arrays, table, PAGE_TOKENS)
    rows = rows_of(arrays)
    size = layout.token_bytes * tokens
    with rig.pool("paged", layout) as pool:
        _settle(rig, pool, slot, tokens)
        found = _round(rig, pool, slot, rows, tokens, pages)
        parks, takes, path = found
        details = {"path": path, "piece_bytes": PAGE_TOKENS * PAGED_ROW, "pieces": 2 * layers * pages}
        rig.rates("paged_take", takes, rig.one_way_speed, size, **details)
        rig.rates("paged_park", parks, rig.one_way_speed, size, **details)
        if not isinstance(rig.memory, DeviceMemory):
            raise RuntimeError("a decode loop needs a device")
        beside = DecodeLoop(rig.memory).beside(rig.repeats, size, lambda: pool.take("shape", slot))
        rig.figure("decode_paged", beside.pop("ratio"), **beside)
    del arrays, rows
    _trim(rig)


def _trim(rig: Rig) -> None:
    if isinstance(rig.memory, DeviceMemory):
        rig.memory.trim()
