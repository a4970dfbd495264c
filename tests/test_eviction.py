"""Eviction: the least recently used go, no more than needed, and shared blocks count only when they become free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkv.blocks import BlockAllocator
from mmkv.eviction import Counts, choose_victims
from mmkv.geometry import Extent
from mmkv.ledger import Ledger
from mmkv.rows import Checkpoint, ConversationRow, VersionRow

NO_HASHES = np.zeros(0, dtype=np.uint64)


def ledger_of(held: Sequence[Sequence[int]], records: Sequence[Sequence[int]] = ()) -> Ledger:
    """A ledger of conversations 0, 1, ... that hold these blocks, the first the least recently used."""
    blocks, numbers = BlockAllocator(32), BlockAllocator(32)
    blocks.add_segment(0)
    numbers.add_segment(0)
    ledger = Ledger(blocks, numbers)
    rows = []
    for index, own in enumerate(held):
        points = tuple(Checkpoint(at + 1, record, False) for at, record in enumerate(records[index] if records else ()))
        version = VersionRow(index, 1, 0.0, "", False, NO_HASHES, tuple(Extent(block, 1) for block in own), points)
        rows.append(ConversationRow(index, str(index), "", False, 0.0, 0.0, None, index, version, None))
    ledger.load(rows)
    return ledger


def victims_of(ledger: Ledger, blocks: int, records: int = 0) -> list[int] | None:
    free = [int((allocator.counts == 0).sum()) for allocator in (ledger.blocks, ledger.records)]

    def enough(*counts: Counts) -> bool:
        return all(
            (left == 0).sum() - before >= wanted
            for left, before, wanted in zip(counts, free, (blocks, records), strict=True)
        )

    victims = choose_victims(ledger, ledger.least_recently_used(), enough)
    return None if victims is None else [int(victim.name) for victim in victims]


@pytest.mark.parametrize(
    ("blocks", "expected"), [(1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1]), (6, [0, 1, 2]), (7, None)]
)
def test_the_least_recently_used_go_first(blocks: int, expected: list[int] | None) -> None:
    assert victims_of(ledger_of([[0, 1], [2, 3], [4, 5]]), blocks) == expected


def test_a_shared_block_is_free_only_without_all_who_hold_it() -> None:
    ledger = ledger_of([[0, 1, 2], [0, 1, 3], [4]])
    assert victims_of(ledger, 1) == [0]
    assert victims_of(ledger, 2) == [0, 1]
    assert victims_of(ledger, 4) == [0, 1]
    assert victims_of(ledger, 5) == [0, 1, 2]


def test_one_whose_drop_frees_nothing_is_spared() -> None:
    assert victims_of(ledger_of([[0], [0, 1], [2, 3], [0]]), 2) == [2]


def test_checkpoints_count_by_themselves() -> None:
    ledger = ledger_of([[0], [1], [2]], records=[[], [0, 1], [2]])
    assert victims_of(ledger, 0, 1) == [1]
    assert victims_of(ledger, 2, 1) == [0, 1]


def test_choosing_changes_nothing() -> None:
    ledger = ledger_of([[0, 1], [1, 2]], records=[[0], [0]])
    before = ledger.blocks.counts.tolist(), ledger.records.counts.tolist()
    victims_of(ledger, 3, 1)
    assert (ledger.blocks.counts.tolist(), ledger.records.counts.tolist()) == before


@given(st.lists(st.frozensets(st.integers(0, 11), max_size=5), max_size=6), st.integers(1, 12))
def test_what_goes_is_enough_and_nobody_goes_in_vain(held: list[frozenset[int]], blocks: int) -> None:
    owners = [sorted(own) for own in held]
    victims = victims_of(ledger_of(owners), blocks)

    def freed(gone: Sequence[int]) -> int:
        kept = {block for index, own in enumerate(owners) if index not in gone for block in own}
        return len({block for index in gone for block in owners[index]} - kept)

    if victims is None:
        assert freed(range(len(owners))) < blocks
        return
    assert freed(victims) >= blocks
    for victim in victims:
        assert freed([other for other in victims if other != victim]) < blocks
