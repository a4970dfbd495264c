"""Which conversations go when the pool is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmkv.geometry import Extent
from mmkv.ledger import Conversation, Ledger

__all__ = ["choose_victims"]


class _Release:
    """References as they would be after some conversations were dropped."""

    def __init__(self, counts: npt.NDArray[np.int32]) -> None:
        self.counts = counts.copy()
        self.freed = 0

    def drop(self, extents: Sequence[Extent]) -> None:
        for first, count in extents:
            held = self.counts[first : first + count]
            held -= 1
            self.freed += int((held == 0).sum())

    def restore(self, extents: Sequence[Extent]) -> None:
        for first, count in extents:
            held = self.counts[first : first + count]
            self.freed -= int((held == 0).sum())
            held += 1


def choose_victims(
    ledger: Ledger, candidates: Sequence[Conversation], blocks: int, records: int
) -> list[Conversation] | None:
    """The conversations to drop so that `blocks` and `records` more are free, as few as the order allows.

    Parameters
    ----------
    ledger : Ledger
        What is parked; nothing of it is changed.
    candidates : sequence of Conversation
        Those that may go, the least recently used first.
    blocks, records : int
        How many token blocks and checkpoint records must become free.

    Returns
    -------
    list of Conversation or None
        `None` if dropping all of them would not free enough.
    """
    freed_blocks, freed_records = _Release(ledger.blocks.counts), _Release(ledger.records.counts)

    def enough() -> bool:
        return freed_blocks.freed >= blocks and freed_records.freed >= records

    victims: list[Conversation] = []
    for candidate in candidates:
        if enough():
            break
        for version in candidate.linked_versions():
            freed_blocks.drop(version.extents)
            freed_records.drop(version.records)
        victims.append(candidate)
    if not enough():
        return None
    # Blocks that several victims shared were freed by the last of them: the most recently used are spared again
    # where the others free enough.
    for candidate in reversed(victims.copy()):
        for version in candidate.linked_versions():
            freed_blocks.restore(version.extents)
            freed_records.restore(version.records)
        if enough():
            victims.remove(candidate)
        else:
            for version in candidate.linked_versions():
                freed_blocks.drop(version.extents)
                freed_records.drop(version.records)
    return victims
