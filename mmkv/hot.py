"""The hot tier: a second set of layer files, in RAM, that holds what was parked, taken or prefetched last."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.between import Between, Pairs
from mmkv.blocks import block_numbers, number_extents
from mmkv.catalog import Catalog, Resident
from mmkv.errors import MmkvError
from mmkv.filling import Fill
from mmkv.geometry import Extent
from mmkv.ledger import Ledger
from mmkv.medium import available_ram
from mmkv.residents import Residents
from mmkv.space import KINDS, Kind, Space
from mmkv.store.files import PoolFile
from mmkv.store.posix import PosixStore
from mmkv.transfer import Transfer

__all__ = ["Hot", "Reading"]

_Numbers: TypeAlias = npt.NDArray[np.int64]
_NONE: _Numbers = np.zeros(0, dtype=np.int64)
# What one conversation may push out at most, so that a giant does not flush everything else.
_LARGEST_SHARE = 2
_PINNED = np.iinfo(np.int64).max
# A file system that refused a segment is not asked again for so long.
_REFUSED_SECONDS = 5.0
_log = logging.getLogger("mmkv")


@dataclass(slots=True)
class Reading:
    """Where a take finds its numbers in the hot tier, held until it ended, and the fills that it waits for.

    Attributes
    ----------
    places : dict
        By kind, the hot number of each number that was asked for; -1 where it is only at the path.
    fills : list of Fill
        Those that bring some of them.
    """

    places: dict[Kind, _Numbers]
    fills: list[Fill] = field(default_factory=list)


class Hot:
    """What is in the hot tier and what comes and goes there. The pool's lock guards it; methods take it themselves.

    Parameters
    ----------
    lock : RLock
        The pool's lock.
    catalog, path, ledger
        The pool's parts.
    space : Space
        The hot files.
    threads : int
        How many threads read from the path at once, and write to it.
    forget, grown : callable
        Called with a file and a segment that is about to be given back; with the files and a segment that is new.
    promotion : callable
        Makes the transfer that stands for bringing some bytes for a take; given what it is, and the bytes.
    doubt : callable
        Called with a kind and numbers that are not where they were: their bytes come from the path from now on.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        path: Space,
        space: Space,
        ledger: Ledger,
        *,
        threads: int,
        forget: Callable[[PoolFile, int], None],
        grown: Callable[[list[PoolFile], int], None],
        promotion: Callable[[str, int], Transfer],
        doubt: Callable[[Kind, _Numbers], None],
    ) -> None:
        self.space = space
        self.between = Between(path, space)
        self.residents = {kind: Residents(path.allocator(kind), space.allocator(kind)) for kind in KINDS}
        self.store = PosixStore(threads, disk=not path.medium.in_ram)
        self._lock = lock
        self._catalog = catalog
        self._path = path
        self._ledger = ledger
        self._forget = forget
        self._grown = grown
        self._promotion = promotion
        self._doubt = doubt
        # What is on its way here: hot numbers by kind and number, and the fills that bring them.
        self._coming: dict[Kind, dict[int, int]] = {kind: {} for kind in KINDS}
        self._fills: dict[Fill, Mapping[Kind, Pairs]] = {}
        self._refused_until = 0.0
        self.counters = dict.fromkeys(("promotions", "bytes_promoted", "hot_evictions", "prefetches"), 0)

    def load(self, rows: Iterable[Resident]) -> None:
        """Take in what a catalog lists, save what no version holds any more.

        Raises
        ------
        ValueError
            It lists hot numbers that are not allocated.
        """
        by_kind: dict[Kind, list[Resident]] = {kind: [] for kind in KINDS}
        for row in rows:
            if row.kind not in KINDS:
                raise ValueError(f"a resident is of the kind {row.kind!r}")
            counts = self._path.allocator(row.kind).counts
            if row.number < len(counts) and counts[row.number] > 0:
                by_kind[row.kind].append(row)
        for kind, found in by_kind.items():
            hot = np.array([row.hot for row in found], dtype=np.int64)
            numbers = np.array([row.number for row in found], dtype=np.int64)
            dirty = np.array([row.dirty for row in found], dtype=bool)
            if len(hot) and int(hot.max()) >= len(self.space.allocator(kind).counts):
                raise ValueError(f"a resident's hot number is {int(hot.max())}")
            self.space.allocator(kind).hold(number_extents(hot))
            for state in (True, False):
                self.residents[kind].admit(numbers[dirty == state], hot[dirty == state], dirty=state)

    # Room

    def reserve(
        self, kind: Kind, count: int, behind: Sequence[Extent], own: _Numbers, *, evict: bool = True
    ) -> _Numbers:
        """Take up to `count` hot numbers with one reference each: free ones, new ones, those of residents that go.

        Parameters
        ----------
        behind : sequence of Extent
            What the new numbers continue.
        own : ndarray of int64
            Numbers of the path of the same conversation, which stay.
        evict : bool
            Whether residents may go for it: those that the path has, the least recently used first, of at most half
            the tier for one conversation.
        """
        allocator = self.space.allocator(kind)
        while count:
            with self._lock:
                self.space.settle()
                if allocator.free < count and not self._may_grow(kind):
                    if evict and allocator.total == 0 and self._make_way(kind):
                        continue
                    if evict:
                        self._evict_for(kind, count - allocator.free, own)
                    count = min(count, allocator.free)
                if allocator.free >= count:
                    extents = allocator.allocate(count, behind)
                    assert extents is not None
                    return block_numbers(extents)
            self._grow(kind)
        return _NONE

    def release(self, kind: Kind, hot: _Numbers) -> None:
        """Drop a reference of hot numbers."""
        with self._lock:
            self.space.allocator(kind).release(number_extents(hot[hot >= 0]))

    def hold(self, kind: Kind, hot: _Numbers) -> None:
        """Add a reference to hot numbers. The lock is held."""
        self.space.allocator(kind).hold(number_extents(hot[hot >= 0]))

    def _may_grow(self, kind: Kind) -> bool:
        return time.monotonic() >= self._refused_until and self.space.may_grow(kind)

    def _make_way(self, kind: Kind) -> bool:
        """Give back a segment of the other kind, where that lets this one have its first."""
        space = self.space
        if space.allocated_bytes + space.segment_bytes(kind) <= space.capacity:
            return False
        return self._drain_segment(_other(kind))

    def _grow(self, kind: Kind) -> None:
        try:
            segment = self.space.grow(kind, self._lock)
        except MmkvError as error:
            _log.info("the hot tier grows no further for now: %s", error)
            self._refused_until = time.monotonic() + _REFUSED_SECONDS
            return
        if segment is not None:
            self._grown(self.space.files(kind), segment)

    def keep_spare(self, least_segments: int) -> None:
        """Allocate a segment of blocks ahead of need, where fewer than `least_segments` are free."""
        with self._lock:
            blocks = self.space.blocks
            enough = not blocks.used or blocks.free >= least_segments * blocks.segment_length
            if enough or not self._may_grow("blocks"):
                return
        self._grow("blocks")

    def _evict_for(self, kind: Kind, count: int, own: _Numbers) -> None:
        mine = int(np.count_nonzero(self.residents[kind].places(own) >= 0))
        most = max(0, max(1, self.space.allocator(kind).total // _LARGEST_SHARE) - mine)
        use, position = self._recency(kind)
        candidates = self.residents[kind].evictable()
        candidates = candidates[(use[candidates] < _PINNED) & ~np.isin(candidates, own)]
        # Of one conversation the end goes first: its start is what others may share.
        candidates = candidates[np.lexsort((-position[candidates], use[candidates]))]
        # A place is free when the last that it stands for goes.
        _, last = np.unique(self.residents[kind].places(candidates)[::-1], return_index=True)
        frees = np.sort(len(candidates) - 1 - last)[: min(count, most)]
        self._evict(kind, candidates[: frees[-1] + 1 if len(frees) else 0])

    def _evict(self, kind: Kind, numbers: _Numbers) -> None:
        if not len(numbers):
            return
        # On record before anything is written over them.
        self._catalog.change_residents(gone=[(kind, number) for number in numbers.tolist()])
        self.residents[kind].forget(numbers)
        self._doubt(kind, numbers)
        # Where they are overwritten first, they are not free before.
        self.space.settle()
        self.counters["hot_evictions"] += len(numbers)

    def _recency(self, kind: Kind) -> tuple[_Numbers, _Numbers]:
        """When each number of the path was used last, and how far from its conversation's start it lies."""
        length = len(self._path.allocator(kind).counts)
        use, position = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        pinned_last = sorted(self._ledger.least_recently_used(), key=lambda conversation: conversation.pinned)
        for conversation in pinned_last:
            for version in conversation.linked_versions():
                place = 0
                for first, count in version.extents if kind == "blocks" else version.records:
                    use[first : first + count] = _PINNED if conversation.pinned else conversation.used
                    position[first : first + count] = np.arange(place, place + count)
                    place += count
        return use, position

    def wipe_freed(self) -> None:
        """Where what is dropped is to be overwritten, do that: else nothing waits for it."""
        with self._lock:
            self.space.settle()

    def relieve(self) -> None:
        """Give back a segment where RAM is short: one that is free, or becomes so by what the path has."""
        with self._lock:
            if available_ram() >= self.space.min_free_ram:
                return
            for kind in KINDS:
                if self._drain_segment(kind):
                    return

    def _drain_segment(self, kind: Kind, *, even_pinned: bool = False) -> bool:
        """Evict the residents of the segment that was used the longest ago, and give it back."""
        # What waits to be overwritten is held by nobody, and is not free.
        self.space.settle()
        allocator = self.space.allocator(kind)
        length = allocator.segment_length
        numbers = self.residents[kind].evictable()
        places = self.residents[kind].places(numbers)
        use, _ = self._recency(kind)
        best: tuple[int, int] | None = None
        for segment in allocator.segments:
            here = places // length == segment
            held = int(np.count_nonzero(allocator.counts[segment * length : (segment + 1) * length]))
            if held == len(np.unique(places[here])):
                last = int(use[numbers[here]].max(initial=-1))
                if (last < _PINNED or even_pinned) and (best is None or last < best[0]):
                    best = (last, segment)
        if best is None:
            return False
        self._evict(kind, numbers[places // length == best[1]])
        for file in self.space.files(kind):
            self._forget(file, best[1])
        self.space.give_back(kind, best[1])
        return True

    def give_back_one(self, *, even_pinned: bool = False) -> bool:
        """Give back a segment of either kind that the path has. Whether there was one."""
        with self._lock:
            return any(self._drain_segment(kind, even_pinned=even_pinned) for kind in KINDS)

    @property
    def is_full(self) -> bool:
        """Whether no block is free and none can be added."""
        with self._lock:
            return self.space.blocks.free == 0 and not self._may_grow("blocks")

    def has(self, extents: Sequence[Extent], tokens: int) -> bool:
        """Whether the blocks of the first `tokens` tokens of a version are all here. The lock is held."""
        numbers = block_numbers(extents)[: self._path.geometry.blocks_for(tokens)]
        return bool((self.residents["blocks"].places(numbers) >= 0).all())

    @property
    def dirty_bytes(self) -> int:
        """Bytes that the path lacks. The lock is held."""
        return sum(self.residents[kind].dirty_count * self.space.number_bytes(kind) for kind in KINDS)

    # Coming

    def read(self, what: str, numbers: dict[Kind, _Numbers], *, promote: bool) -> Reading:
        """Find numbers of a leased version for a take, hold them, and begin to bring what is only at the path.

        Parameters
        ----------
        what : str
            What is taken, for errors.
        numbers : dict
            By kind, the numbers of the path.
        promote : bool
            Whether to bring what is not here, as far as there is room.
        """
        held: dict[Kind, _Numbers] = {}
        with self._lock:
            self._join(numbers)
            for kind in KINDS:
                held[kind] = self._places(kind, numbers[kind])
                self.hold(kind, held[kind])
        try:
            reserved = self._reserve_cold(numbers, held, evict=True) if promote else dict.fromkeys(KINDS, _NONE)
            with self._lock:
                joined = self._join(numbers)
                places = {kind: self._places(kind, numbers[kind]) for kind in KINDS}
                reading = Reading(places, joined)
                # Not what was held so far: others may have brought some meanwhile, or have failed to.
                for kind in KINDS:
                    self.hold(kind, places[kind])
                pairs = self._pair(numbers, places, reserved)
                fill = self._begin_promotion(what, pairs, reading) if any(map(len, pairs.values())) else None
        finally:
            for kind in KINDS:
                self.release(kind, held[kind])
        if fill is not None:
            self.store.read(self.between.copies(pairs), fill)
        return reading

    def _join(self, numbers: dict[Kind, _Numbers]) -> list[Fill]:
        """The fills that bring some of these numbers, and do so to the end from here on."""
        fills = []
        for fill, coming in self._fills.items():
            if any(np.isin(coming[kind].numbers, numbers[kind]).any() for kind in KINDS):
                if fill.hurry():
                    fills.append(fill)
                else:
                    self._forget_coming(coming)
        return fills

    def _begin_promotion(self, what: str, pairs: dict[Kind, Pairs], reading: Reading) -> Fill:
        try:
            transfer = self._promotion(f"bringing {what} from the path", self.between.bytes(pairs))
        except BaseException:
            for kind in KINDS:
                self.release(kind, pairs[kind].hot)
            self.end_reading(reading)
            raise
        fill = self._enter_fill(pairs, transfer, urgent=True)
        for kind, places in reading.places.items():
            places[np.flatnonzero(places < 0)[: len(pairs[kind])]] = pairs[kind].hot
            self.hold(kind, pairs[kind].hot)
        reading.fills.append(fill)
        return fill

    def end_reading(self, reading: Reading) -> None:
        """Let go of what `read` held."""
        for kind, places in reading.places.items():
            self.release(kind, places)

    def prefetch(self, numbers: dict[Kind, _Numbers], transfer: Transfer, *, evict: bool) -> bool:
        """Begin to bring a leased version's numbers ahead of need; `transfer` hears of it. Whether any will come.

        The lock must not be held: the tier may grow.
        """
        with self._lock:
            places = {kind: self._places(kind, numbers[kind]) for kind in KINDS}
        reserved = self._reserve_cold(numbers, places, evict=evict)
        with self._lock:
            places = {kind: self._places(kind, numbers[kind]) for kind in KINDS}
            pairs = self._pair(numbers, places, reserved)
            if not any(map(len, pairs.values())):
                return False
            self.counters["prefetches"] += 1
            fill = self._enter_fill(pairs, transfer, urgent=False)
        self.store.read(self.between.copies(pairs), fill, (), fill.yielding_gate(self._others_hurry))
        return True

    def _others_hurry(self) -> bool:
        with self._lock:
            return any(fill.urgent for fill in self._fills)

    def _places(self, kind: Kind, numbers: _Numbers) -> _Numbers:
        """Where numbers are in the hot tier or will be, -1 for neither."""
        places = self.residents[kind].places(numbers)
        coming = self._coming[kind]
        if coming:
            for index in np.flatnonzero(places < 0).tolist():
                places[index] = coming.get(int(numbers[index]), -1)
        return places

    def _reserve_cold(
        self, numbers: dict[Kind, _Numbers], places: dict[Kind, _Numbers], *, evict: bool
    ) -> dict[Kind, _Numbers]:
        """Take hot numbers for those that have no place, as far as there is room. The lock is not held."""
        reserved: dict[Kind, _Numbers] = {}
        try:
            for kind in KINDS:
                resident = places[kind][places[kind] >= 0]
                behind = [Extent(int(resident[-1]), 1)] if len(resident) else []
                cold = len(places[kind]) - len(resident)
                reserved[kind] = self.reserve(kind, cold, behind, numbers[kind], evict=evict)
        except BaseException:
            for kind, hot in reserved.items():
                self.release(kind, hot)
            raise
        return reserved

    def _pair(
        self, numbers: dict[Kind, _Numbers], places: dict[Kind, _Numbers], reserved: dict[Kind, _Numbers]
    ) -> dict[Kind, Pairs]:
        """Those without a place and the hot ones reserved for them, as many as there are of both; others are released.

        The lock is held.
        """
        pairs: dict[Kind, Pairs] = {}
        for kind in KINDS:
            cold = numbers[kind][places[kind] < 0]
            count = min(len(cold), len(reserved[kind]))
            self.release(kind, reserved[kind][count:])
            pairs[kind] = Pairs(cold[:count], reserved[kind][:count])
        return pairs

    def _enter_fill(self, pairs: dict[Kind, Pairs], transfer: Transfer, *, urgent: bool) -> Fill:
        layers = len(self._path.geometry.layout.layers)
        fill = Fill(transfer, layers, finish=self._arrive, release=self._leave, urgent=urgent)
        for kind in KINDS:
            # Else a drop could hand the numbers to others while they are read.
            self._path.allocator(kind).hold(number_extents(pairs[kind].numbers))
            self._coming[kind].update(zip(pairs[kind].numbers.tolist(), pairs[kind].hot.tolist(), strict=True))
        self._fills[fill] = pairs
        return fill

    def _arrive(self, fill: Fill) -> None:
        with self._lock:
            pairs = self._fills[fill]
            self._catalog.change_residents(
                arrived=[
                    Resident(kind, number, hot, False)
                    for kind in KINDS
                    for number, hot in zip(pairs[kind].numbers.tolist(), pairs[kind].hot.tolist(), strict=True)
                ]
            )
            for kind in KINDS:
                # The reservation's reference becomes the resident's; `_leave` drops one of its own.
                self.hold(kind, pairs[kind].hot)
                self.residents[kind].admit(pairs[kind].numbers, pairs[kind].hot, dirty=False)
                self._doubt(kind, pairs[kind].numbers)
            self.counters["promotions"] += 1
            self.counters["bytes_promoted"] += fill.bytes

    def _leave(self, fill: Fill) -> None:
        with self._lock:
            pairs = self._fills.pop(fill)
            self._forget_coming(pairs)
            for kind in KINDS:
                self.release(kind, pairs[kind].hot)
                self._path.allocator(kind).release(number_extents(pairs[kind].numbers))

    def _forget_coming(self, pairs: Mapping[Kind, Pairs]) -> None:
        """Of a fill that ended or will not arrive; others may bring the same numbers to other places meanwhile."""
        for kind in KINDS:
            coming = self._coming[kind]
            for number, hot in zip(pairs[kind].numbers.tolist(), pairs[kind].hot.tolist(), strict=True):
                if coming.get(number) == hot:
                    del coming[number]

    def close(self) -> None:
        """Stop the threads and unmap the files. No transfer and no fill is under way."""
        self.store.close()
        self.between.close()


def _other(kind: Kind) -> Kind:
    return "checkpoints" if kind == "blocks" else "blocks"
