"""Swaps and pages with two tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    UNIFORM,
    assert_holds,
    assert_parked,
    compute,
    ids_of,
    make_slot,
    park,
)
from tests.mirror import check_pool
from tests.tiered import (
    BLOCK,
    BLOCK_BYTES,
    Moves,
    make_cold,
    open_tiers,
    text,
)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])
@pytest.mark.parametrize("cold", [False, True])
def test_a_swap(base: Path, hot: Path, layout: mmkv.Layout, cold: bool) -> None:
    with open_tiers(base, hot, layout, hot_capacity=250_000) as pool:
        leaving, arriving = text(1, 4.2), text(2, 5.1)
        park(pool, "b", arriving)
        if cold:
            make_cold(pool)
        slot = make_slot(layout, len(arriving))
        compute(slot, leaving)
        for transfer in pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b"):
            transfer.result(10)
        assert_holds(slot, arriving)
        assert_parked(pool, "a", leaving)
        check_pool(pool, [])


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_swap_whose_park_fails_puts_the_slot_back(
    base: Path, hot: Path, cold: bool, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hot tier holds half of what leaves, so that its rows lie in both.
    pool = open_tiers(base, hot, hot_capacity=6 * BLOCK_BYTES)
    leaving, arriving = text(1, 10.5), text(2, 9)
    park(pool, "a", leaving[: 4 * BLOCK + 9])
    park(pool, "b", arriving)
    if cold:
        make_cold(pool)
    slot = make_slot(UNIFORM, len(leaving))
    compute(slot, leaving)
    moves = Moves(base, monkeypatch)

    def fail(piece: Any) -> None:
        if piece.layer == layer:
            raise OSError(5, "Input/output error")

    moves.fail_write = fail
    parking, take = pool.swap(slot, leaving="a", leaving_ids=leaving, arriving="b")
    with pytest.raises(mmkv.TransferError, match=f"layer {layer}"):
        parking.result(10)
    with pytest.raises(mmkv.TransferError, match=rf"nothing could be taken|layer {layer}"):
        take.result(10)
    moves.fail_write = None
    assert_holds(slot, leaving)
    check_pool(pool, [])
    assert_parked(pool, "a", leaving[: 4 * BLOCK + 9])
    assert_parked(pool, "b", arriving)
    pool.close()


@pytest.mark.parametrize("opaque", [False, True])
def test_paged_slots(base: Path, hot: Path, opaque: bool) -> None:
    page = 16
    layout = mmkv.Layout(
        [mmkv.Layer({"k": mmkv.Plane("uint8", (8,))})] * 2,
        model="paged",
        **({"opaque_page_tokens": page} if opaque else {}),
    )
    rng = np.random.default_rng(1)
    tokens, pages = 900, 80
    arrays = [{"k": rng.integers(0, 256, (pages, page, 8), dtype=np.uint8)} for _ in range(2)]
    table = rng.permutation(pages)[: -(-tokens // page)]
    with open_tiers(base, hot, layout, hot_capacity=60_000) as pool:
        ids = ids_of((1, tokens))
        for length in (300, 611, tokens):
            slot = mmkv.PagedSlot(layout, arrays, table, page, opaque=opaque)
            pool.park("chat", slot, ids[:length]).result(10)
            for cold in (False, True):
                if cold:
                    make_cold(pool)
                target = [{"k": np.zeros((pages, page, 8), dtype=np.uint8)} for _ in range(2)]
                other = rng.permutation(pages)[: len(table)]
                pool.take("chat", mmkv.PagedSlot(layout, target, other, page, opaque=opaque)).result(10)
                for mine, theirs in zip(arrays, target, strict=True):
                    expected = mine["k"][table].reshape(-1, 8)[:length]
                    assert (theirs["k"][other].reshape(-1, 8)[:length] == expected).all()
            check_pool(pool, [])
