"""One park: what it keeps, the space it takes, and the commit that makes it visible."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from mmkv.blocks import merge_extents
from mmkv.catalog import Catalog, Checkpoint, VersionRow
from mmkv.delta import Delta, keep_checkpoints, own_delta, with_shared
from mmkv.errors import TransferCancelled
from mmkv.geometry import Extent
from mmkv.ledger import Conversation, Ledger, Version
from mmkv.match import longest_prefix
from mmkv.prefix import chain_hashes
from mmkv.room import Room
from mmkv.sizes import round_up
from mmkv.space import Reservation, Space

__all__ = ["Park"]

_NONE = Reservation((), ())


class Park:
    """A version that is being parked: its blocks are held from here on until it is committed or released.

    Parameters
    ----------
    lock, catalog, space, ledger, room
        The pool's parts.
    boot : str
        This boot's id, which a version carries until it is on the medium.
    older : int
        How many older checkpoints to keep.
    name, namespace, ids, share, durable, boundary
        As of `Pool.park`.

    Raises
    ------
    PoolFull
        There is no room.
    ValueError
        The conversation belongs to another namespace.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        space: Space,
        ledger: Ledger,
        room: Room,
        *,
        boot: str,
        older: int,
        name: str,
        namespace: str,
        ids: npt.NDArray[np.int64],
        share: bool,
        durable: bool,
        boundary: bool,
    ) -> None:
        self._lock, self._catalog, self._space, self._ledger = lock, catalog, space, ledger
        self._boot = boot
        self._name = name
        self._namespace = namespace
        self._durable = durable
        self._revoked = False
        self._committed = False
        self._ids = ids
        self.tokens = len(ids)
        self.stop = round_up(len(ids), space.geometry.layout.granule)
        geometry = space.geometry
        with lock:
            space.require_whole()
            former = self._former()
            self.delta, common = self._difference(former, ids, share=share)
            checkpoints = former.version.row.checkpoints if former else ()
            kept = [point for point in checkpoints if point.tokens <= common]
            self._kept = Reservation(self.delta.kept, tuple(Extent(point.record, 1) for point in kept))
            space.blocks.hold(self._kept.extents)
            space.records.hold(self._kept.records)
        self._new = _NONE
        try:
            new_record = geometry.layout.state_bytes > 0 and self.tokens not in {point.tokens for point in kept}
            blocks = self.delta.new_blocks(geometry.blocks_for(self.tokens))
            # On a disk the next version replaces a last block that is not full.
            replaced = self.tokens % geometry.block_tokens > 0 and not space.medium.in_ram
            self._new = room.reserve(f"{name!r}", blocks, int(new_record), self.delta.kept, tail_apart=replaced)
            self.extents = merge_extents((*self.delta.kept, *self._new.extents))
            self.record = self._new.records[0].first if new_record else None
            self.checkpoints = _checkpoints(kept, common, self.tokens, self.record, older, boundary=boundary)
        except BaseException:
            self.release()
            raise

    def _former(self) -> Conversation | None:
        former = self._ledger.conversations.get(self._name)
        if former is not None and former.namespace != self._namespace:
            raise ValueError(
                f"conversation {self._name!r} is parked in namespace {former.namespace!r}, not {self._namespace!r}: "
                "use another id, or drop it first"
            )
        return former

    def _difference(self, former: Conversation | None, ids: npt.NDArray[np.int64], *, share: bool) -> tuple[Delta, int]:
        """What is kept, and how many leading tokens the former version has in common."""
        block_tokens = self._space.geometry.block_tokens
        own, common = Delta((), 0), 0
        known = None
        if former is not None:
            version = former.version
            common = self._space.common_prefix(version.extents, version.tokens, ids)
            known = version.row.hashes[: common // block_tokens]
            own = own_delta(
                version.extents, version.tokens, common, len(ids), block_tokens, append=self._may_append(former)
            )
        self._hashes = chain_hashes(ids, self._namespace, block_tokens, known)
        if not share:
            return own, common
        # Only whole blocks are shared: less than one more than there is already is of no use.
        least = (own.start // block_tokens + 1) * block_tokens - 1
        other, shared = longest_prefix(
            self._ledger,
            self._space,
            ids,
            self._namespace,
            hashes=self._hashes,
            other_than=self._name,
            least=least,
        )
        return own if other is None else with_shared(own, other.version.extents, shared, block_tokens), common

    def _may_append(self, former: Conversation) -> bool:
        """Whether rows may go behind the former version's last one, in a block that nobody else sees.

        Never behind a part of an opaque page, whose bytes it would change. On a disk never: a direct write would
        rewrite a page of the former version.
        """
        version = former.version
        if version.tokens % self._space.geometry.layout.granule:
            return False
        last = version.extents[-1].first + version.extents[-1].blocks - 1
        return (
            self._space.medium.in_ram
            and version.leases == 0
            and former.fallback is None
            and int(self._space.blocks.counts[last]) == 1
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that the park holds until it ends."""
        return sum(count for _, count in self.extents) * self._space.geometry.block_bytes

    @property
    def newest_record(self) -> int | None:
        """The record of the states at the version's end, where the layout has states."""
        return next((point.record for point in self.checkpoints if point.tokens == self.tokens), None)

    def write_ids(self) -> None:
        """Write the ids of the new rows; before the commit, beside the rows themselves."""
        self._space.write_ids(self.extents, self.delta.start, self._ids)

    def revoke(self) -> None:
        """Never commit: the conversation was dropped meanwhile. The pool's lock is held."""
        self._revoked = True

    def commit(self) -> None:
        """Make the version visible, in one transaction; all its bytes are down.

        Raises
        ------
        TransferCancelled
            The conversation was dropped meanwhile.
        PoolCorrupt
            A file was truncated or deleted meanwhile.
        """
        if self._durable:
            self._space.sync()
        self._space.require_whole()
        with self._lock:
            if self._revoked:
                raise TransferCancelled(f"{self._name!r} was dropped while it was being parked")
            former = self._former()
            fallback = None if self._durable or self._space.medium.in_ram else _last_synced(former)
            row = VersionRow(
                0, self.tokens, time.time(), self._boot, self._durable, self._hashes, self.extents, self.checkpoints
            )
            used = self._ledger.next_use()
            row = self._catalog.put_version(
                self._name,
                self._namespace,
                row,
                used,
                keep_fallback=fallback.row.id if fallback else None,
                synced=self._durable,
            )
            self._ledger.commit(self._name, self._namespace, row, used, fallback)
            self._committed = True
            # The version holds its checkpoints now; those that were kept this far but are of no more use go.
            listed = {point.record for point in self.checkpoints}
            self._space.records.release(
                [run for run in (*self._kept.records, *self._new.records) if run.first not in listed]
            )

    def release(self) -> None:
        """Let go of the blocks and records, unless they were committed. The pool's lock need not be held."""
        with self._lock:
            if not self._committed:
                self._space.release(self._kept)
                self._space.release(self._new)


def _last_synced(former: Conversation | None) -> Version | None:
    if former is None:
        return None
    return former.version if former.version.row.synced else former.fallback


def _checkpoints(
    kept: list[Checkpoint], common: int, tokens: int, record: int | None, older: int, *, boundary: bool
) -> tuple[Checkpoint, ...]:
    newest = next((point for point in kept if point.tokens == tokens), None)
    if record is None and newest is None:
        return ()
    if newest is None:
        assert record is not None
        newest = Checkpoint(tokens, record, boundary)
    return keep_checkpoints(kept, common, newest._replace(boundary=newest.boundary or boundary), older)
