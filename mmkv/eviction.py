"""Which conversations go when the pool is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.ledger import Conversation, Ledger

__all__ = ["Counts", "choose_victims"]

Counts: TypeAlias = npt.NDArray[np.int32]


class _Release:
    """References as they would be after some conversations were dropped."""

    def __init__(self, ledger: Ledger) -> None:
        self.blocks = ledger.blocks.counts.copy()
        self.records = ledger.records.counts.copy()

    def drop(self, conversation: Conversation, change: int = -1) -> None:
        for version in conversation.linked_versions():
            for counts, extents in ((self.blocks, version.extents), (self.records, version.records)):
                for first, count in extents:
                    counts[first : first + count] += change

    def restore(self, conversation: Conversation) -> None:
        self.drop(conversation, 1)


def choose_victims(
    ledger: Ledger, candidates: Sequence[Conversation], enough: Callable[[Counts, Counts], bool]
) -> list[Conversation] | None:
    """The conversations to drop until there is enough room, as few as the order allows.

    Parameters
    ----------
    ledger : Ledger
        What is parked; nothing of it is changed.
    candidates : sequence of Conversation
        Those that may go, the least recently used first.
    enough : callable
        Whether references of the blocks and of the checkpoint records, as they would be, leave enough room.

    Returns
    -------
    list of Conversation or None
        `None` if dropping all of them would not do.
    """
    release = _Release(ledger)
    victims: list[Conversation] = []
    left = iter(candidates)
    while not enough(release.blocks, release.records):
        victim = next(left, None)
        if victim is None:
            return None
        release.drop(victim)
        victims.append(victim)
    # What several victims shared was freed by the last of them: the most recently used are spared again where the
    # others do.
    for victim in reversed(victims.copy()):
        release.restore(victim)
        if enough(release.blocks, release.records):
            victims.remove(victim)
        else:
            release.drop(victim)
    return victims
