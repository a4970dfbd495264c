"""What is parked, in figures: the same for the pool's owner and for who reads its catalog."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.blocks import tokens_before
from mmkv.catalog import Resident
from mmkv.geometry import Extent, Geometry, extent_blocks
from mmkv.quarantine import usable_tokens
from mmkv.rows import ConversationRow, VersionRow
from mmkv.space import Kind

__all__ = [
    "ConversationInfo",
    "PoolStats",
    "TierStats",
    "TransferKind",
    "TransferStats",
    "conversation_infos",
    "union_extents",
]

TransferKind: TypeAlias = Literal["park", "take", "prefetch", "spill"]


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """One parked conversation.

    Attributes
    ----------
    conversation, namespace : str
        Its id, and the namespace that it shares in.
    tokens : int
        Tokens of its newest version.
    bytes : int
        Bytes of the blocks and checkpoints that hold it.
    owned_bytes : int
        Those of them that no other conversation holds: what dropping it would free.
    extents : int
        Runs of consecutive blocks.
    checkpoints : tuple of int
        The token counts that have one.
    created, parked : float
        When it was first and last parked, in seconds since the epoch.
    taken : float or None
        When it was last taken, if it was.
    pinned : bool
        Whether it stays when the pool is full.
    synced : bool
        Whether its newest version is on the medium.
    hot_bytes : int
        Bytes of the blocks and checkpoints that hold it in the hot tier; 0 where there is none.
    dirty_bytes : int
        Those of them that are not at the pool's path yet.
    usable_tokens : int
        How many of its tokens can be taken: all, unless some of its blocks or checkpoints are in quarantine.
    """

    conversation: str
    namespace: str
    tokens: int
    bytes: int
    owned_bytes: int
    extents: int
    checkpoints: tuple[int, ...]
    created: float
    parked: float
    taken: float | None
    pinned: bool
    synced: bool
    hot_bytes: int
    dirty_bytes: int
    usable_tokens: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of a pool in figures; sizes in bytes.

    Attributes
    ----------
    name : str
        `path` for the pool's own files, `hot` for those in RAM before them.
    directory : str
        Where its files lie.
    medium : str
        The type of the file system there, such as `ext4` or `tmpfs`.
    capacity, allocated, used : int
        The limit; what the files take of it; what conversations hold.
    dirty : int
        What is not at the pool's path yet; 0 of the path itself.
    quarantined : int
        What transfers which timed out or were cancelled still hold.
    trouble : str
        Why the tier cannot be used, or not be written to, now: its files were deleted or replaced, or the medium
        refused what the background wrote; the other figures are those of before. Empty where nothing is wrong.
    """

    name: Literal["hot", "path"]
    directory: str
    medium: str
    capacity: int
    allocated: int
    used: int
    dirty: int
    quarantined: int
    trouble: str = ""

    @property
    def fill(self) -> float:
        """The share of the capacity that is used."""
        return self.used / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A transfer under way.

    Attributes
    ----------
    what : str
        What it does, such as `park of 'chat-42'`.
    kind : str
        `park`, `take`; between the tiers, `prefetch` or `spill`.
    layers, layers_done : int
        How many layers there are, and of how many the bytes are down.
    bytes : int
        What has moved so far.
    seconds : float
        Since it began.
    """

    what: str
    kind: TransferKind
    layers: int
    layers_done: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool in figures; sizes in bytes, counters since it was opened.

    Attributes
    ----------
    path : str
        The path that device arrays take here, as receipts name it; `posix` before one was seen.
    capacity, allocated, used, free : int
        The limit; what the files take of it; what conversations hold; what can be parked without dropping anything.
    conversations, leases, transfers : int
        How many are parked, held, under way.
    quarantined : int
        Bytes that transfers which timed out or were cancelled still hold.
    free_runs, largest_free_run : int
        Runs of consecutive free blocks, and the bytes of the longest.
    fragmentation : float
        1 - largest free run / free blocks; 0 where one run holds all.
    parks, takes, hits, misses, evictions, failures : int
        Transfers done; matches with tokens and without; conversations dropped to make room; transfers that failed.
    bytes_parked, bytes_taken : int
        What moved.
    moved : dict of str to int
        What moved, by path.
    tiers : tuple of TierStats
        The tiers, the hot one first where there is one.
    under_way : tuple of TransferStats
        The transfers under way, those in quarantine left out, the oldest first.
    expirations : int
        Conversations dropped because nobody had used them for `max_idle`.
    spills, promotions, hot_evictions, prefetches : int
        Conversations copied from the hot tier to the path; copied from there to the hot tier; dropped from the hot
        tier alone to make room in it; prefetches done. All 0 without a hot tier, like the next two.
    bytes_spilled, bytes_promoted : int
        What moved between the tiers.
    bytes_verified : int
        What takes compared with its checksums.
    mismatches : int
        Takes that found other bytes than were parked.
    corrupt, unverified : int
        Bytes of the blocks and checkpoints in quarantine, and of those that have no checksums.
    """

    path: str
    capacity: int
    allocated: int
    used: int
    free: int
    conversations: int
    leases: int
    transfers: int
    quarantined: int
    free_runs: int
    largest_free_run: int
    fragmentation: float
    parks: int
    takes: int
    hits: int
    misses: int
    evictions: int
    failures: int
    bytes_parked: int
    bytes_taken: int
    moved: dict[str, int] = field(default_factory=dict)
    tiers: tuple[TierStats, ...] = ()
    under_way: tuple[TransferStats, ...] = ()
    expirations: int = 0
    spills: int = 0
    promotions: int = 0
    hot_evictions: int = 0
    prefetches: int = 0
    bytes_spilled: int = 0
    bytes_promoted: int = 0
    bytes_verified: int = 0
    mismatches: int = 0
    corrupt: int = 0
    unverified: int = 0


