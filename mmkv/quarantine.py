"""Which blocks and records are in quarantine: their bytes are not those that were parked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from mmkv.blocks import BlockAllocator
from mmkv.catalog import Checkpoint
from mmkv.geometry import Extent
from mmkv.space import KINDS, Kind
from mmkv.unit_table import Bad

__all__ = ["Quarantine"]


class Quarantine:
    """The bad numbers. A conversation ends, for who takes, matches or shares it, before its first bad block.

    What loses its last reference leaves the quarantine. The pool's lock guards it.

    Parameters
    ----------
    blocks, records : BlockAllocator
        The numbers of the path.
    """

    def __init__(self, blocks: BlockAllocator, records: BlockAllocator) -> None:
        self._allocators: dict[Kind, BlockAllocator] = {"blocks": blocks, "checkpoints": records}
        self._numbers: dict[Kind, dict[int, Bad]] = {kind: {} for kind in KINDS}
        for kind, allocator in self._allocators.items():
            allocator.freed.append(partial(self._leave, kind))

    def put(self, rows: Iterable[Bad]) -> None:
        """Put numbers into quarantine, save for those that nobody holds, which mean nothing."""
        for row in rows:
            counts = self._allocators[row.kind].counts
            if row.number < len(counts) and counts[row.number] > 0:
                self._numbers[row.kind][row.number] = row

    def _leave(self, kind: Kind, run: Extent) -> None:
        bad = self._numbers[kind]
        for number in [number for number in bad if run.first <= number < run.first + run.blocks]:
            del bad[number]

    def count(self, kind: Kind) -> int:
        """How many numbers are in quarantine."""
        return len(self._numbers[kind])

    def sound_tokens(self, extents: Sequence[Extent], tokens: int, block_tokens: int) -> int:
        """How many leading tokens of a version lie before its first bad block."""
        bad, position = self._numbers["blocks"], 0
        for first, count in extents if bad else ():
            here = min((number for number in bad if first <= number < first + count), default=None)
            if here is not None:
                return min(tokens, (position + here - first) * block_tokens)
            position += count
        return tokens

    def sound_points(self, points: Iterable[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints whose states are those that were parked."""
        bad = self._numbers["checkpoints"]
        return [point for point in points if point.record not in bad]
