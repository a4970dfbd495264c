"""Making room: reserving blocks, growing within the capacity, dropping the least recently used."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence

import numpy as np

from mmkv.catalog import Catalog
from mmkv.errors import MmkvError, PoolFull
from mmkv.eviction import Counts, choose_victims
from mmkv.geometry import Extent
from mmkv.ledger import Conversation, Ledger
from mmkv.space import KINDS, Kind, Reservation, Space
from mmkv.store.files import PoolFile

__all__ = ["Room"]

_SPARE_PART = 4
# A file system that refused a segment is not asked again for so long.
_REFUSED_SECONDS = 5.0
_WIPED_BYTES = 32 << 20
_log = logging.getLogger("mmkv")


class Room:
    """Who gets the space of a pool.

    Parameters
    ----------
    lock : RLock
        The pool's lock.
    catalog, space, ledger
        The pool's parts.
    busy : container of str
        The conversations that are being parked, which stay.
    forget : callable
        Called with a file and a segment that is about to be given back.
    grown : callable
        Called with the files and the segment that was allocated in them.
    bring : callable
        Brings the newest versions of conversations to the medium; the lock is not held.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        space: Space,
        ledger: Ledger,
        busy: Container[str],
        *,
        forget: Callable[[PoolFile, int], None],
        grown: Callable[[list[PoolFile], int], None],
        bring: Callable[[list[Conversation]], None],
    ) -> None:
        self._lock = lock
        self._catalog = catalog
        self._space = space
        self._ledger = ledger
        self._busy = busy
        self._forget = forget
        self._grown = grown
        self._bring = bring
        self.evictions = 0
        # The file system had no room for a segment: what it tries in vain may take it seconds.
        self._refused_until = 0.0
        self._spare_refused = False

    def reserve(
        self, what: str, blocks: int, records: int, behind: Sequence[Extent], *, tail_apart: bool
    ) -> Reservation:
        """Take blocks and records, with as little growth and as few evictions as will do.

        `behind` and `tail_apart` say where the blocks should lie; see `BlockAllocator.allocate`.

        Raises
        ------
        PoolFull
            There is no room and none can be made; nothing was dropped for it.
        """
        self._require_possible(what, blocks, records)
        refused: MmkvError | None = None
        while True:
            # What is made free is taken under the same lock: another park that came between would cost more evictions.
            with self._lock:
                waiting: list[Conversation] = []
                while (reservation := self._space.try_reserve(blocks, records, behind, tail_apart=tail_apart)) is None:
                    if self._settle():
                        continue
                    kind = self._space.lacking(blocks, records)
                    assert kind is not None
                    # Whether the file system is counted on for more; where nothing can be dropped, it is asked again.
                    counts = refused is None and time.monotonic() >= self._refused_until
                    if counts and self._space.may_grow(kind):
                        break
                    if self._give_back_other(kind, blocks, records):
                        continue
                    waiting = self.with_fallback()
                    if waiting:
                        break
                    if self._evict(blocks, records, grown=counts):
                        continue
                    if refused is None and self._space.may_grow(kind):
                        break
                    raise self._full(what, blocks, records, refused)
                else:
                    return reservation
            if waiting:
                # What they fall back to becomes free, at the price of a sync, and of no conversation.
                self._bring(waiting)
                continue
            try:
                segment = self._space.grow(kind, self._lock)
            except PoolFull as error:
                # There is less room than the capacity says: what is allocated has to do, for a while.
                refused = error
                self._refused_until = time.monotonic() + _REFUSED_SECONDS
                continue
            self._spare_refused = False
            if segment is not None:
                self._grown(self._space.files(kind), segment)

    def keep_spare(self, least_segments: int) -> None:
        """Allocate a segment ahead of need, so that no park waits for one and what grows finds room behind it.

        A quarter as many free blocks as there are in use, and `least_segments`, are enough; the first has left a tenth
        of the extents in simulations of pools that are not nearly full.
        """
        with self._lock:
            blocks = self._space.blocks
            if blocks.unsettled > blocks.free:
                # What waits parts the free runs.
                self._settle()
            enough = max(least_segments * blocks.segment_length, blocks.used // _SPARE_PART)
            if not blocks.used or blocks.free >= enough or self._spare_refused or not self._space.may_grow("blocks"):
                return
        try:
            segment = self._space.grow("blocks", self._lock)
        except MmkvError as error:
            _log.info("no segment ahead of need, until one is needed: %s", error)
            self._spare_refused = True
            return
        if segment is not None:
            self._grown(self._space.files("blocks"), segment)

    def _require_possible(self, what: str, blocks: int, records: int) -> None:
        space, geometry = self._space, self._space.geometry
        segments = -(-blocks // space.blocks.segment_length)
        state_segments = -(-records // space.records.segment_length)
        if segments * geometry.segment_bytes + state_segments * geometry.state_segment_bytes > space.capacity:
            raise space.full(what, blocks, records)

    def _settle(self, most_bytes: int | None = None) -> bool:
        """Make freed numbers allocatable, once what freed them is on the medium. Whether there were any."""
        if not self._space.unsettled:
            return False
        self._catalog.sync()
        self._space.settle(most_bytes)
        return True

    def wipe_some(self) -> None:
        """Where what is dropped is to be overwritten, do some of that; a part at a time, for the lock is held."""
        unsettled = self._space.wipes
        while unsettled:
            with self._lock:
                unsettled = self._settle(_WIPED_BYTES)

    def _give_back_other(self, kind: Kind, blocks: int, records: int) -> bool:
        """Give back a drained segment of the other kind, if what is asked for does not need it."""
        other: Kind = "checkpoints" if kind == "blocks" else "blocks"
        needed = records if kind == "blocks" else blocks
        allocator = self._space.allocator(other)
        if len(allocator.segments) == 1 or allocator.free - allocator.segment_length < needed:
            return False
        drained = allocator.drained_segments()
        if drained:
            self._give_back(other, drained[0])
        return bool(drained)

    def _give_back(self, kind: Kind, segment: int) -> None:
        for file in self._space.files(kind):
            self._forget(file, segment)
        self._space.give_back(kind, segment)

    def _evictable(self) -> list[Conversation]:
        return [
            conversation
            for conversation in self._ledger.least_recently_used()
            if not conversation.pinned and conversation.version.leases == 0 and conversation.name not in self._busy
        ]

    def _evict(self, blocks: int, records: int, *, grown: bool) -> bool:
        """Drop what makes room for a request, after growth if there may be any. Whether anything could be dropped."""
        room_to_grow = self._space.room_to_grow if grown else 0
        victims = choose_victims(
            self._ledger,
            self._evictable(),
            lambda *counts: self._would_fit(dict(zip(KINDS, counts, strict=True)), blocks, records, room_to_grow),
        )
        self._drop(victims or [])
        return bool(victims)

    def _full(self, what: str, blocks: int, records: int, refused: MmkvError | None) -> PoolFull:
        if refused is None:
            return self._space.full(what, blocks, records)
        error = PoolFull(f"no room for {what}, and nothing can be dropped for it: {refused}")
        error.__cause__ = refused
        return error

    def _would_fit(self, counts: dict[Kind, Counts], blocks: int, records: int, room_to_grow: int) -> bool:
        """Whether a request would fit with these references, after growth by `room_to_grow` bytes at most.

        Drained segments of one kind that the request leaves over make room for the other kind.
        """
        grown = spare = 0
        for kind, needed in zip(KINDS, (blocks, records), strict=True):
            allocator, length = self._space.allocator(kind), self._space.allocator(kind).segment_length
            free = allocator.total - int(np.count_nonzero(counts[kind]))
            if free < needed:
                grown += -(-(needed - free) // length) * self._space.segment_bytes(kind)
            elif free - needed >= length:
                drained = sum(1 for s in allocator.segments if not counts[kind][s * length : (s + 1) * length].any())
                given_back = min(drained, (free - needed) // length, len(allocator.segments) - 1)
                spare += given_back * self._space.segment_bytes(kind)
        return grown == 0 or grown <= room_to_grow + spare

    def _drop(self, victims: list[Conversation]) -> None:
        if not victims:
            return
        self._catalog.drop([victim.name for victim in victims])
        for victim in victims:
            self._ledger.drop(victim.name)
        self.evictions += len(victims)

    def with_fallback(self) -> list[Conversation]:
        """The conversations that keep an older version until the newest one is on the medium. The lock is held."""
        return [c for c in self._ledger.conversations.values() if c.fallback is not None]

    def shrink(self, capacity: int) -> None:
        """Bring the files down to `capacity` bytes: give back drained segments, and drop what stands in the way.

        Raises
        ------
        PoolFull
            What is pinned, leased or being parked needs more; nothing was dropped.
        """
        self._settle()
        candidates = self._evictable()
        if self._bytes_in_use_without(candidates) > capacity:
            raise PoolFull(
                f"a capacity of {capacity} bytes is less than what is pinned, leased or being parked needs: "
                "unpin, close matches, or wait for the parks"
            )
        victims: list[Conversation] = []
        while self._bytes_in_use_without(victims) > capacity:
            victims.append(candidates.pop(0))
        for victim in reversed(victims.copy()):
            others = [other for other in victims if other is not victim]
            if self._bytes_in_use_without(others) <= capacity:
                victims = others
        self._drop(victims)
        self._settle()
        for kind in KINDS:
            for segment in self._space.allocator(kind).drained_segments():
                if self._space.allocated_bytes > capacity:
                    self._give_back(kind, segment)

    def _bytes_in_use_without(self, dropped: list[Conversation]) -> int:
        """Bytes of the segments that would hold anything if `dropped` were gone."""
        geometry = self._space.geometry
        total = 0
        for kind, size in zip(KINDS, (geometry.segment_bytes, geometry.state_segment_bytes), strict=True):
            allocator = self._space.allocator(kind)
            counts = allocator.counts.copy()
            for version in (version for conversation in dropped for version in conversation.linked_versions()):
                for first, count in version.extents if kind == "blocks" else version.records:
                    counts[first : first + count] -= 1
            length = allocator.segment_length
            total += size * sum(1 for segment in allocator.segments if counts[segment * length :][:length].any())
        return total
