"""Which blocks and records are in quarantine: their bytes are not those that were parked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from mmkv.blocks import BlockAllocator, tokens_before
from mmkv.geometry import Extent
from mmkv.layout import Layout
from mmkv.rows import Checkpoint, VersionRow
from mmkv.space import KINDS, Kind
from mmkv.unit_table import Bad

__all__ = ["Quarantine", "usable_tokens"]


def usable_tokens(layout: Layout, version: VersionRow, sound: int, bad_records: Collection[int] = ()) -> int:
    """How many of the first `sound` tokens of a version can be taken: up to a checkpoint, or the end of an opaque page.

    The checkpoints in `bad_records` do not count.
    """
    if layout.state_bytes:
        points = (point.tokens for point in version.checkpoints if point.record not in bad_records)
        return max((tokens for tokens in points if tokens <= sound), default=0)
    return sound if sound == version.tokens else sound // layout.granule * layout.granule


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

    def numbers(self, kind: Kind) -> Collection[int]:
        """The numbers in quarantine."""
        return self._numbers[kind].keys()

    def count(self, kind: Kind) -> int:
        """How many numbers are in quarantine."""
        return len(self._numbers[kind])

    def sound_tokens(self, extents: Sequence[Extent], tokens: int, block_tokens: int) -> int:
        """How many leading tokens of a version lie before its first bad block."""
        return tokens_before(self._numbers["blocks"], extents, tokens, block_tokens)

    def sound_points(self, points: Iterable[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints whose states are those that were parked."""
        bad = self._numbers["checkpoints"]
        return [point for point in points if point.record not in bad]
