"""Which blocks are free, and how often each is held: the allocation of one tier's numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmkv.geometry import Extent

__all__ = ["BlockAllocator", "block_numbers", "leading_extents", "merge_extents", "number_extents", "tokens_before"]

# How much larger a free run must be than an extent to be parted by it. Of 2, 4 and 8, the last one gave the fewest
# extents a conversation in simulations of 8 to 40 growing conversations at an occupancy of 60 to 95 %.
_LARGE = 8


class BlockAllocator:
    """Numbers `0, 1, ...` in segments of equal length, handed out as extents and counted by reference.

    Where a number is free, its count is 0 and it lies in exactly one free run. A number that lost its last reference
    is not free before `settle`, if `defer` is set: on a disk it may be reused only after the transaction that freed
    it is on the medium.

    Parameters
    ----------
    segment_length : int
        Numbers of a segment.
    defer : bool
        Whether freed numbers wait for `settle`.

    Attributes
    ----------
    freed : list of callable
        Called with each run of numbers that lost their last reference.
    """

    def __init__(self, segment_length: int, *, defer: bool = False) -> None:
        self.segment_length = segment_length
        self.freed: list[Callable[[Extent], None]] = []
        self.segments: set[int] = set()
        self._defer = defer
        self._counts: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._unsettled: list[Extent] = []
        self.free = 0
        self.unsettled = 0

    @property
    def total(self) -> int:
        """How many numbers the allocated segments hold."""
        return len(self.segments) * self.segment_length

    @property
    def used(self) -> int:
        """How many numbers are held."""
        return self.total - self.free - self.unsettled

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """References of every number below the end of the last segment; int32. Not to be changed."""
        return self._counts

    @property
    def largest_free_run(self) -> int:
        """The longest extent that one allocation can get."""
        return max(self._lengths.values(), default=0)

    @property
    def free_runs(self) -> int:
        """How many free runs there are."""
        return len(self._starts)

    def next_segment(self) -> int:
        """The lowest number of a segment that is not allocated."""
        segment = 0
        while segment in self.segments:
            segment += 1
        return segment

    def add_segment(self, segment: int) -> None:
        """Take in a segment, all of it free."""
        if segment in self.segments:
            raise ValueError(f"segment {segment} is allocated already")
        self.segments.add(segment)
        end = (segment + 1) * self.segment_length
        if len(self._counts) < end:
            self._counts = np.concatenate([self._counts, np.zeros(end - len(self._counts), dtype=np.int32)])
        self._put_free(Extent(segment * self.segment_length, self.segment_length))

    def require_free(self, segment: int) -> None:
        """Raise `ValueError` unless all of a segment is free."""
        if not self._is_free(Extent(segment * self.segment_length, self.segment_length)):
            raise ValueError(f"segment {segment} is in use")

    def remove_segment(self, segment: int) -> None:
        """Take a segment out; all of it must be free."""
        self.require_free(segment)
        self._take_free(Extent(segment * self.segment_length, self.segment_length))
        self.segments.remove(segment)

    def drained_segments(self) -> list[int]:
        """The segments that are free as a whole, the last first."""
        length = self.segment_length
        return [s for s in sorted(self.segments, reverse=True) if self._is_free(Extent(s * length, length))]

    def allocate(
        self, count: int, behind: Sequence[Extent] = (), *, tail_apart: bool = False
    ) -> tuple[Extent, ...] | None:
        """Take `count` free numbers, each with one reference, in as few extents as can be, now and later.

        The numbers that follow `behind` come first, so that what grows stays in one extent; the rest comes from the
        largest free runs.

        Parameters
        ----------
        count : int
            How many.
        behind : sequence of Extent
            What the new numbers continue.
        tail_apart : bool
            Whether the last number is soon replaced: it then lies out of the way, so that the place behind the others
            is free when the next ones come.

        Returns
        -------
        tuple of Extent or None
            `None`, and nothing taken, if fewer are free.
        """
        if count > self.free:
            return None
        body = count - 1 if tail_apart and count else count
        taken = self._take_body(body, behind)
        if body < count:
            taken.append(self._take_tail())
        for first, length in taken:
            self._counts[first : first + length] = 1
        return tuple(taken)

    def _take_body(self, count: int, behind: Sequence[Extent]) -> list[Extent]:
        taken: list[Extent] = []
        next_number = behind[-1].first + behind[-1].blocks if behind else None
        while count:
            if next_number is not None and next_number in self._lengths:
                extent = Extent(next_number, min(count, self._lengths[next_number]))
            else:
                extent = self._new_extent(count)
            next_number = None
            self._take_free(extent)
            taken.append(extent)
            count -= extent.blocks
        return taken

    def _new_extent(self, count: int) -> Extent:
        # In the middle of the largest run, if that is much larger: so that both this extent and the one that lies
        # before the run have room to grow.
        start = max(self._starts, key=self._lengths.__getitem__)
        length = self._lengths[start]
        parts = start > 0 and self._counts[start - 1] > 0 and length >= _LARGE * count
        return Extent(start + (length - count) // 2 if parts else start, min(count, length))

    def _take_tail(self) -> Extent:
        # At the end of the smallest run, where it parts the least.
        start = min(self._starts, key=self._lengths.__getitem__)
        extent = Extent(start + self._lengths[start] - 1, 1)
        self._take_free(extent)
        return extent

    def hold(self, extents: Iterable[Extent]) -> None:
        """Add a reference to every number of `extents`, which may be free only while a catalog is loaded."""
        for first, count in extents:
            counts = self._counts[first : first + count]
            if len(counts) != count:
                raise ValueError(f"blocks {first} to {first + count - 1} lie outside the allocated segments")
            if not counts.all():
                self._take_unheld(first, counts)
            counts += 1

    def _take_unheld(self, first: int, counts: npt.NDArray[np.int32]) -> None:
        for run in zero_runs(counts, first):
            if not self._is_free(run):
                raise ValueError(f"blocks {run.first} to {run.first + run.blocks - 1} lie outside the segments")
            self._take_free(run)

    def release(self, extents: Iterable[Extent]) -> int:
        """Drop a reference of every number of `extents`. Returns how many lost their last one."""
        freed = 0
        for first, count in extents:
            counts = self._counts[first : first + count]
            if not counts.all() or len(counts) != count:
                raise ValueError(f"blocks {first} to {first + count - 1} are not all held")
            counts -= 1
            for run in zero_runs(counts, first):
                freed += run.blocks
                for tell in self.freed:
                    tell(run)
                if self._defer:
                    self._unsettled.append(run)
                    self.unsettled += run.blocks
                else:
                    self._put_free(run)
        return freed

    def defer(self) -> None:
        """Let freed numbers wait for `settle` from now on."""
        self._defer = True

    def settle(self, wipe: Callable[[Extent], None] | None = None, most: int | None = None) -> None:
        """Make what was freed allocatable: the transactions that freed it are on the medium.

        Parameters
        ----------
        wipe : callable, optional
            Called with each run before it is free. If it raises, that run and the rest go on waiting.
        most : int, optional
            How many numbers are enough, to a run.
        """
        done = 0
        while self._unsettled and (most is None or done < most):
            run = self._unsettled[-1]
            if wipe is not None:
                wipe(run)
            self._unsettled.pop()
            self.unsettled -= run.blocks
            self._put_free(run)
            done += run.blocks

    def free_extents(self) -> tuple[Extent, ...]:
        """The free runs."""
        return tuple(Extent(start, self._lengths[start]) for start in self._starts)

    def _is_free(self, extent: Extent) -> bool:
        at = bisect_right(self._starts, extent.first) - 1
        if at < 0:
            return False
        start = self._starts[at]
        return extent.first + extent.blocks <= start + self._lengths[start]

    def _take_free(self, extent: Extent) -> None:
        at = bisect_right(self._starts, extent.first) - 1
        start = self._starts[at]
        end = start + self._lengths[start]
        del self._starts[at], self._lengths[start]
        if start < extent.first:
            self._insert_run(start, extent.first - start)
        if extent.first + extent.blocks < end:
            self._insert_run(extent.first + extent.blocks, end - extent.first - extent.blocks)
        self.free -= extent.blocks

    def _put_free(self, extent: Extent) -> None:
        first, end = extent.first, extent.first + extent.blocks
        at = bisect_left(self._starts, first)
        if at < len(self._starts) and self._starts[at] == end:
            end += self._lengths.pop(end)
            del self._starts[at]
        if at > 0 and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == first:
            first = self._starts[at - 1]
            del self._starts[at - 1]
        self._insert_run(first, end - first)
        self.free += extent.blocks

    def _insert_run(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length


def zero_runs(counts: npt.NDArray[np.int32], first: int) -> list[Extent]:
    """The runs of zeros in `counts`, as extents of the numbers that start at `first`."""
    zero = np.flatnonzero(counts == 0)
    if not len(zero):
        return []
    breaks = np.flatnonzero(np.diff(zero) != 1) + 1
    return [Extent(first + int(run[0]), len(run)) for run in np.split(zero, breaks)]


def merge_extents(extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """The same blocks in the same order, neighbours joined."""
    merged: list[Extent] = []
    for first, count in extents:
        if merged and merged[-1].first + merged[-1].blocks == first:
            merged[-1] = Extent(merged[-1].first, merged[-1].blocks + count)
        elif count:
            merged.append(Extent(first, count))
    return tuple(merged)


def block_numbers(extents: Sequence[Extent]) -> npt.NDArray[np.int64]:
    """The numbers of all blocks of `extents`, in order; int64, shape (blocks,)."""
    if len(extents) == 1:
        return np.arange(extents[0].first, extents[0].first + extents[0].blocks, dtype=np.int64)
    runs = [np.arange(first, first + count, dtype=np.int64) for first, count in extents]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


def number_extents(numbers: npt.NDArray[np.int64]) -> tuple[Extent, ...]:
    """The extents that hold `numbers`, in their order."""
    if not len(numbers):
        return ()
    heads = np.append(0, np.flatnonzero(np.diff(numbers) != 1) + 1)
    lengths = np.diff(np.append(heads, len(numbers)))
    return tuple(Extent(*run) for run in zip(numbers[heads].tolist(), lengths.tolist(), strict=True))


def tokens_before(bad: Collection[int], extents: Sequence[Extent], tokens: int, block_tokens: int) -> int:
    """How many of the tokens that lie in `extents` come before the first block that is one of `bad`."""
    position = 0
    for first, count in extents if bad else ():
        here = min((number for number in bad if first <= number < first + count), default=None)
        if here is not None:
            return min(tokens, (position + here - first) * block_tokens)
        position += count
    return tokens


def leading_extents(extents: Sequence[Extent], blocks: int) -> tuple[Extent, ...]:
    """The first `blocks` blocks of `extents`."""
    kept: list[Extent] = []
    for first, count in extents:
        if blocks <= 0:
            break
        kept.append(Extent(first, min(count, blocks)))
        blocks -= count
    return tuple(kept)