def conversation_infos(
    rows: Iterable[ConversationRow],
    geometry: Geometry,
    residents: Iterable[Resident] = (),
    bad: Mapping[Kind, Collection[int]] | None = None,
) -> list[ConversationInfo]:
    """The figures of every conversation, in the order of `rows`, which must be all that the catalog holds.

    `residents` are what the catalog lists in the hot tier, and `bad` the numbers in quarantine, by kind.

    Costs one pass over the extents, whatever block numbers they have; `owned_bytes` needs all of them.
    """
    rows = list(rows)
    blocks = _Holders(extent for row in rows for extent in union_extents(_extents(row)))
    records = _Holders(record for row in rows for record in union_extents(_records(row)))
    hot = _Warm(residents, geometry)
    return [_info(row, geometry, blocks, records, hot, bad or {}) for row in rows]


def union_extents(extents: Iterable[Extent]) -> list[Extent]:
    """The same numbers, each once, in as few extents as can be and in rising order."""
    union: list[Extent] = []
    for first, count in sorted(extents):
        end = union[-1].first + union[-1].blocks if union else -1
        if first > end:
            union.append(Extent(first, count))
        elif first + count > end:
            union[-1] = Extent(union[-1].first, first + count - union[-1].first)
    return union


def _versions(row: ConversationRow) -> list[VersionRow]:
    return [row.version] if row.fallback is None else [row.version, row.fallback]


def _extents(row: ConversationRow) -> Iterable[Extent]:
    return (extent for version in _versions(row) for extent in version.extents)


def _records(row: ConversationRow) -> Iterable[Extent]:
    return (Extent(point.record, 1) for version in _versions(row) for point in version.checkpoints)


class _Holders:
    """How many conversations hold each number, kept by the borders of extents, so that no number costs memory."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        columns = np.array(list(extents), dtype=np.int64).reshape(-1, 2)
        firsts, ends = columns[:, 0], columns.sum(axis=1)
        self._borders = np.sort(np.concatenate([firsts, ends]))
        changes = np.zeros(len(self._borders), dtype=np.int64)
        np.add.at(changes, np.searchsorted(self._borders, firsts), 1)
        np.add.at(changes, np.searchsorted(self._borders, ends), -1)
        # Starts and ends of extents, summed up, are the number of holders up to the next border.
        self._is_alone = (np.cumsum(changes) == 1).astype(np.int64)
        alone = np.diff(self._borders) * self._is_alone[:-1]
        self._alone_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(alone)])

    def alone(self, extents: Sequence[Extent]) -> int:
        """How many numbers of `extents`, which were among those given, have one holder."""
        columns = np.array(extents, dtype=np.int64).reshape(-1, 2)
        return int((self._alone_below(columns.sum(axis=1)) - self._alone_below(columns[:, 0])).sum())

    def _alone_below(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.searchsorted(self._borders, numbers, side="right") - 1
        below: npt.NDArray[np.int64] = self._alone_before[at] + (numbers - self._borders[at]) * self._is_alone[at]
        return below


class _Warm:
    """How many bytes of a version lie in the hot tier."""

    def __init__(self, residents: Iterable[Resident], geometry: Geometry) -> None:
        rows = list(residents)
        self._sizes = {"blocks": geometry.block_tokens * geometry.layout.token_bytes}
        self._sizes["checkpoints"] = geometry.checkpoint_bytes
        self._numbers = {
            (kind, dirty): np.sort([row.number for row in rows if row.kind == kind and row.dirty >= dirty])
            for kind in self._sizes
            for dirty in (False, True)
        }

    def bytes(self, version: VersionRow, *, dirty: bool) -> int:
        """Bytes of the blocks and records of a version that are there; of those only that are dirty, if it is set."""
        runs = {"blocks": version.extents, "checkpoints": [Extent(point.record, 1) for point in version.checkpoints]}
        total = 0
        for kind, extents in runs.items():
            borders = np.array(extents, dtype=np.int64).reshape(-1, 2)
            below = np.searchsorted(self._numbers[kind, dirty], [borders[:, 0], borders.sum(axis=1)])
            total += int((below[1] - below[0]).sum()) * self._sizes[kind]
        return total


def _info(
    row: ConversationRow,
    geometry: Geometry,
    blocks: _Holders,
    records: _Holders,
    warm: _Warm,
    bad: Mapping[Kind, Collection[int]],
) -> ConversationInfo:
    version = row.version
    sound = tokens_before(bad.get("blocks", ()), version.extents, version.tokens, geometry.block_tokens)
    alone = blocks.alone(version.extents)
    alone_records = records.alone([Extent(point.record, 1) for point in version.checkpoints])
    return ConversationInfo(
        conversation=row.name,
        namespace=row.namespace,
        tokens=version.tokens,
        bytes=extent_blocks(version.extents) * geometry.block_bytes
        + len(version.checkpoints) * geometry.checkpoint_bytes,
        owned_bytes=alone * geometry.block_bytes + alone_records * geometry.checkpoint_bytes,
        extents=len(version.extents),
        checkpoints=tuple(point.tokens for point in version.checkpoints),
        created=row.created,
        parked=row.parked,
        taken=row.taken,
        pinned=row.pinned,
        synced=version.synced,
        hot_bytes=warm.bytes(version, dirty=False),
        dirty_bytes=warm.bytes(version, dirty=True),
        usable_tokens=usable_tokens(geometry.layout, version, sound, bad.get("checkpoints", ())),
    )
