"""The pool: what an engine points its conversations at."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmkv import device as cuda
from mmkv.aside import states_aside
from mmkv.blocks import leading_extents
from mmkv.buffer import Buffer
from mmkv.errors import ConversationNotFound, LayoutMismatch, MmkvError, PoolClosed, TransferError
from mmkv.geometry import Extent, extent_blocks
from mmkv.housekeeping import Housekeeping
from mmkv.info import ConversationInfo, PoolStats, conversation_infos
from mmkv.layout import Layout
from mmkv.ledger import Conversation, Ledger, Version
from mmkv.match import Match, longest_prefix
from mmkv.medium import boot_id
from mmkv.movers import Movers
from mmkv.opening import Opened, load_ledger, open_owner, open_reader
from mmkv.parking import Park
from mmkv.plan import layer_copies
from mmkv.prefix import as_token_ids
from mmkv.room import Room
from mmkv.sizes import as_count, parse_bytes
from mmkv.slot import Slot
from mmkv.store.contract import LayerCopies
from mmkv.transfer import Transfer

__all__ = ["Pool"]

_MAX_NAME = 512
_TICK_SECONDS = 0.2
_STATS_SECONDS = 1.0
_STORES = ("auto", "mapped", "direct", "posix")
_MAX_THREADS = 12

_log = logging.getLogger("mmkv")


class _Parking(NamedTuple):
    park: Park
    transfer: Transfer


class Pool:
    """The KV caches of an engine's conversations, in the files of one directory.

    `Pool.open` makes one. Every method is safe from any thread; the calls that move bytes return a `Transfer` at once.
    A pool is a context manager that closes itself.
    """

    def __init__(self, opened: Opened, *, deadline: float | None, checkpoints: int, movers: Movers) -> None:
        self.path = opened.path
        self.layout: Layout = opened.description.layout
        self._opened = opened
        self._catalog, self._space, self._ledger = opened.catalog, opened.space, opened.ledger
        self._deadline = deadline
        self._older_checkpoints = checkpoints
        self._movers = movers
        self._boot = boot_id()
        self._readonly = opened.lock is None
        self._closed: str | None = None
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        # Conversations that are being parked; `None` while that is prepared.
        self._parking: dict[str, _Parking | None] = {}
        self._transfers: dict[Transfer, int] = {}
        self._touched: dict[str, tuple[float | None, int]] = {}
        self._counters = dict.fromkeys(
            ("parks", "takes", "hits", "misses", "failures", "bytes_parked", "bytes_taken"), 0
        )
        self._moved: dict[str, int] = {}
        self._noted_stats: dict[str, Any] | None = None
        self._stats_noted_at = 0.0
        self._seen_changes = self._catalog.change_counter()
        self._room = Room(self._lock, self._catalog, self._space, self._ledger, self._parking, movers.forget)
        self._housekeeping: Housekeeping | None = None
        if not self._readonly:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time(), "path": movers.path}
            self._catalog.set_property("owner", owner)
            self._housekeeping = Housekeeping(self._tick, _TICK_SECONDS)
        _open_pools.add(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        layout: Layout | None = None,
        *,
        capacity: int | str | None = None,
        readonly: bool = False,
        deadline: float | None = 60.0,
        checkpoints: int = 2,
        min_free_ram: int | str | None = None,
        threads: int | None = None,
        store: Literal["auto", "mapped", "direct", "posix"] = "auto",
    ) -> Pool:
        """Open the pool in a directory, and create it where there is none.

        Parameters
        ----------
        path : path
            A directory on tmpfs or a disk, made where it is missing.
        layout : Layout, optional
            The layout; without one, the stored one. Needed to create.
        capacity : int or str, optional
            The most bytes that the files take, such as `"384GiB"`. Needed to create; for an existing pool, as `resize`.
        readonly : bool
            Whether to look only, also beside the pool's owner: `match`, `info`, `conversations`, `stats`. A match's
            lease does not bind the owner.
        deadline : float or None
            Seconds after which a transfer fails with `TransferTimeout`.
        checkpoints : int
            How many older checkpoints a conversation keeps, beside the newest and the one at the last boundary.
        min_free_ram : int or str, optional
            Bytes of RAM that a pool in RAM leaves free as it grows; by default a 16th of it, at most 1 GiB.
        threads : int, optional
            How many threads copy at once in one transfer; by default the number of cores, 2 to 12.
        store : str
            How device arrays move: `auto`, or one of `mapped` (page-locked map), `direct` (kvikio), `posix`.

        Raises
        ------
        PoolLocked
            Another process owns the pool.
        LayoutMismatch
            The pool has another layout.
        PoolCorrupt
            The directory holds no pool, or a damaged one.
        PoolFull
            There is no room to create it.

        Notes
        -----
        Creating touches none of the capacity. Reopening reads the catalog, not the ids: about 0.1 ms a conversation.
        """
        where = Path(os.path.abspath(os.fspath(path)))
        size = None if capacity is None else parse_bytes(capacity, "capacity")
        free = None if min_free_ram is None else (0 if min_free_ram == 0 else parse_bytes(min_free_ram, "min_free_ram"))
        if store not in _STORES:
            raise ValueError(f"store must be one of {', '.join(_STORES)}, not {store!r}")
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be positive seconds or None, not {deadline!r}")
        older = as_count(checkpoints, "checkpoints", least=0)
        lanes = max(2, min(_MAX_THREADS, os.cpu_count() or 2)) if threads is None else threads
        lanes = as_count(lanes, "threads", least=1)
        opened = open_reader(where, layout) if readonly else open_owner(where, layout, size, free)
        movers = Movers(where, opened.medium, store, lanes)
        pool = cls(opened, deadline=deadline, checkpoints=older, movers=movers)
        try:
            if size is not None and not readonly and size != pool._space.capacity:
                pool.resize(size)
        except BaseException:
            pool.close()
            raise
        return pool

    # Parking

    def park(
        self,
        conversation: str,
        slot: Slot,
        token_ids: Any,
        *,
        namespace: str = "",
        share: bool = True,
        durable: bool = False,
        boundary: bool = False,
        stream: Any = None,
    ) -> Transfer:
        """Copy what the pool does not have of a conversation from a slot into the pool.

        The slot's states are copied aside before this returns. Rows of planes may be appended to, not changed, until
        the transfer is done. A park of the same conversation that is under way is waited for.

        Parameters
        ----------
        conversation : str
            Its id: 1 to 512 characters.
        slot : Slot
            The arrays; rows `[0, len(token_ids))` are the conversation.
        token_ids : array_like of int
            64-bit integers, all signed or all unsigned.
        namespace : str
            Only conversations of one namespace share blocks and match.
        share : bool
            Whether to share the whole blocks of a prefix that another conversation has parked.
        durable : bool
            Whether the transfer is done only when the version is on the medium.
        boundary : bool
            Whether this token count is the end of a prompt, whose checkpoint is kept until the next such.
        stream : stream, or mapping of int to stream, optional
            What computes the slot: a CuPy or Torch stream, or one for each device. Without one, the host waits for
            the slot's devices.

        Returns
        -------
        Transfer
            Its result's `tokens_written` counts the rows that moved: the new tokens, and at most a block more.

        Raises
        ------
        PoolFull
            There is no room; the former version is as it was.
        ValueError, TypeError, LayoutMismatch
            An argument is wrong.
        """
        name = _conversation_id(conversation)
        self._require_owner()
        self._require_slot(slot)
        where = _text(namespace, "namespace", least=0)
        ids = as_token_ids(token_ids)
        if not len(ids):
            raise ValueError("a conversation has one token at least: token_ids is empty")
        slot.require_room(len(ids))
        states = states_aside(slot, stream)
        after = cuda.producer_events(slot.devices, stream)
        self._enter_park(name)
        park = None
        try:
            park = Park(
                self._lock, self._catalog, self._space, self._ledger, self._room, boot=self._boot,
                older=self._older_checkpoints, name=name, namespace=where, ids=ids, share=share, durable=durable,
                boundary=boundary,
            )  # fmt: skip
            transfer, begin = self._make_park(name, park, slot, states)
        except BaseException:
            if park is not None:
                park.release()
            self._leave_park(name)
            raise
        begin(after)
        return transfer

    def _make_park(
        self, name: str, park: Park, slot: Slot, states: tuple[dict[str, Buffer], ...]
    ) -> tuple[Transfer, Callable[[Sequence[Any]], None]]:
        """The transfer of a park, and the function that begins it."""
        start, stop = park.delta.start, park.tokens
        copies = layer_copies(self._space, slot, park.extents, start, stop, states=states, record=park.record)

        def release(transfer: Transfer) -> None:
            with self._lock:
                park.release()
                if self._parking.get(name) is parking:
                    del self._parking[name]
                self._ended(transfer, "park")

        transfer = Transfer(
            f"park of {name!r}",
            len(self.layout.layers),
            parts=self._movers.parts(slot),
            deadline=self._deadline,
            finish=park.commit,
            release=release,
            tokens=stop,
            tokens_written=stop - start,
        )
        parking = _Parking(park, transfer)
        with self._idle:
            self._enter(transfer, park.held_bytes)
            self._parking[name] = parking
            self._idle.notify_all()
        return transfer, lambda after: self._start("write", slot, copies, transfer, after)

    def _enter_park(self, name: str) -> None:
        with self._idle:
            while name in self._parking:
                self._idle.wait()
                self._require_owner()
            self._require_owner()
            self._parking[name] = None

    def _leave_park(self, name: str) -> None:
        with self._idle:
            self._parking.pop(name, None)
            self._idle.notify_all()

    def _enter(self, transfer: Transfer, held_bytes: int) -> None:
        """Count a transfer among those under way. The pool's lock is held."""
        self._require_owner()
        self._transfers[transfer] = held_bytes

    def _start(
        self,
        direction: Literal["read", "write"],
        slot: Slot,
        copies: Sequence[LayerCopies],
        transfer: Transfer,
        after: Sequence[Any],
    ) -> None:
        transfer.begin()
        if any(layer.copies for layer in copies):
            self._movers.start(direction, slot, copies, transfer, after)
            return
        for _ in range(self._movers.parts(slot)):
            transfer.released()

    def _ended(self, transfer: Transfer, kind: Literal["park", "take"]) -> None:
        """Book a transfer that let go of everything. The pool's lock is held."""
        self._transfers.pop(transfer, None)
        moved = transfer.moved_bytes
        for path, size in moved.items():
            self._moved[path] = self._moved.get(path, 0) + size
        self._counters["bytes_parked" if kind == "park" else "bytes_taken"] += sum(moved.values())
        self._counters["failures" if transfer.stopped else f"{kind}s"] += 1
        self._idle.notify_all()

    # Taking

    def take(
        self, source: Match | str, slot: Slot, *, tokens: int | None = None, have: int = 0, stream: Any = None
    ) -> Transfer:
        """Copy a conversation, or a prefix of it, from the pool into a slot, layer by layer.

        Parameters
        ----------
        source : Match or str
            A match, whose version is taken, or a conversation, whose newest version is.
        slot : Slot
            The arrays; rows `[have, tokens)` and the states are written, nothing else.
        tokens : int, optional
            How many leading tokens; by default the match's, or all. Where the layout has states, it must be a
            checkpoint's count.
        have : int
            The caller's promise that the slot holds that many leading tokens.
        stream : stream, or mapping of int to stream, optional
            What last used the slot; see `park`.

        Raises
        ------
        ConversationNotFound
            There is no such conversation.
        ValueError, TypeError, LayoutMismatch
            An argument is wrong.
        """
        self._require_owner()
        self._require_slot(slot)
        slot.require_writable()
        with self._lock:
            name, _, version, default = self._resolve(source)
            if version is None:
                return self._empty_take(slot)
            count = self._prefix_tokens(name, version, default, tokens)
            have = as_count(have, "have", least=0)
            if have > count:
                raise ValueError(f"have is {have}, more than the {count} tokens that are taken")
            slot.require_room(count)
            self._ledger.lease(version)
        try:
            after = cuda.producer_events(slot.devices, stream)
            transfer, begin = self._make_take(name, version, slot, count, have)
        except BaseException:
            self._release_lease(version)
            raise
        begin(after)
        return transfer

    def _make_take(
        self, name: str, version: Version, slot: Slot, count: int, have: int
    ) -> tuple[Transfer, Callable[[Sequence[Any]], None]]:
        """A take of a leased version, and the function that begins it."""
        self._space.require_whole()
        record = next((point.record for point in version.row.checkpoints if point.tokens == count), None)
        copies = layer_copies(
            self._space, slot, version.extents, have, count, states=slot.states,
            record=record if self.layout.state_bytes else None,
        )  # fmt: skip

        def release(transfer: Transfer) -> None:
            with self._lock:
                self._ended(transfer, "take")
                self._ledger.release(version)

        transfer = Transfer(
            f"take of {name!r}",
            len(self.layout.layers),
            parts=self._movers.parts(slot),
            deadline=self._deadline,
            finish=lambda: self._touch(name),
            release=release,
            tokens=count,
            tokens_written=count - have,
        )
        with self._lock:
            self._enter(transfer, extent_blocks(version.extents) * self._space.geometry.block_bytes)
        return transfer, lambda after: self._start("read", slot, copies, transfer, after)

    def _empty_take(self, slot: Slot) -> Transfer:
        transfer = Transfer(
            "take of nothing", len(self.layout.layers), parts=1, deadline=None,
            finish=lambda: None, release=lambda _: None,
        )  # fmt: skip
        transfer.released()
        return transfer

    def swap(
        self,
        slot: Slot,
        *,
        leaving: str,
        leaving_ids: Any,
        arriving: Match | str,
        arriving_tokens: int | None = None,
        namespace: str = "",
        stream: Any = None,
    ) -> tuple[Transfer, Transfer]:
        """Park the conversation that is in a slot and take another in its place.

        What arrives is leased and the space for what leaves is reserved before anything moves; the take begins when
        the park is committed. If the park fails, the slot is as it was and the take fails with the same error; if the
        take fails, the park stays.

        Returns
        -------
        tuple of Transfer
            The park and the take.

        Raises
        ------
        ConversationNotFound, PoolFull, ValueError, TypeError, LayoutMismatch
            As of `park` and `take`; nothing has moved.
        """
        self._require_owner()
        self._require_slot(slot)
        slot.require_writable()
        with self._lock:
            name, _, version, default = self._resolve(arriving)
            count = 0 if version is None else self._prefix_tokens(name, version, default, arriving_tokens)
            slot.require_room(count)
            if version is not None:
                self._ledger.lease(version)
        begin: Callable[[Sequence[Any]], None] | None = None
        if version is None:
            take = self._empty_take(slot)
        else:
            try:
                take, begin = self._make_take(name, version, slot, count, 0)
            except BaseException:
                self._release_lease(version)
                raise

        def fail(error: BaseException) -> None:
            if begin is not None:
                take.failed(TransferError(f"the park of {leaving!r} failed, nothing was taken: {error}"))
                for _ in range(self._movers.parts(slot)):
                    take.released()

        def follow(ended: Transfer) -> None:
            error = ended.exception()
            if error is not None:
                fail(error)
            elif begin is not None:
                begin(())

        try:
            park = self.park(leaving, slot, leaving_ids, namespace=namespace, stream=stream)
        except BaseException as error:
            fail(error)
            raise
        park.add_done_callback(follow)
        return park, take

    # Looking

    def match(self, token_ids: Any, *, namespace: str = "") -> Match:
        """The longest parked prefix of some ids, leased.

        Costs a hash of the ids and a read of those in common: a few milliseconds for 500,000.

        Returns
        -------
        Match
            A context manager; `tokens` may be 0.
        """
        ids = as_token_ids(token_ids)
        where = _text(namespace, "namespace", least=0)
        with self._reading():
            found, tokens = longest_prefix(
                self._ledger, self._space, ids, where, at_checkpoints=self.layout.state_bytes > 0
            )
            self._counters["hits" if found else "misses"] += 1
            if found is None:
                return Match()
            self._ledger.lease(found.version)
            return Match(found.name, where, found.version, tokens, self._release_lease, self)

    def __contains__(self, conversation: object) -> bool:
        with self._reading():
            return conversation in self._ledger.conversations

    def __len__(self) -> int:
        with self._reading():
            return len(self._ledger.conversations)

    def conversations(self, *, namespace: str | None = None) -> list[str]:
        """The ids of what is parked, the least recently used first; of one namespace, if it is given."""
        with self._reading():
            return [
                conversation.name
                for conversation in self._ledger.least_recently_used()
                if namespace is None or conversation.namespace == namespace
            ]

    def info(self, conversation: str) -> ConversationInfo:
        """One conversation in figures. Costs a pass over all conversations' extents.

        Raises
        ------
        ConversationNotFound
            There is none of that id.
        """
        with self._reading():
            self._find(conversation)
            rows = [other.row() for other in self._ledger.conversations.values()]
        infos = conversation_infos(rows, self._space.geometry)
        return next(info for info in infos if info.conversation == conversation)

    def stats(self) -> PoolStats:
        """The pool in figures."""
        with self._reading():
            return self._stats_now()

    def _stats_now(self) -> PoolStats:
        space, blocks = self._space, self._space.blocks
        block_bytes = space.geometry.block_bytes
        growth = max(0, space.capacity - space.allocated_bytes) // space.geometry.segment_bytes
        fragmentation = 1 - blocks.largest_free_run / blocks.free if blocks.free else 0.0
        return PoolStats(
            path=self._movers.path,
            capacity=space.capacity,
            allocated=space.allocated_bytes,
            used=space.used_bytes,
            free=(blocks.free + blocks.unsettled + growth * space.geometry.segment_blocks) * block_bytes,
            conversations=len(self._ledger.conversations),
            leases=self._ledger.leases,
            transfers=sum(not transfer.quarantined for transfer in self._transfers),
            quarantined=sum(size for transfer, size in self._transfers.items() if transfer.quarantined),
            free_runs=blocks.free_runs,
            largest_free_run=blocks.largest_free_run * block_bytes,
            fragmentation=fragmentation,
            evictions=self._room.evictions,
            moved=dict(self._moved),
            **self._counters,
        )

    # Keeping

    def fork(self, source: Match | str, target: str, tokens: int | None = None) -> None:
        """Make a new conversation of a prefix of another one. Moves no byte; both share the blocks.

        Parameters
        ----------
        source : Match or str
            What to fork.
        target : str
            The new conversation's id, which must be free.
        tokens : int, optional
            How many leading tokens; by default the match's, or all. Where the layout has states, it must be a
            checkpoint's count.
        """
        name = _conversation_id(target)
        self._require_owner()
        with self._lock:
            of, namespace, version, default = self._resolve(source)
            if version is None:
                raise ValueError("the match has no tokens: there is nothing to fork")
            if name in self._ledger.conversations or name in self._parking:
                raise ValueError(f"conversation {name!r} exists already: choose another id, or drop it first")
            count = self._prefix_tokens(of, version, default, tokens)
            geometry = self._space.geometry
            row = replace(
                version.row,
                tokens=count,
                created=time.time(),
                boot=self._boot,
                synced=False,
                hashes=version.row.hashes[: count // geometry.block_tokens],
                extents=leading_extents(version.extents, geometry.blocks_for(count)),
                checkpoints=tuple(point for point in version.row.checkpoints if point.tokens <= count),
            )
            used = self._ledger.next_use()
            row = self._catalog.put_version(name, namespace, row, used)
            self._space.blocks.hold(row.extents)
            self._space.records.hold([Extent(point.record, 1) for point in row.checkpoints])
            self._ledger.commit(name, namespace, row, used, None)

    def drop(self, conversation: str) -> None:
        """Forget a conversation; a park of it that is under way is cancelled.

        Its blocks are free at once, those of leased versions with the last lease.

        Raises
        ------
        ConversationNotFound
            There is none of that id.
        """
        self._require_owner()
        with self._lock:
            while conversation in self._parking and self._parking[conversation] is None:
                self._idle.wait()
            parking = self._parking.get(conversation)
            if parking is not None:
                parking.park.revoke()
                parking.transfer.cancel()
            if parking is None or conversation in self._ledger.conversations:
                self._find(conversation)
                self._catalog.drop([conversation])
                self._ledger.drop(conversation)
            self._touched.pop(conversation, None)

    def pin(self, conversation: str) -> None:
        """Keep a conversation when the pool is full."""
        self._set_pinned(conversation, pinned=True)

    def unpin(self, conversation: str) -> None:
        """Undo `pin`."""
        self._set_pinned(conversation, pinned=False)

    def _set_pinned(self, conversation: str, *, pinned: bool) -> None:
        self._require_owner()
        with self._lock:
            found = self._find(conversation)
            self._catalog.pin(conversation, pinned)
            found.pinned = pinned

    def flush(self, conversation: str | None = None) -> None:
        """Wait until one conversation, or every one, is on the medium. Costs a sync of the layer files.

        On a disk, what is flushed survives a loss of power; in RAM nothing does.
        """
        self._require_owner()
        with self._lock:
            found = [self._find(conversation)] if conversation is not None else []
            self._room.sync(found or list(self._ledger.conversations.values()))

    def resize(self, capacity: int | str) -> None:
        """Change the capacity; moves no byte.

        A smaller one gives back segments that hold nothing, and drops the least recently used conversations where
        that is not enough.

        Raises
        ------
        PoolFull
            What is pinned, leased or being parked needs more; nothing was changed.
        """
        size = parse_bytes(capacity, "capacity")
        self._require_owner()
        with self._lock:
            smallest = self._space.geometry.smallest_capacity
            if size < smallest:
                raise ValueError(f"a capacity of {size} bytes is less than this pool's segments take: {smallest}")
            if size < self._space.allocated_bytes:
                self._room.shrink(size)
            self._catalog.set_property("capacity", size)
            self._space.capacity = size

    # Ending

    def close(self) -> None:
        """Wait for what is under way, bring everything to the medium, and close. A second call does nothing."""
        with self._idle:
            if self._closed is not None:
                return
            self._closed = "it was closed"
            self._idle.notify_all()
            self._idle.wait_for(
                lambda: None not in self._parking.values() and all(t.quarantined for t in self._transfers)
            )
        if self._housekeeping is not None:
            self._housekeeping.stop()
        with self._lock:
            try:
                if not self._readonly:
                    if not self._opened.medium.in_ram:
                        self._room.sync(list(self._ledger.conversations.values()))
                    self._note_touches()
                    self._note_stats()
            finally:
                if not self._transfers:
                    self._movers.close()
                    self._space.close()
                self._catalog.close()
                if self._opened.lock is not None:
                    self._opened.lock.release()
                _open_pools.discard(self)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self._closed}" if self._closed else f"{len(self._ledger.conversations)} conversations"
        return f"Pool({str(self.path)!r}, model={self.layout.model!r}, {state})"

    # Within

    def _require_owner(self) -> None:
        if self._closed is not None:
            raise PoolClosed(f"the pool at {self.path} cannot be used: {self._closed}")
        if self._readonly:
            raise MmkvError(f"the pool at {self.path} was opened with readonly=True: open it as its owner for this")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self._closed is not None:
            raise PoolClosed(f"the pool at {self.path} cannot be used: {self._closed}")
        with self._lock:
            if self._readonly:
                self._reload()
            yield

    def _reload(self) -> None:
        """Follow the owner's changes."""
        changes = self._catalog.change_counter()
        if changes != self._seen_changes:
            self._space.reload_segments()
            self._ledger = load_ledger(self._catalog, self._space)
            self._seen_changes = changes

    def _require_slot(self, slot: Slot) -> None:
        if not isinstance(slot, Slot):
            raise TypeError(f"slot must be a Slot, not {type(slot).__name__}")
        if slot.layout is not self.layout and slot.layout.fingerprint != self.layout.fingerprint:
            raise LayoutMismatch(
                f"the slot's layout (model {slot.layout.model!r}) is not that of the pool at {self.path} "
                f"(model {self.layout.model!r})"
            )

    def _find(self, conversation: object) -> Conversation:
        if not isinstance(conversation, str):
            raise TypeError(f"a conversation's id is a string, not {conversation!r}")
        found = self._ledger.conversations.get(conversation)
        if found is None:
            raise ConversationNotFound(f"no conversation {conversation!r} in the pool at {self.path}")
        return found

    def _resolve(self, source: Match | str) -> tuple[str, str, Version | None, int]:
        """Name, namespace, version and default token count of what is taken or forked. The lock is held."""
        if isinstance(source, Match):
            namespace, version = source.leased(self)
            return source.conversation or "", namespace, version, source.tokens
        found = self._find(source)
        return found.name, found.namespace, found.version, found.version.tokens

    def _prefix_tokens(self, name: str, version: Version, default: int, tokens: int | None) -> int:
        count = default if tokens is None else as_count(tokens, "tokens", least=1)
        if count > version.tokens:
            raise ValueError(f"tokens is {count}, but {name!r} has {version.tokens}")
        points = [point.tokens for point in version.row.checkpoints]
        if self.layout.state_bytes and count not in points:
            below = max((point for point in points if point < count), default=None)
            above = min((point for point in points if point > count), default=None)
            nearest = " and ".join(str(point) for point in (below, above) if point is not None)
            raise ValueError(f"{name!r} has no checkpoint at {count} tokens; the nearest are at {nearest}")
        return count

    def _release_lease(self, version: Version) -> None:
        with self._lock:
            self._ledger.release(version)

    def _touch(self, name: str) -> None:
        with self._lock:
            found = self._ledger.conversations.get(name)
            if found is not None:
                found.taken, found.used = time.time(), self._ledger.next_use()
                self._touched[name] = (found.taken, found.used)

    def _tick(self) -> None:
        with self._lock:
            under_way = list(self._transfers)
            parking = {entry.transfer: name for name, entry in self._parking.items() if entry is not None}
        for transfer in under_way:
            if transfer.expire():
                # Its blocks stay held, so that nothing is appended to them, but a new park may begin.
                with self._idle:
                    name = parking.get(transfer)
                    entry = self._parking.get(name) if name is not None else None
                    if name is not None and entry is not None and entry.transfer is transfer:
                        del self._parking[name]
                    self._idle.notify_all()
        if self._closed is None:
            self._carry_out_requests()
            with self._lock:
                self._note_touches()
                self._note_stats()

    def _carry_out_requests(self) -> None:
        changes = self._catalog.change_counter()
        if changes == self._seen_changes:
            return
        requests = self._catalog.requests()
        for request in requests:
            if request.action != "drop":
                _log.warning("unknown request %r in the catalog of the pool at %s", request.action, self.path)
                continue
            try:
                self.drop(request.argument)
            except ConversationNotFound:
                _log.info("asked to drop %r, which is gone already", request.argument)
        if requests:
            self._catalog.remove_requests(request.id for request in requests)
        self._seen_changes = changes

    def _note_touches(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            self._catalog.touch([(name, *use) for name, use in touched.items()])

    def _note_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_noted_at < _STATS_SECONDS and self._closed is None:
            return
        stats = asdict(self._stats_now())
        if stats != self._noted_stats:
            self._catalog.set_property("stats", stats)
            self._noted_stats = stats
        self._stats_noted_at = now

    def _abandon(self) -> None:
        """Make this copy of the pool, in a forked child, a closed one that holds no lock."""
        self._closed = "this process is a forked child of its owner, which has no pool; open it anew after the owner closed it"
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        if self._opened.lock is not None:
            self._opened.lock.abandon()
        self._catalog.leak()
        self._space.close()


def _conversation_id(value: object) -> str:
    return _text(value, "a conversation's id", least=1, most=_MAX_NAME)


def _text(value: object, what: str, *, least: int, most: int = _MAX_NAME) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {value!r}")
    if not least <= len(value) <= most:
        shown = value if len(value) <= 40 else value[:40] + "..."
        raise ValueError(f"{what} has {least} to {most} characters, not {len(value)}: {shown!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {value!r} is no valid Unicode: {error.reason}") from error
    return value


_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _abandon_pools() -> None:
    for pool in list(_open_pools):
        pool._abandon()


os.register_at_fork(after_in_child=_abandon_pools)
