"""One park: what it keeps, the space it takes, and the commit that makes it visible."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.between import Pairs
from mmkv.blocks import block_numbers, merge_extents
from mmkv.catalog import Catalog, Resident
from mmkv.checks import Checks, ParkSums
from mmkv.delta import Delta, keep_checkpoints, own_delta, with_shared
from mmkv.errors import TransferCancelled
from mmkv.geometry import Extent
from mmkv.hot import Hot
from mmkv.ledger import Conversation, Ledger, Version
from mmkv.match import longest_prefix
from mmkv.placement import Placement, place
from mmkv.prefix import chain_hashes
from mmkv.room import Room
from mmkv.rows import Checkpoint, VersionRow
from mmkv.sizes import round_up
from mmkv.space import Kind, Reservation, Space
from mmkv.uninterrupted import uninterrupted
from mmkv.unit_table import UnitRows, put_units
from mmkv.writer import Writer

__all__ = ["Park"]

_NONE = Reservation((), ())
_Numbers: TypeAlias = npt.NDArray[np.int64]
_NO_NUMBERS: _Numbers = np.zeros(0, dtype=np.int64)


class Park:
    """A version that is being parked: its blocks are held from here on until it is committed or released.

    Parameters
    ----------
    lock, catalog, space, ledger, room, hot, writer, checks
        The pool's parts.
    boot : str
        This boot's id, which a version carries until it is on the medium.
    older : int
        How many older checkpoints to keep.
    name, namespace, ids, share, durable, boundary
        As of `Pool.park`.

    Attributes
    ----------
    sums : ParkSums or None
        What takes the checksums of what is written; who moves the bytes sets it.

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
        hot: Hot | None,
        writer: Writer,
        checks: Checks,
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
        self._hot, self._writer, self._checks = hot, writer, checks
        self.sums: ParkSums | None = None
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
            self._require_whole()
            former = self._former()
            self.delta, common = self._difference(former, ids, share=share)
            checkpoints = former.version.row.checkpoints if former else ()
            kept = ledger.quarantine.sound_points(point for point in checkpoints if point.tokens <= common)
            self._kept = Reservation(self.delta.kept, tuple(Extent(point.record, 1) for point in kept))
            space.blocks.hold(self._kept.extents)
            space.records.hold(self._kept.records)
            self._ids_start = self.delta.start
            appended = self._appended(former, common)
            # Whose checksums those of the first block go on from, if rows are appended to it.
            self._continued = -1 if former is None else _last_block(former.version.extents)
            self._kept_hot = {} if hot is None else self._hold_kept(hot)
        self._new = _NONE
        # The hot numbers of the new blocks, of the new record, and of all blocks; -1 where the path is written instead.
        self._new_hot = self._new_hot_record = _NO_NUMBERS
        self._hot_blocks: _Numbers | None = None
        try:
            new_record = geometry.layout.state_bytes > 0 and self.tokens not in {point.tokens for point in kept}
            blocks = self.delta.new_blocks(geometry.blocks_for(self.tokens))
            # On a disk the next version replaces a last block that is not full.
            replaced = self.tokens % geometry.block_tokens > 0 and not self._appends_at_path
            self._new = room.reserve(f"{name!r}", blocks, int(new_record), self.delta.kept, tail_apart=replaced)
            self.extents = merge_extents((*self.delta.kept, *self._new.extents))
            self.record = self._new.records[0].first if new_record else None
            self.checkpoints = _checkpoints(kept, common, self.tokens, self.record, older, boundary=boundary)
            if hot is not None:
                self._reserve_hot(hot, appended)
        except BaseException:
            self._drop_append(appended)
            self.release()
            raise

    @property
    def _appends_at_path(self) -> bool:
        # What another tier may lag behind must stay as it is until that caught up.
        return self._space.medium.in_ram and self._hot is None

    def _appended(self, former: Conversation | None, common: int) -> int:
        """The hot number of the former version's last block, if rows may go behind the last one there; else -1.

        The park then holds it, and writes from the first new row on: the hot number stands for the new block, too.
        """
        hot, bt = self._hot, self._space.geometry.block_tokens
        if hot is None or former is None or not self._may_append(former):
            return -1
        version = former.version
        if common != version.tokens or common >= self.tokens or self.delta.start != common // bt * bt:
            return -1
        last = np.array([_last_block(version.extents)], dtype=np.int64)
        place = hot.residents["blocks"].places(last)
        if self.delta.start == common or place[0] < 0 or hot.space.blocks.counts[place[0]] != 1:
            return -1
        hot.hold("blocks", place)
        self.delta = replace(self.delta, start=common)
        return int(place[0])

    def _drop_append(self, appended: int) -> None:
        if self._hot is not None and appended >= 0 and not len(self._new_hot):
            self._hot.release("blocks", np.array([appended], dtype=np.int64))

    def _reserve_hot(self, hot: Hot, appended: int) -> None:
        """Find the new blocks and the new record places in the hot tier; what finds none goes to the path."""
        new, kept = block_numbers(self._new.extents), self._kept_hot["blocks"]
        given = [appended] if appended >= 0 else []
        behind = [Extent(number, 1) for number in (given or kept[kept >= 0][-1:].tolist())]
        own = block_numbers(self._kept.extents)
        reserved = hot.reserve("blocks", len(new) - len(given), behind, own)
        self._new_hot = np.full(len(new), -1, dtype=np.int64)
        self._new_hot[: len(given)] = given
        self._new_hot[len(given) : len(given) + len(reserved)] = reserved
        self._hot_blocks = np.concatenate([kept, self._new_hot])
        self._new_hot_record = np.full(len(self._new.records), -1, dtype=np.int64)
        if len(self._new.records):
            own = block_numbers(self._kept.records)
            reserved = hot.reserve("checkpoints", 1, (), own)
            self._new_hot_record[: len(reserved)] = reserved

    def _hold_kept(self, hot: Hot) -> dict[Kind, _Numbers]:
        """Where what is kept lies in the hot tier; it stays there until the park ended."""
        kept: dict[Kind, _Numbers] = {}
        runs: dict[Kind, tuple[Extent, ...]] = {"blocks": self._kept.extents, "checkpoints": self._kept.records}
        for kind, extents in runs.items():
            kept[kind] = hot.residents[kind].places(block_numbers(extents))
            hot.hold(kind, kept[kind])
        return kept

    def placements(self) -> list[Placement]:
        """Where the new rows and the new states go."""
        bt = self._space.geometry.block_tokens
        start, stop = self.delta.start, self.stop
        touched = slice(start // bt, -(-stop // bt) if stop > start else start // bt)
        return place(
            self._space,
            None if self._hot is None else self._hot.space,
            self.extents,
            start,
            stop,
            self.record,
            hot_blocks=None if self._hot_blocks is None else self._hot_blocks[touched],
            hot_record=int(self._new_hot_record[0]) if len(self._new_hot_record) else -1,
        )

    def all_placements(self) -> list[Placement]:
        """Where all rows of the version lie, and its states: what was kept of it is held."""
        record, hot_record = self.newest_record, -1
        if self._hot is not None and record is not None:
            if len(self._new_hot_record):
                hot_record = int(self._new_hot_record[0])
            else:
                kept = block_numbers(self._kept.records)
                hot_record = int(self._kept_hot["checkpoints"][kept == record][0])
        return place(
            self._space,
            None if self._hot is None else self._hot.space,
            self.extents,
            0,
            self.stop,
            record,
            hot_blocks=self._hot_blocks,
            hot_record=hot_record,
        )

    def _require_whole(self) -> None:
        self._catalog.require_there()
        self._space.require_whole()
        if self._hot is not None:
            self._hot.space.require_whole()

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
            # What comes behind a bad block is written anew.
            sound = self._ledger.quarantine.sound_tokens(version.extents, version.tokens, block_tokens)
            common = self._space.common_prefix(version.extents, sound, ids)
            known = version.row.hashes[: common // block_tokens]
            granule = self._space.geometry.layout.granule
            own = own_delta(
                version.extents,
                version.tokens,
                # A part of an opaque page is another page: it is kept only with the version that ends in it.
                common if common == len(ids) == version.tokens else common // granule * granule,
                len(ids),
                block_tokens,
                append=self._appends_at_path and self._may_append(former),
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
        """Whether rows may go behind the former version's last one, in a block that nobody else sees, in RAM.

        Never behind a part of an opaque page, whose bytes it would change. On a disk never: a direct write would
        rewrite a page of the former version.
        """
        version = former.version
        if version.tokens % self._space.geometry.layout.granule:
            return False
        last, block_tokens = _last_block(version.extents), self._space.geometry.block_tokens
        return (
            version.leases == 0
            and (former.fallback is None or self._hot is not None)
            and int(self._space.blocks.counts[last]) == 1
            # Checksums go on from where they end, which is behind this version's last row if it was cut.
            and self._checks.may_continue(last, version.tokens - (version.tokens - 1) // block_tokens * block_tokens)
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
        self._space.write_ids(self.extents, self._ids_start, self._ids)

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
        new = self._new_pairs()
        if self._durable:
            if self._hot is not None:
                self._writer.write_pairs(new)
                self._writer.write_numbers(
                    {"blocks": block_numbers(self._kept.extents), "checkpoints": block_numbers(self._kept.records)}
                )
            self._space.sync()
        self._require_whole()
        uninterrupted(partial(self._commit, new))
        if self._hot is not None:
            self._writer.notify()

    def _commit(self, new: dict[Kind, Pairs]) -> None:
        with self._lock:
            if self._revoked:
                raise TransferCancelled(f"{self._name!r} was dropped while it was being parked")
            former = self._former()
            fallback = None if self._durable or self._appends_at_path else _last_synced(former)
            row = VersionRow(
                0, self.tokens, time.time(), self._boot, self._durable, self._hashes, self.extents, self.checkpoints
            )
            used = self._ledger.next_use()
            units, proven = self._units()
            row = self._catalog.put_version(
                self._name,
                self._namespace,
                row,
                used,
                keep_fallback=fallback.row.id if fallback else None,
                synced=self._durable,
                residents=[
                    Resident(kind, number, hot, not self._durable)
                    for kind, pairs in new.items()
                    for number, hot in zip(pairs.numbers.tolist(), pairs.hot.tolist(), strict=True)
                ],
                cold=self._cold_numbers(new),
                also=partial(put_units, new=units),
            )
            self._checks.commit(units, proven)
            if self._hot is not None:
                for kind, pairs in new.items():
                    self._hot.residents[kind].admit(pairs.numbers, pairs.hot, dirty=not self._durable)
            self._ledger.commit(self._name, self._namespace, row, used, fallback)
            self._committed = True
            # The version holds its checkpoints now; those that were kept this far but are of no more use go.
            listed = {point.record for point in self.checkpoints}
            self._space.records.release(
                [run for run in (*self._kept.records, *self._new.records) if run.first not in listed]
            )

    def _units(self) -> tuple[dict[Kind, UnitRows], npt.NDArray[np.bool_] | bool]:
        """What is known of the units of the blocks and the record that were written."""
        blocks = block_numbers(self.extents)[self.delta.start // self._space.geometry.block_tokens :]
        if self.delta.start == self.tokens:
            blocks = blocks[:0]
        records = block_numbers(self._new.records)
        if self.sums is None:
            return self._checks.unknown({"blocks": blocks, "checkpoints": records}), False
        return self.sums.rows(blocks, records, self._continued)

    def _new_pairs(self) -> dict[Kind, Pairs]:
        """The new numbers that have a place in the hot tier, by kind."""
        if self._hot is None:
            return {}
        blocks, records = block_numbers(self._new.extents), block_numbers(self._new.records)
        pairs: dict[Kind, Pairs] = {"blocks": Pairs(blocks, self._new_hot)}
        pairs["checkpoints"] = Pairs(records, self._new_hot_record)
        return {kind: of.part(of.hot >= 0) for kind, of in pairs.items()}

    def _cold_numbers(self, warm: dict[Kind, Pairs]) -> list[tuple[str, int]]:
        """The new numbers that have none, whose former use may have left a row."""
        if self._hot is None:
            return []
        new: dict[Kind, _Numbers] = {
            "blocks": block_numbers(self._new.extents),
            "checkpoints": block_numbers(self._new.records),
        }
        return [
            (kind, number)
            for kind, numbers in new.items()
            for number in np.setdiff1d(numbers, warm[kind].numbers).tolist()
        ]

    def release(self) -> None:
        """Let go of what a version that was committed does not hold. The pool's lock need not be held."""
        with self._lock:
            if not self._committed:
                self._space.release(self._kept)
                self._space.release(self._new)
            if self._hot is not None:
                for kind, places in self._kept_hot.items():
                    self._hot.release(kind, places)
                if not self._committed:
                    self._hot.release("blocks", self._new_hot)
                    self._hot.release("checkpoints", self._new_hot_record)


def _last_block(extents: Sequence[Extent]) -> int:
    return extents[-1].first + extents[-1].blocks - 1


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
