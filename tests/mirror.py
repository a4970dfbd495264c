"""A pool and a dict side by side: the same steps on both, every byte and every count compared."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from mmkv.geometry import Extent
from mmkv.ledger import Conversation, Version
from mmkv.rows import ConversationRow
from mmkv.space import KINDS
from mmkv.unit_table import read_units
from tests.computed import Ids, assert_holds, assert_untouched, computed, make_slot
from tests.crashed import crash, idle_writers

FILL = 0xAA


@dataclass
class Parked:
    """What the model knows of a conversation."""

    ids: Ids
    namespace: str
    pinned: bool = False


@dataclass
class Lease:
    """A match that is held, and what it was of."""

    match: mmkv.Match
    ids: Ids
    namespace: str
    conversation: str


def common_prefix(one: Ids, other: Ids) -> int:
    """How many leading ids two conversations have in common."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


@dataclass
class Mirror:
    """Steps that are done to a pool and to a dict, and compared.

    A step returns without a word, or an assertion fails. Where the pool is full, nothing may have changed.
    """

    path: Path
    layout: mmkv.Layout
    capacity: int
    hot: Path | None = None
    hot_capacity: int | None = None
    verify: Literal["always", "first", "never"] = "first"
    pool: mmkv.Pool = field(init=False)
    model: dict[str, Parked] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    full: int = 0
    evicted: int = 0
    compared: int = 0
    # What each version that was seen is of, by its number, and the conversations that were seen on the medium.
    versions: dict[int, Parked] = field(default_factory=dict)
    synced: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        # What others do in their own time is a step here, so that the same steps give the same pool.
        with idle_writers():
            self.pool = mmkv.Pool.open(
                self.path,
                self.layout,
                capacity=self.capacity,
                hot=self.hot,
                hot_capacity=self.hot_capacity,
                min_free_ram=0,
                verify=self.verify,
            )
        assert self.pool._housekeeping is not None
        self.pool._housekeeping._chores = ()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.pool._space.geometry.block_tokens

    def close(self) -> None:
        """Close the leases and the pool."""
        while self.leases:
            self.close_lease(0)
        self.pool.close()

    # Steps

    def park(self, name: str, ids: Ids, namespace: str = "", **options: Any) -> None:
        """Park, and see that no more moved than had to."""
        former = self.model.get(name)
        if former is not None:
            namespace = former.namespace
        keep = {name} | {lease.conversation for lease in self.leases} & self._held()
        block, least = self.block_tokens, len(ids)
        if former is not None:
            least = len(ids) - common_prefix(former.ids, ids)
        if options.get("share", True):
            for other in self.model.values():
                if other.namespace == namespace:
                    least = min(least, len(ids) - common_prefix(other.ids, ids))
        slot = computed(self.layout, ids, salt=namespace)
        evictions = self.pool.stats().evictions
        try:
            receipt = self.pool.park(name, slot, ids, namespace=namespace, **options).result(60)
        except mmkv.PoolFull:
            self.full += 1
            assert self.pool.stats().evictions == evictions, "a full pool dropped something in vain"
            assert set(self.pool.conversations()) == set(self.model)
            return
        assert receipt.tokens == len(ids)
        # Others may have been dropped to make room, so that nothing was left to share with.
        if self.pool.stats().evictions == evictions:
            assert receipt.tokens_written < least + block
        self.model[name] = Parked(ids, namespace, former is not None and former.pinned)
        self._note_evictions(evictions, keep)

    def take(self, name: str, tokens: int | None = None, have: int = 0) -> None:
        """Take a conversation or a prefix of it; a prefix must end at a checkpoint where there are states."""
        parked = self.model[name]
        self._take(name, parked.ids, parked.namespace, tokens, have, self.pool.info(name).checkpoints)

    def _take(
        self,
        source: mmkv.Match | str,
        ids: Ids,
        namespace: str,
        tokens: int | None,
        have: int,
        checkpoints: tuple[int, ...],
    ) -> None:
        count = len(ids) if tokens is None else tokens
        have = min(have, count)
        slot = make_slot(self.layout, count + 5, fill=FILL)
        if self.layout.state_bytes and count not in checkpoints:
            with pytest.raises(ValueError, match="has no checkpoint at"):
                self.pool.take(source, slot, tokens=count, have=have)
            assert_untouched(slot, FILL)
            return
        receipt = self.pool.take(source, slot, tokens=tokens, have=have).result(60)
        assert (receipt.tokens, receipt.tokens_written) == (count, count - have)
        assert_holds(slot, ids[:count], have=have, fill=FILL, salt=namespace)
        self.compared += receipt.bytes

    def match(self, ids: Ids, namespace: str, *, hold: bool = False) -> None:
        """Match, compare with a search through the dict, and take what was matched."""
        expected = 0
        for name, parked in self.model.items():
            if parked.namespace == namespace:
                common = common_prefix(parked.ids, ids)
                if self.layout.state_bytes:
                    points = [point for point in self.pool.info(name).checkpoints if point <= common]
                    common = max(points, default=0)
                expected = max(expected, common)
        match = self.pool.match(ids, namespace=namespace)
        assert match.tokens == expected
        if not expected:
            assert match.conversation is None
            match.close()
            return
        assert match.conversation is not None
        self._take(match, ids[:expected], namespace, None, expected // 3, (expected,))
        if hold:
            self.leases.append(Lease(match, ids[:expected], namespace, match.conversation))
        else:
            match.close()

    def take_lease(self, index: int) -> None:
        """Take by a match that has been held over whatever came since."""
        lease = self.leases[index % len(self.leases)]
        self._take(lease.match, lease.ids, lease.namespace, None, 0, (len(lease.ids),))

    def close_lease(self, index: int) -> None:
        """Close a match that has been held."""
        self.leases.pop(index % len(self.leases)).match.close()

    def fork(self, source: str, target: str, tokens: int | None) -> None:
        """Fork; the target must be free, and a prefix end at a checkpoint where there are states."""
        parked = self.model[source]
        count = len(parked.ids) if tokens is None else tokens
        if target in self.model:
            expected = "exists already"
        elif self.layout.state_bytes and count not in self.pool.info(source).checkpoints:
            expected = "has no checkpoint at"
        else:
            expected = ""
        if expected:
            with pytest.raises(ValueError, match=expected):
                self.pool.fork(source, target, tokens)
            return
        self.pool.fork(source, target, tokens)
        self.model[target] = Parked(parked.ids[:count], parked.namespace)

    def drop(self, name: str) -> None:
        """Drop."""
        self.pool.drop(name)
        del self.model[name]

    def pin(self, name: str, *, pinned: bool) -> None:
        """Pin or unpin."""
        (self.pool.pin if pinned else self.pool.unpin)(name)
        self.model[name].pinned = pinned

    def swap(self, leaving: str, ids: Ids, arriving: str, namespace: str = "") -> None:
        """Let one conversation leave a slot and another arrive in it."""
        former, target = self.model.get(leaving), self.model[arriving]
        if former is not None:
            namespace = former.namespace
        keep = {leaving, arriving} | {lease.conversation for lease in self.leases} & self._held()
        slot = make_slot(self.layout, max(len(ids), len(target.ids)) + 5, fill=FILL)
        for mine, computed_ones in zip(slot.arrays, computed(self.layout, ids, salt=namespace).arrays, strict=True):
            for name, array in computed_ones.items():
                mine[name][: len(ids)] = array
        for mine, computed_ones in zip(slot.state, computed(self.layout, ids, salt=namespace).state, strict=True):
            for name, array in computed_ones.items():
                mine[name][...] = array
        evictions = self.pool.stats().evictions
        try:
            park, take = self.pool.swap(slot, leaving=leaving, leaving_ids=ids, arriving=arriving, namespace=namespace)
        except mmkv.PoolFull:
            self.full += 1
            assert set(self.pool.conversations()) == set(self.model)
            return
        park.result(60)
        take.result(60)
        arrived = make_slot(self.layout, len(target.ids))
        for mine, theirs in zip(arrived.arrays, slot.arrays, strict=True):
            for name in mine:
                mine[name][...] = theirs[name][: len(target.ids)]
        arrived.state = slot.state
        assert_holds(arrived, target.ids, salt=target.namespace)
        self.model[leaving] = Parked(ids, namespace, former is not None and former.pinned)
        self._note_evictions(evictions, keep)

    def resize(self, capacity: int) -> None:
        """Resize; what is pinned or leased may forbid it."""
        evictions = self.pool.stats().evictions
        capacity = max(capacity, self.pool._space.geometry.smallest_capacity)
        try:
            self.pool.resize(capacity)
        except mmkv.PoolFull:
            assert set(self.pool.conversations()) == set(self.model)
            return
        self.capacity = capacity
        stats = self.pool.stats()
        assert stats.capacity == capacity
        assert stats.allocated <= capacity
        self._note_evictions(evictions, {lease.conversation for lease in self.leases} & self._held())

    def reopen(self) -> None:
        """Close the pool and open it anew."""
        while self.leases:
            self.close_lease(0)
        self.pool.close()
        self._open()
        assert self.pool.stats().capacity == self.capacity

    def crash(self, *, lose_hot: bool) -> None:
        """Leave the pool as a killed process does, perhaps with its hot directory gone, and open it anew.

        With the hot files, nothing that was committed is lost; without them, what the path has.
        """
        while self.leases:
            self.close_lease(0)
        expected = {name: self._without_hot(name) if lose_hot else parked for name, parked in self.model.items()}
        crash(self.pool)
        if lose_hot and self.hot is not None:
            shutil.rmtree(self.hot)
        self._open()
        found = set(self.pool.conversations())
        self.model = {name: parked for name, parked in expected.items() if parked is not None}
        assert found == set(self.model)

    def _without_hot(self, name: str) -> Parked | None:
        """What is left of a conversation if the hot files are lost."""
        conversation = self.pool._ledger.conversations[name]
        if not self.pool._writer._lacks(conversation.version):
            return self.model[name]
        if conversation.fallback is None:
            assert name not in self.synced, "what was on the medium would be lost"
            return None
        return replace(self.versions[conversation.fallback.row.id], pinned=conversation.pinned)

    def write(self) -> None:
        """A batch of what the background writer does, or a sync of what it wrote."""
        writer = self.pool._writer
        if self.pool._hot is not None and not writer._write_oldest():
            writer._synced_at = 0.0
            writer._sync_written()

    def prefetch(self, name: str, *, cancel: bool = False) -> None:
        """Prefetch a conversation, or begin to."""
        transfer = self.pool.prefetch(name)
        if cancel and transfer.cancel():
            with pytest.raises(mmkv.TransferCancelled):
                transfer.result(60)
        else:
            assert transfer.result(60).tokens == len(self.model[name].ids)

    def relieve(self) -> None:
        """What housekeeping does when RAM is short: give back a hot segment that costs nothing."""
        if self.pool._hot is not None:
            self.pool._hot.give_back_one()

    def change_hot(self, hot: Path | None, capacity: int | None) -> None:
        """Close, and open with another hot directory, another capacity of it, or none."""
        self.close()
        if hot is None:
            mmkv.Pool.open(self.path, hot=False, min_free_ram=0).close()
        self.hot, self.hot_capacity = hot, capacity
        self._open()
        tiers = self.pool.stats().tiers
        assert len(tiers) == (1 if hot is None else 2)
        if hot is not None:
            assert (tiers[0].directory, tiers[0].capacity) == (str(hot), capacity)

    def keep_house(self) -> None:
        """What housekeeping does several times a second."""
        self.pool._keep_spare()
        assert self.pool.stats().allocated <= self.capacity

    def flush(self) -> None:
        """Bring everything to the medium."""
        self.pool.flush()
        assert all(self.pool.info(name).synced for name in self.model)

    # Comparing

    def _held(self) -> set[str]:
        """Conversations whose newest version a lease holds."""
        found = self.pool._ledger.conversations
        return {name for name, conversation in found.items() if conversation.version.leases}

    def _note_evictions(self, before: int, keep: set[str]) -> None:
        gone = set(self.model) - set(self.pool.conversations())
        assert self.pool.stats().evictions - before == len(gone)
        assert not gone & keep, "what is leased or being parked was dropped"
        assert not any(self.model[name].pinned for name in gone)
        for name in gone:
            del self.model[name]
        self.evicted += len(gone)

    def check(self) -> None:
        """Every count and every row against what it must be."""
        conversations = self.pool._ledger.conversations
        self.versions |= {conversations[name].version.row.id: replace(self.model[name]) for name in self.model}
        self.synced |= {name for name in self.model if conversations[name].version.row.synced}
        self.synced &= self.model.keys()
        assert set(self.pool.conversations()) == set(self.model)
        for name, parked in self.model.items():
            info = self.pool.info(name)
            assert (info.tokens, info.namespace, info.pinned) == (len(parked.ids), parked.namespace, parked.pinned)
        check_pool(self.pool, [lease.match._version for lease in self.leases if lease.match._version])


def check_pool(pool: mmkv.Pool, leased: list[Version]) -> None:
    """References are those of the extents, every number has one role, and the catalog and the files say the same."""
    # A take may end a moment before what it brought is booked.
    pool._traffic.wait_until_quiet()
    # Housekeeping allocates ahead of need; not now.
    hot_growing = nullcontext() if pool._hot is None else pool._hot.space._growing
    with pool._space._growing, hot_growing, pool._lock:
        _check(pool, leased)


def _check(pool: mmkv.Pool, leased: list[Version]) -> None:
    space, ledger = pool._space, pool._ledger
    conversations = list(ledger.conversations.values())
    versions = {id(v): v for c in conversations for v in c.linked_versions()} | {id(v): v for v in leased}
    for allocator, extents_of in ((space.blocks, _extents), (space.records, _records)):
        references = Counter(n for v in versions.values() for n in extents_of(v))
        counts = allocator.counts
        assert {n: int(counts[n]) for n in range(len(counts)) if counts[n]} == dict(references)
        assert allocator.used == len(references)
        assert allocator.used + allocator.free + allocator.unsettled == allocator.total
        free = [n for s in allocator._starts for n in range(s, s + allocator._lengths[s])]
        waiting = [n for first, count in allocator._unsettled for n in range(first, first + count)]
        roles = Counter([*free, *waiting, *references])
        assert set(roles.values()) <= {1}, "a number has two roles"
        length = allocator.segment_length
        assert set(roles) == {n for s in allocator.segments for n in range(s * length, (s + 1) * length)}
    _check_hot(pool)
    _check_units(pool)
    stats = pool.stats()
    assert stats.leases == sum(version.leases for version in versions.values())
    assert stats.allocated <= stats.capacity
    _check_catalog(pool, conversations)
    for kind in KINDS:
        segments = space.allocator(kind).segments
        for file in space.files(kind):
            assert os.fstat(file.fd).st_blocks * 512 <= len(segments) * file.segment_bytes + 4096
            assert file.size >= (max(segments, default=-1) + 1) * file.segment_bytes


def _check_units(pool: mmkv.Pool) -> None:
    """What is held has the checksums that the catalog lists, and of parks that took them they cover every version."""
    checks, space = pool._checks, pool._space
    for kind in KINDS:
        units = checks.units[kind]
        listed = read_units(pool._catalog, kind, checks.columns, space.geometry.block_tokens)
        held = np.array([n for c in pool._ledger.conversations.values() for v in c.linked_versions()
                         for n in (_extents(v) if kind == "blocks" else _records(v))], dtype=np.int64)  # fmt: skip
        mine = np.isin(listed.numbers, held)
        assert (units.tokens(listed.numbers[mine]) == listed.tokens[mine]).all()
        assert (units.values(listed.numbers[mine]) == listed.values[mine]).all()
        if checks.verify != "never":
            assert np.isin(held, listed.numbers).all(), "something was parked without checksums"
    block = space.geometry.block_tokens
    for conversation in pool._ledger.conversations.values():
        for version in conversation.linked_versions():
            numbers = np.array(_extents(version))
            ends = np.minimum(version.tokens - np.arange(len(numbers)) * block, block)
            covered = checks.units["blocks"].tokens(numbers)
            assert ((covered >= ends) | (covered == 0)).all(), "checksums end before a version does"
    assert not any(pool._ledger.quarantine.count(kind) for kind in KINDS)


def _check_hot(pool: mmkv.Pool) -> None:
    hot = pool._hot
    if hot is None:
        return
    assert not hot._fills
    assert not any(hot._coming.values())
    assert not any(pool._writer._writing.values())
    listed = {(row.kind, row.number): (row.hot, row.dirty) for row in pool._catalog.residents()}
    for kind in KINDS:
        allocator, counts = hot.space.allocator(kind), hot.space.allocator(kind).counts
        residents: dict[int, tuple[int, bool]] = {}
        for dirty in (True, False):
            numbers, places = hot.residents[kind].all_of(dirty=dirty)
            residents |= {n: (h, dirty) for n, h in zip(numbers.tolist(), places.tolist(), strict=True)}
        held = pool._space.allocator(kind).counts
        assert all(held[number] > 0 for number in residents), "what nobody holds is resident"
        rows = {number: row for (of, number), row in listed.items() if of == kind}
        assert residents.items() <= rows.items(), "the catalog does not list what is resident"
        stale = rows.keys() - residents.keys()
        assert not any(number < len(held) and held[number] for number in stale), "it lists more than that"
        references = Counter(place for place, _ in residents.values())
        assert {n: int(counts[n]) for n in range(len(counts)) if counts[n]} == dict(references)
        assert allocator.used + allocator.free == allocator.total
        assert set(pool._catalog.segments(kind, 1)) == allocator.segments
        for file in hot.space.files(kind):
            assert os.fstat(file.fd).st_blocks * 512 <= len(allocator.segments) * file.segment_bytes
    assert hot.space.allocated_bytes <= hot.space.capacity


def _extents(version: Version) -> list[int]:
    return _numbers(version.extents)


def _records(version: Version) -> list[int]:
    return _numbers(version.records)


def _numbers(extents: Any) -> list[int]:
    return [n for first, count in extents for n in range(first, first + count)]


def _check_catalog(pool: mmkv.Pool, conversations: list[Conversation]) -> None:
    catalog = Catalog(pool.path / "catalog.sqlite3", readonly=True)
    try:
        rows = {row.name: _plain(row) for row in catalog.load()}
        assert rows == {conversation.name: _plain(conversation.row()) for conversation in conversations}
        for kind in KINDS:
            assert set(catalog.segments(kind)) == pool._space.allocator(kind).segments
        assert catalog.get_property("capacity") == pool.stats().capacity
    finally:
        catalog.close()


def _plain(row: ConversationRow) -> tuple[Any, ...]:
    versions = [
        None
        if version is None
        else (version.id, version.tokens, version.synced, version.boot, tuple(map(Extent._make, version.extents)),
              version.checkpoints, version.hashes.tobytes())
        for version in (row.version, row.fallback)
    ]  # fmt: skip
    return (row.namespace, row.pinned, row.created, row.parked, *versions)
