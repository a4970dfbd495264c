"""The pool: what an engine points its conversations at."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from mmkv import device as cuda
from mmkv.aside import states_aside
from mmkv.blocks import block_numbers, leading_extents
from mmkv.buffer import Buffer
from mmkv.checks import Checks, Verify, as_verify
from mmkv.device import Event
from mmkv.errors import (
    ConversationCorrupt,
    ConversationNotFound,
    LayoutMismatch,
    MmkvError,
    PoolClosed,
    PoolCorrupt,
    PoolFull,
    TransferError,
)
from mmkv.expiry import Expiry
from mmkv.geometry import Extent, extent_blocks
from mmkv.hot import Hot
from mmkv.housekeeping import Housekeeping
from mmkv.importing import Arrival, Parcel
from mmkv.info import ConversationInfo, PoolStats, TierStats, conversation_infos
from mmkv.layout import Layout, difference
from mmkv.ledger import Conversation, Ledger, Version
from mmkv.match import Match, longest_prefix
from mmkv.medium import boot_id
from mmkv.movers import Movers
from mmkv.names import as_path, as_text, conversation_id
from mmkv.opening import (
    Opened,
    forget_stored_hot,
    hot_of,
    load_ledger,
    open_owner,
    open_reader,
    stored_capacity,
)
from mmkv.paged import PagedSlot
from mmkv.parking import Park
from mmkv.placement import Placement
from mmkv.plan import layer_copies
from mmkv.prefix import as_token_ids
from mmkv.quarantine import usable_tokens
from mmkv.refused import refusals, started
from mmkv.room import Room
from mmkv.route import Route, plan_route
from mmkv.sizes import as_count, parse_bytes, round_up
from mmkv.slot import Slot
from mmkv.space import KINDS, Kind, Space
from mmkv.store.contract import Gate
from mmkv.swapping import Handover
from mmkv.taking import Take
from mmkv.traffic import Parking, Traffic
from mmkv.transfer import Receipt, Transfer
from mmkv.uninterrupted import uninterrupted
from mmkv.verifying import Verification, verification_of
from mmkv.warming import close_hot
from mmkv.writer import Writer

__all__ = ["Pool"]

_STORES = ("auto", "mapped", "direct", "posix")
_MAX_THREADS = 12
_log = logging.getLogger("mmkv")


class Pool:
    """The KV caches of an engine's conversations, in the files of one directory.

    `Pool.open` makes one. Every method is safe from any thread; the calls that move bytes return a `Transfer` at once.
    A pool is a context manager that closes itself.
    """

    def __init__(
        self,
        opened: Opened,
        *,
        deadline: float | None,
        checkpoints: int,
        movers: Movers,
        hot_movers: Movers | None = None,
        threads: int = 2,
        rewarm: bool = False,
        max_idle: float | None = None,
        wipe_on_drop: bool = False,
        verify: Verify = "first",
    ) -> None:
        self.path = opened.path
        self.layout: Layout = opened.description.layout
        self._opened = opened
        self._catalog, self._space, self._ledger = opened.catalog, opened.space, opened.ledger
        self._deadline = deadline
        self._older_checkpoints = checkpoints
        self._movers = movers
        self._hot_movers = hot_movers
        self._boot = boot_id()
        self._readonly = opened.lock is None
        self._closed: str | None = None
        self._lingering = False
        self._lock = threading.RLock()
        self._traffic = Traffic(self._lock)
        self._matches = {"hits": 0, "misses": 0}
        # Leases of matches that nobody closed.
        self._orphans: deque[Version] = deque()
        self._checks = Checks(self._lock, self._catalog, self._space, self._ledger, verify)
        if not self._readonly:
            self._checks.load()
        self._hot = None if hot_movers is None else self._load_hot(opened, hot_movers, threads)
        self._writer = Writer(
            self._lock,
            self._catalog,
            self._space,
            self._ledger,
            self._traffic,
            self._hot,
            self._deadline,
            self._ended,
        )
        self._room = Room(
            self._lock,
            self._catalog,
            self._space,
            self._ledger,
            self._traffic.parking,
            forget=movers.forget,
            grown=movers.prepare,
            bring=self._writer.bring,
        )
        self._housekeeping: Housekeeping | None = None
        self._expiry: Expiry | None = None
        self._seen_changes = -1
        # Those that a caller, or rewarming, asked for: nothing is lost without them.
        self._prefetches: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._rewarming: threading.Thread | None = None
        if not self._readonly:
            self._begin_wiping(wipe_on_drop)
        try:
            self._start(max_idle, rewarm=rewarm)
        except BaseException:
            self._closed = "its opening failed"
            self._stop()
            raise
        _open_pools.add(self)

    def _start(self, max_idle: float | None, *, rewarm: bool) -> None:
        """Start the threads of an owner."""
        self._writer.start()
        if not self._readonly:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
            self._catalog.set_property("owner", owner)
            if max_idle is not None:
                self._expiry = Expiry(
                    self._lock, self._ledger, self._traffic.parking, drop=self._drop, max_idle=max_idle
                )
            expire = () if self._expiry is None else (self._expiry.drop_idle,)
            self._housekeeping = Housekeeping(
                self._lock,
                self._catalog,
                self._traffic,
                drop=self.drop,
                stats=self._stats,
                chores=(
                    self._release_orphans,
                    self._catalog.keep_reserve,
                    self._keep_spare,
                    self._relieve_ram,
                    self._wipe_freed,
                    *expire,
                ),
            )
        if rewarm and self._hot is not None:
            self._rewarming = started(self._rewarm, "mmkv-rewarm")

    def _stop(self) -> None:
        """Stop the threads, and wait for them; the catalog learns what it has still to."""
        with ExitStack() as stopping:
            if self._housekeeping is not None:
                stopping.callback(self._housekeeping.stop)
            # Under the eyes of housekeeping: what hangs passes its deadline.
            stopping.callback(self._traffic.wait_until_quiet)
            stopping.callback(self._writer.stop)

    def _begin_wiping(self, wanted: bool) -> None:
        """Overwrite what is dropped from now on, and what was before, unless that is known to be done."""
        wiped = self._catalog.get_property("wiped")
        if wanted:
            for tier in self._tier_spaces():
                tier.wipe_what_is_freed(all_free=wiped is not True)
        if wiped:
            self._catalog.set_property("wiped", False)

    def _tier_spaces(self) -> list[Space]:
        return [self._space] if self._hot is None else [self._space, self._hot.space]

    def _load_hot(self, opened: Opened, movers: Movers, threads: int) -> Hot:
        assert opened.hot is not None
        hot = Hot(
            self._lock,
            self._catalog,
            self._space,
            opened.hot.space,
            self._ledger,
            threads=threads,
            forget=movers.forget,
            grown=movers.prepare,
            promotion=self._promotion,
            doubt=self._checks.doubt,
        )
        try:
            hot.load(opened.hot.residents)
        except ValueError as error:
            raise PoolCorrupt(f"the catalog {self._catalog.path} is damaged: {error}") from error
        return hot

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        layout: Layout | None = None,
        *,
        capacity: int | str | None = None,
        hot: str | os.PathLike[str] | Literal[False] | None = None,
        hot_capacity: int | str | None = None,
        rewarm: bool = False,
        readonly: bool = False,
        verify: Verify = "first",
        deadline: float | None = 60.0,
        checkpoints: int = 2,
        max_idle: float | None = None,
        wipe_on_drop: bool = False,
        min_free_ram: int | str | None = None,
        catalog: str | os.PathLike[str] | None = None,
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
        hot : path or False, optional
            A directory in RAM (tmpfs) for a second tier before `path`: what is parked lands there and is written to
            `path` in the background, what is taken comes from there if it is there. By default the one that the pool
            was opened with last, if any; `False` gives it up, after everything in it was brought to `path`.
        hot_capacity : int or str, optional
            The most bytes that the files of the hot tier take. Needed for a new one.
        rewarm : bool
            Whether to bring the most recently used conversations into the hot tier, which there must be, in the
            background, as far as they find free room.
        readonly : bool
            Whether to look only, also beside the pool's owner: `match`, `info`, `conversations`, `stats`. A match's
            lease does not bind the owner.
        verify : str
            When a take compares the bytes in the slot with the checksums that were parked with them: `always`; `first`,
            the first time after they came from a disk, from another process or from another boot; or `never`, when
            parks take no checksums either. What was parked without any cannot be checked.
        deadline : float or None
            Seconds after which a transfer fails with `TransferTimeout`.
        checkpoints : int
            How many older checkpoints a conversation keeps, beside the newest and the one at the last boundary.
        max_idle : float, optional
            Seconds after which a conversation that was neither parked nor taken is dropped; the time that the pool was
            closed counts. What is pinned or leased stays. Holds for this opening, and is kept nowhere.
        wipe_on_drop : bool
            Whether to overwrite with zeros what was dropped, evicted or replaced, before its place is used again and at
            the latest at `close`; the background does so within seconds, at the speed of the medium. After an opening
            without, or a crash, opening overwrites all free blocks first.
        min_free_ram : int or str, optional
            Bytes of RAM that a pool in RAM leaves free as it grows; by default a 16th of it, at most 1 GiB.
        catalog : path, optional
            A file outside of the directory that is the pool's catalog: for a pool on a shared file system, one on a
            local disk. Its own directory must exist, and only its owner may write it. Where a pool was created with
            one, it is always to be given.
        threads : int, optional
            How many threads copy at once in one transfer; by default the number of cores, 2 to 12.
        store : str
            How device arrays move to and from `path`: `auto`, or one of `mapped` (page-locked map), `direct` (kvikio),
            `posix`.

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
        where = as_path(path, "path")
        size = None if capacity is None else parse_bytes(capacity, "capacity")
        free = None if min_free_ram is None else (0 if min_free_ram == 0 else parse_bytes(min_free_ram, "min_free_ram"))
        if store not in _STORES:
            raise ValueError(f"store must be one of {', '.join(_STORES)}, not {store!r}")
        checked = as_verify(verify)
        _require_seconds(deadline, "deadline")
        _require_seconds(max_idle, "max_idle")
        older = as_count(checkpoints, "checkpoints", least=0)
        lanes = max(2, min(_MAX_THREADS, os.cpu_count() or 2)) if threads is None else threads
        lanes = as_count(lanes, "threads", least=1)
        elsewhere = None if catalog is None else as_path(catalog, "catalog")
        hot_size = None if hot_capacity is None else parse_bytes(hot_capacity, "hot_capacity")
        hot_path = None if hot is None or hot is False else as_path(hot, "hot")
        with refusals(f"cannot open the pool at {where}"):
            if readonly:
                opened = open_reader(where, layout, elsewhere)
            else:
                former = hot_of(where, elsewhere) if hot is not None or rewarm else None
                if rewarm and hot_path is None and (former is None or hot is False):
                    raise ValueError(f"rewarm is True, but the pool at {where} has no hot tier: give one as hot=")
                if hot is not None and former is not None and former != hot_path:
                    _leave_hot(cls, where, layout, elsewhere)
                opened = open_owner(where, layout, size, free, elsewhere, (hot_path, hot_size))
        try:
            # Path and hot tier may lie on different media, whose stores differ.
            movers = Movers(where, opened.medium, store, lanes, opened.space.allocated)
            hot_movers = None
            if opened.hot is not None:
                hot_movers = Movers(opened.hot.path, opened.hot.medium, "auto", lanes, opened.hot.space.allocated)
            pool = cls(
                opened,
                deadline=deadline,
                checkpoints=older,
                movers=movers,
                hot_movers=hot_movers,
                threads=lanes,
                rewarm=rewarm,
                max_idle=max_idle,
                wipe_on_drop=bool(wipe_on_drop),
                verify=checked,
            )
        except BaseException:
            opened.close()
            raise
        try:
            pool._shrink_hot()
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
        slot: Slot | PagedSlot,
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
        slot : Slot or PagedSlot
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
        transfer, begin = self._prepare_park(
            conversation,
            slot,
            token_ids,
            namespace=namespace,
            share=share,
            durable=durable,
            boundary=boundary,
            stream=stream,
        )
        begin()
        return transfer

    def _prepare_park(
        self,
        conversation: str,
        slot: Slot | PagedSlot,
        token_ids: Any,
        *,
        namespace: str,
        stream: Any,
        share: bool = True,
        durable: bool = False,
        boundary: bool = False,
        handover: Handover | None = None,
    ) -> tuple[Transfer, Callable[[], None]]:
        """A park with its space reserved, and the function that begins it."""
        name = conversation_id(conversation)
        self._require_owner()
        self._require_slot(slot)
        where = as_text(namespace, "namespace", least=0)
        ids = as_token_ids(token_ids)
        if not len(ids):
            raise ValueError("a conversation has one token at least: token_ids is empty")
        _require_room(slot, len(ids))
        states = states_aside(slot.memory, stream)
        after = cuda.producer_events(slot.memory.devices, stream)
        self._traffic.enter_park(name, self._require_owner)
        park: Park | None = None
        try:
            park = Park(
                self._lock,
                self._catalog,
                self._space,
                self._ledger,
                self._room,
                self._hot,
                self._writer,
                self._checks,
                boot=self._boot,
                older=self._older_checkpoints,
                name=name,
                namespace=where,
                ids=ids,
                share=share,
                durable=durable,
                boundary=boundary,
            )
            route = self._route(park.placements(), slot, states)
            park.sums = self._checks.park_sums(slot, () if park.record is None else states, park.delta.start, ids)
            transfer = self._park_transfer(name, park, slot, route, handover)
            self._traffic.enter(transfer, park.held_bytes, self._require_owner)
            self._traffic.begin_park(name, Parking(park, transfer))
        except BaseException:
            if park is not None:
                park.release()
            self._traffic.leave_park(name)
            raise

        def begin() -> None:
            sums = park.sums
            progress = None if sums is None else sums.progress(transfer, route.stores_by_layer)
            route.start("write", transfer, after, progress=progress)
            # Beside the rows, which are under way: the ids are a part of the transfer of their own.
            try:
                if sums is not None:
                    sums.begin(after)
                park.write_ids()
            except BaseException as error:
                transfer.failed(error if isinstance(error, Exception) else TransferError(f"interrupted: {error!r}"))
                if not isinstance(error, Exception):
                    raise
            finally:
                transfer.released()

        return transfer, begin

    def _route(
        self, placements: Sequence[Placement], slot: Slot | PagedSlot, states: Sequence[dict[str, Buffer]]
    ) -> Route:
        """The way of the bytes between a slot and where they are placed."""
        tiers = [(self._movers_of(share.space), layer_copies(share, slot, states)) for share in placements]
        if self._checks.verify != "never":
            self._checks.digester.prepare(slot.memory.devices)
        return plan_route(slot.memory, tiers)

    def _movers_of(self, space: Space) -> Movers:
        if space is self._space:
            return self._movers
        assert self._hot_movers is not None
        return self._hot_movers

    def _park_transfer(
        self, name: str, park: Park, slot: Slot | PagedSlot, route: Route, handover: Handover | None
    ) -> Transfer:
        def release(transfer: Transfer) -> None:
            if handover is not None:
                handover.park_ended(transfer)
            park.release()
            self._ended(transfer)

        transfer = Transfer(
            f"park of {name!r}",
            len(self.layout.layers),
            kind="park",
            parts=route.parts + 1 + (0 if park.sums is None else park.sums.parts),
            deadline=self._deadline,
            finish=partial(self._commit, park),
            release=release,
            tokens=park.tokens,
            tokens_written=park.tokens - park.delta.start,
            stores_by_layer=route.stores_by_layer,
        )
        if handover is not None:
            handover.leave(transfer, lambda layers: self._put_back(name, park, slot, layers))
        return transfer

    def _commit(self, park: Park | Arrival) -> None:
        self._require_held()
        park.commit()

    def _put_back(self, name: str, park: Park, slot: Slot | PagedSlot, layers: Sequence[int]) -> None:
        """Copy layers of a park that was not committed back into its slot, and wait for it."""
        tiers = [
            (self._movers_of(share.space), [copies[layer] for layer in layers])
            for share in park.all_placements()
            for copies in [layer_copies(share, slot, slot.memory.states)]
        ]
        route = plan_route(slot.memory, tiers)
        transfer = Transfer(
            f"return of {name!r}",
            len(self.layout.layers),
            parts=route.parts,
            deadline=None,
            finish=lambda: None,
            release=lambda _: None,
            stores_by_layer=route.stores_by_layer,
        )
        route.start("read", transfer)
        transfer.result()

    # Taking

    def take(
        self,
        source: Match | str,
        slot: Slot | PagedSlot,
        *,
        tokens: int | None = None,
        have: int = 0,
        stream: Any = None,
        verify: Verify | None = None,
    ) -> Transfer:
        """Copy a conversation, or a prefix of it, from the pool into a slot, layer by layer.

        A layer may be used as soon as it landed. Whether its bytes are those that were parked is known when `result`
        returns: show no token that depends on them before.

        Parameters
        ----------
        source : Match or str
            A match, whose version is taken, or a conversation, whose newest version is.
        slot : Slot or PagedSlot
            The arrays; rows `[have, tokens)` and the states are written, nothing else.
        tokens : int, optional
            How many leading tokens; by default the match's, or all. Where the layout has states, it must be a
            checkpoint's count.
        have : int
            The caller's promise that the slot holds that many leading tokens.
        stream : stream, or mapping of int to stream, optional
            What last used the slot; see `park`.
        verify : str, optional
            Whether its bytes are checked; by default as the pool was opened.

        Raises
        ------
        ConversationNotFound
            There is no such conversation.
        ConversationCorrupt
            Some of it is in quarantine. Where that is found now, the transfer's `result` raises it.
        ValueError, TypeError, LayoutMismatch
            An argument is wrong.
        """
        checked = None if verify is None else as_verify(verify)
        transfer, begin = self._prepare_take(source, slot, tokens, have, stream, verify=checked)
        begin(None)
        return transfer

    def _prepare_take(
        self,
        source: Match | str,
        slot: Slot | PagedSlot,
        tokens: int | None,
        have: int,
        stream: Any,
        *,
        parts: int = 0,
        verify: Verify | None = None,
    ) -> tuple[Transfer, Callable[[Gate | None], None]]:
        """A take with its version leased, and the function that begins it; `parts` more must release it."""
        self._require_owner()
        self._require_slot(slot)
        slot.memory.require_writable()
        with self._lock:
            name, _, version, default = self._resolve(source)
            if version is None:
                return self._empty_take(parts)
            count = self._prefix_tokens(name, version, default, tokens)
            have = as_count(have, "have", least=0)
            self._require_page_end(have, count, version, name)
            if have > count:
                raise ValueError(f"have is {have}, more than the {count} tokens that are taken")
            _require_room(slot, count)
            self._require_sound(name, version, count)
            self._ledger.lease(version)

        take: Take | None = None
        try:
            after = cuda.producer_events(slot.memory.devices, stream)
            self._require_whole()
            take = Take(
                self._lock,
                self._ledger,
                self._space,
                self._hot,
                name=name,
                version=version,
                have=have,
                count=count,
                promote=self._hot is not None and not (slot.memory.devices and self._movers.reaches_devices),
            )
            route = self._route(take.placements(), slot, slot.memory.states)
            check = self._verification(take, slot, self._checks.verify if verify is None else verify)

            def finish() -> None:
                if check is not None:
                    check.finish()
                    transfer.verified = check.bytes
                self._touch(name)

            transfer = Transfer(
                f"take of {name!r}",
                len(self.layout.layers),
                parts=route.parts + parts + (0 if check is None else len(check.shares)),
                deadline=self._deadline,
                finish=finish,
                release=partial(self._take_ended, take),
                tokens=count,
                tokens_written=count - have,
                stores_by_layer=route.stores_by_layer,
            )
            self._traffic.enter(transfer, take.held_bytes, self._require_owner)
        except BaseException:
            if take is None:
                self._release_lease(self._ledger, version)
            else:
                take.release(None)
            raise

        def begin(gate: Gate | None) -> None:
            progress = None if check is None else check.progress(transfer, route.stores_by_layer)
            route.start("read", transfer, after, _gates(take, gate), progress)
            if check is not None:
                check.start_scratch(transfer, _gates(take, None))

        return transfer, begin

    def _verification(self, take: Take, slot: Slot | PagedSlot, verify: Verify) -> Verification | None:
        if verify == "never":
            return None
        states = slot.memory.states
        return verification_of(self._checks, take, slot, states, self._movers_of, always=verify == "always")

    def _take_ended(self, take: Take, transfer: Transfer) -> None:
        take.release(transfer)
        self._ended(transfer)

    def _require_whole(self) -> None:
        self._catalog.require_there()
        self._space.require_whole()
        if self._hot is not None:
            self._hot.space.require_whole()

    def _empty_take(self, parts: int) -> tuple[Transfer, Callable[[Gate | None], None]]:
        transfer = Transfer(
            "take of nothing",
            len(self.layout.layers),
            parts=1 + parts,
            deadline=None,
            finish=lambda: None,
            release=lambda _: None,
        )
        return transfer, lambda _: transfer.released()

    def swap(
        self,
        slot: Slot | PagedSlot,
        *,
        leaving: str,
        leaving_ids: Any,
        arriving: Match | str,
        arriving_tokens: int | None = None,
        namespace: str = "",
        stream: Any = None,
    ) -> tuple[Transfer, Transfer]:
        """Park the conversation that is in a slot and take another in its place, layer by layer.

        What arrives is leased and the space for what leaves is reserved before anything moves; a layer is taken as
        soon as it is parked. If the park fails, the layers that were overwritten are copied back, and then both
        transfers fail; if the take fails, the park is finished and committed.

        Returns
        -------
        tuple of Transfer
            The park and the take.

        Raises
        ------
        ConversationNotFound, PoolFull, ValueError, TypeError, LayoutMismatch
            As of `park` and `take`; nothing has moved.
        """
        take, begin_take = self._prepare_take(arriving, slot, arriving_tokens, 0, stream, parts=1)
        handover = Handover(take)
        try:
            park, begin_park = self._prepare_park(
                leaving, slot, leaving_ids, namespace=namespace, stream=stream, handover=handover
            )
        except BaseException as error:
            take.abandon(TransferError(f"the park of {leaving!r} could not begin: {error}"))
            raise
        # The take first: a park that fails at once waits for what the take holds.
        begin_take(handover.gate)
        begin_park()
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
        where = as_text(namespace, "namespace", least=0)
        with self._reading():
            found, tokens = longest_prefix(self._ledger, self._space, ids, where, usable=self._usable_tokens)
            self._matches["hits" if found else "misses"] += 1
            if found is None:
                return Match()
            self._ledger.lease(found.version)
            # A reader's ledger is another one after the owner's next change.
            release = partial(self._release_lease, self._ledger)
            tier = "hot" if self._hot is not None and self._hot.has(found.version.extents, tokens) else "path"
            return Match(found.name, where, found.version, tokens, release, self._orphans.append, self, tier)

    def __contains__(self, conversation: object) -> bool:
        with self._reading():
            return isinstance(conversation, str) and conversation in self._ledger.conversations

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
            residents = self._catalog.residents()
            bad = {kind: set(self._ledger.quarantine.numbers(kind)) for kind in KINDS}
        infos = conversation_infos(rows, self._space.geometry, residents, bad)
        return next(info for info in infos if info.conversation == conversation)

    def stats(self) -> PoolStats:
        """The pool in figures."""
        with self._reading():
            return self._stats()

    def _stats(self) -> PoolStats:
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
            transfers=self._traffic.under_way,
            quarantined=self._traffic.quarantined_bytes,
            free_runs=blocks.free_runs,
            largest_free_run=blocks.largest_free_run * block_bytes,
            fragmentation=fragmentation,
            evictions=self._room.evictions,
            expirations=0 if self._expiry is None else self._expiry.expirations,
            moved=dict(self._traffic.moved),
            tiers=self._tiers(),
            under_way=self._traffic.progress(),
            **self._matches,
            **self._traffic.counters,
            **self._writer.counters,
            **self._checks.figures(self._ledger.quarantine),
            **({} if self._hot is None else self._hot.counters),
        )

    def _tiers(self) -> tuple[TierStats, ...]:
        path, hot, opened = self._path_tier(), self._hot, self._opened.hot
        if hot is None or opened is None:
            return (path,)
        warm = TierStats(
            name="hot",
            directory=str(opened.path),
            medium=opened.medium.fs_type,
            capacity=hot.space.capacity,
            allocated=hot.space.allocated_bytes,
            used=hot.space.used_bytes,
            dirty=hot.dirty_bytes,
            quarantined=0,
            trouble=_trouble(opened.require_there),
        )
        return warm, path

    def _path_tier(self) -> TierStats:
        return TierStats(
            name="path",
            directory=str(self.path),
            medium=self._opened.medium.fs_type,
            capacity=self._space.capacity,
            allocated=self._space.allocated_bytes,
            used=self._space.used_bytes,
            dirty=0,
            quarantined=self._traffic.quarantined_bytes,
            # The owner's files change while a reader looks.
            trouble="" if self._readonly else _trouble(self._space.require_whole) or self._writer.error or "",
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
        name = conversation_id(target)
        self._require_owner()
        uninterrupted(partial(self._fork, source, name, tokens))

    def _fork(self, source: Match | str, name: str, tokens: int | None) -> None:
        with self._lock:
            of, namespace, version, default = self._resolve(source)
            if version is None:
                raise ValueError("the match has no tokens: there is nothing to fork")
            if name in self._ledger.conversations or name in self._traffic.parking:
                raise ValueError(f"conversation {name!r} exists already: choose another id, or drop it first")
            count = self._prefix_tokens(of, version, default, tokens)
            self._require_page_end(0, count, version, of)
            self._require_sound(of, version, count)
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

    def import_file(
        self,
        file: str | os.PathLike[str],
        conversation: str | None = None,
        *,
        namespace: str | None = None,
        replace: bool = False,
    ) -> Receipt:
        """Take in a conversation that `mmkv-inspect export` wrote to a file, and wait until it is on the medium.

        Its bytes are trusted as a park's are: conversations of its namespace will share them.

        Parameters
        ----------
        file : path
            The file.
        conversation : str, optional
            Its id here; by default the one that it had.
        namespace : str, optional
            Its namespace here; by default the one that it had.
        replace : bool
            Whether to replace a conversation of that id.

        Raises
        ------
        LayoutMismatch
            It is of another layout.
        PoolFull
            There is no room.
        MmkvError, ValueError
            The file is damaged or no such file, or there is a conversation of that id.
        """
        self._require_owner()
        with Parcel(as_path(file, "file"), self.layout, self.path) as parcel:
            name = conversation_id(parcel.about.conversation if conversation is None else conversation)
            where = as_text(parcel.about.namespace if namespace is None else namespace, "namespace", least=0)
            self._traffic.enter_park(name, self._require_owner)
            arrival: Arrival | None = None
            try:
                arrival = Arrival(
                    self._lock,
                    self._catalog,
                    self._space,
                    self._ledger,
                    self._room,
                    self._checks,
                    boot=self._boot,
                    parcel=parcel,
                    name=name,
                    namespace=where,
                    replace=replace,
                )
                transfer = self._import_transfer(name, arrival)
                self._traffic.enter(transfer, arrival.held_bytes, self._require_owner)
            except BaseException:
                if arrival is not None:
                    arrival.release()
                self._traffic.leave_park(name)
                raise
            self._traffic.begin_park(name, Parking(arrival, transfer))
            transfer.begin()
            try:
                arrival.copy(transfer)
            except BaseException as error:
                transfer.failed(error if isinstance(error, Exception) else TransferError(f"interrupted: {error!r}"))
                if not isinstance(error, Exception):
                    raise
            finally:
                transfer.released()
            return transfer.result()

    def _import_transfer(self, name: str, arrival: Arrival) -> Transfer:
        def release(transfer: Transfer) -> None:
            arrival.release()
            self._ended(transfer)

        return Transfer(
            f"import of {name!r}",
            len(self.layout.layers),
            kind="park",
            parts=1,
            deadline=None,
            finish=partial(self._commit, arrival),
            release=release,
            tokens=arrival.tokens,
            tokens_written=arrival.tokens,
        )

    def drop(self, conversation: str) -> None:
        """Forget a conversation; a park of it that is under way is cancelled.

        Its blocks are free at once, those of leased versions with the last lease.

        Raises
        ------
        ConversationNotFound
            There is none of that id.
        """
        self._require_owner()
        _require_name(conversation)
        uninterrupted(partial(self._drop, conversation))

    def _drop(self, conversation: str) -> None:
        with self._lock:
            self._require_owner()
            parking = self._traffic.prepared(conversation)
            if parking is not None:
                parking.park.revoke()
                parking.transfer.cancel()
            if parking is None or conversation in self._ledger.conversations:
                self._find(conversation)
                self._catalog.drop([conversation])
                self._ledger.drop(conversation)

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
        """Wait until one conversation, or every one, is on the medium of the pool's path.

        Costs a write of what only the hot tier has, and a sync of the layer files. On a disk, what is flushed survives
        a loss of power; in RAM nothing does.

        Raises
        ------
        ConversationNotFound
            There is none of that id.
        MmkvError
            The medium refused; what was parked is as readable as before.
        """
        self._require_owner()
        with self._lock:
            found = [self._find(conversation)] if conversation is not None else []
            waiting = found or list(self._ledger.conversations.values())
        self._writer.bring(waiting)

    def prefetch(self, conversation: str) -> Transfer:
        """Bring a conversation into the hot tier ahead of its take. Counts as a use; gives way to takes.

        Returns
        -------
        Transfer
            Its layers land as they become hot; `cancel` ends it, unless a take waits for the same bytes by then.
            Without a hot tier, or where all is hot already, it is done and moved nothing.

        Raises
        ------
        ConversationNotFound
            There is none of that id.
        """
        self._require_owner()
        with self._lock:
            found = self._find(conversation)
            found.used = self._ledger.next_use()
            if self._housekeeping is not None:
                self._housekeeping.note_use(found.name, found.taken, found.used)
        return self._prefetch(found, evict=True)

    def _prefetch(self, conversation: Conversation, *, evict: bool) -> Transfer:
        with self._lock:
            name, version = conversation.name, conversation.version
            if not version.linked:
                raise ConversationNotFound(f"{name!r} was dropped from the pool at {self.path} meanwhile")
            self._ledger.lease(version)

        def release(transfer: Transfer) -> None:
            self._release_lease(self._ledger, version)
            self._ended(transfer)

        transfer = Transfer(
            f"prefetch of {name!r}",
            len(self.layout.layers),
            kind="prefetch",
            parts=1,
            deadline=self._deadline,
            finish=lambda: None,
            release=release,
            tokens=version.tokens,
        )
        try:
            held = extent_blocks(version.extents) * self._space.geometry.block_bytes
            self._traffic.enter(transfer, held, self._require_owner)
        except BaseException:
            self._release_lease(self._ledger, version)
            raise
        self._prefetches.add(transfer)
        transfer.begin()
        records = block_numbers(version.records)
        numbers: dict[Kind, Any] = {"blocks": block_numbers(version.extents), "checkpoints": records[-1:]}
        try:
            comes = self._hot is not None and self._hot.prefetch(numbers, transfer, evict=evict)
        except BaseException as error:
            transfer.abandon(error if isinstance(error, Exception) else TransferError(f"interrupted: {error!r}"))
            raise
        if not comes:
            transfer.released()
        return transfer

    def _promotion(self, what: str, size: int) -> Transfer:
        """The transfer of what a take brings into the hot tier: it has a deadline, and `close` waits for it."""
        transfer = Transfer(
            what,
            len(self.layout.layers),
            kind="prefetch",
            parts=1,
            deadline=self._deadline,
            finish=lambda: None,
            release=self._ended,
        )
        self._traffic.enter(transfer, size, self._require_owner)
        transfer.begin()
        return transfer

    def _rewarm(self) -> None:
        """Prefetch by recency, one conversation after the other, until one finds no free room."""
        assert self._hot is not None
        with self._lock:
            recent = list(reversed(self._ledger.least_recently_used()))
        for conversation in recent:
            with self._lock:
                if self._closed is not None or self._hot.is_full:
                    return
                if self._ledger.conversations.get(conversation.name) is not conversation:
                    continue
            try:
                self._prefetch(conversation, evict=False).result()
            except MmkvError as error:
                _log.info("rewarming ended early: %s", error)
                return

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
            fallen_back = self._room.with_fallback() if size < self._space.allocated_bytes else []
        self._writer.bring(fallen_back)
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
        """Wait for what is under way, bring everything to the medium, and close. A second call does nothing.

        Prefetches and rewarming are cancelled. The lock is kept while a transfer is in quarantine, whose hardware may
        still write to the files.

        Raises
        ------
        MmkvError
            Something could not be brought to the medium, or noted; the pool is closed all the same.
        """
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "it was closed"
        # Whatever fails, or is interrupted, the others are done.
        with ExitStack() as ending:
            ending.callback(self._leave)
            ending.callback(self._stop)
            for prefetch in list(self._prefetches):
                prefetch.cancel()
            if self._rewarming is not None and self._rewarming is not threading.current_thread():
                self._rewarming.join()
            self._traffic.wait_until_quiet()
            if not self._readonly and (self._hot is not None or not self._opened.medium.in_ram):
                self._writer.bring(list(self._ledger.conversations.values()))
            if self._space.wipes:
                self._wipe_all()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self._closed}" if self._closed else f"{len(self._ledger.conversations)} conversations"
        return f"Pool({str(self.path)!r}, model={self.layout.model!r}, {state})"

    # Within

    def _ended(self, transfer: Transfer) -> None:
        self._traffic.ended(transfer)
        with self._lock:
            if self._lingering and self._traffic.is_quiet:
                self._lingering = False
                self._let_go()

    def _wipe_all(self) -> None:
        self._wipe_freed()
        with self._lock:
            # What was freed meanwhile.
            self._wipe_freed()
            # What is in quarantine is freed later, and wiped by the next opening.
            self._catalog.set_property("wiped", self._traffic.is_quiet)

    def _leave(self) -> None:
        """Let go of the files, now or when what is in quarantine has ended."""
        with self._lock:
            # It may still write to the files: nobody else may own them before.
            self._lingering = not self._traffic.is_quiet
            if not self._lingering:
                self._let_go()

    def _let_go(self) -> None:
        """Close the files and give the lock up, whatever fails."""
        with ExitStack() as ending:
            ending.callback(_open_pools.discard, self)
            ending.callback(self._opened.close)
            if self._hot is not None and self._hot_movers is not None and self._opened.hot is not None:
                dirty = any(residents.dirty_count for residents in self._hot.residents.values())
                ending.callback(close_hot, self._opened.hot, self._opened.description, self._catalog, dirty=dirty)
                ending.callback(self._hot.close)
                ending.callback(self._hot_movers.close)
            ending.callback(self._checks.close)
            ending.callback(self._movers.close)

    def _require_owner(self) -> None:
        if self._closed is not None:
            raise PoolClosed(f"the pool at {self.path} cannot be used: {self._closed}")
        if self._readonly:
            raise MmkvError(f"the pool at {self.path} was opened with readonly=True: open it as its owner for this")
        self._require_held()

    def _require_held(self) -> None:
        if self._opened.lock is not None:
            self._opened.lock.require_held()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self._closed is not None:
            raise PoolClosed(f"the pool at {self.path} cannot be used: {self._closed}")
        with self._lock:
            self._catalog.require_there()
            if self._readonly:
                self._release_orphans()
                self._reload()
            yield

    def _reload(self) -> None:
        """Follow the owner's changes."""
        changes = self._catalog.change_counter()
        if changes != self._seen_changes:
            with self._catalog.snapshot():
                self._space.reload_segments()
                self._ledger = load_ledger(self._catalog, self._space)
                self._space.capacity = stored_capacity(self._catalog)
            self._seen_changes = changes

    def _require_slot(self, slot: Slot | PagedSlot) -> None:
        if not isinstance(slot, Slot | PagedSlot):
            raise TypeError(f"slot must be a Slot or a PagedSlot, not {type(slot).__name__}")
        if slot.layout is not self.layout and slot.layout.fingerprint != self.layout.fingerprint:
            raise LayoutMismatch(
                f"the slot's layout is not that of the pool at {self.path}: {difference(slot.layout, self.layout)}"
            )

    def _find(self, conversation: object) -> Conversation:
        conversation = _require_name(conversation)
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

    def _usable_tokens(self, version: Version, common: int) -> int:
        """How many of some leading tokens can be taken: up to a checkpoint, or to the end of an opaque page."""
        return usable_tokens(self.layout, version.row, common, self._ledger.quarantine.numbers("checkpoints"))

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

    def _require_sound(self, name: str, version: Version, count: int) -> None:
        """Raise `ConversationCorrupt` if some of the first `count` tokens, or the states there, are in quarantine."""
        quarantine = self._ledger.quarantine
        sound = quarantine.sound_tokens(version.extents, version.tokens, self._space.geometry.block_tokens)
        points = [point for point in version.row.checkpoints if point.tokens == count]
        if sound < count or len(quarantine.sound_points(points)) < len(points):
            usable = self._usable_tokens(version, min(sound, count))
            rest = f"take its first {usable} tokens, and read its prompt again from there on"
            raise ConversationCorrupt(
                f"{name!r} cannot be taken up to token {count}: some of what was parked for it is in quarantine, for "
                f"its bytes are others now; {rest if usable else 'read its prompt again'}"
            )

    def _require_page_end(self, have: int, count: int, version: Version, name: str) -> None:
        granule = self.layout.granule
        for what, tokens in (("have", have), ("tokens", count)):
            if tokens % granule and tokens != version.tokens:
                raise ValueError(
                    f"{what} is {tokens}, inside a page of {granule} tokens, which are opaque: of {name!r}, take "
                    f"{tokens // granule * granule} or {min(round_up(tokens, granule), version.tokens)}"
                )

    def _release_lease(self, ledger: Ledger, version: Version) -> None:
        with self._lock:
            ledger.release(version)

    def _keep_spare(self) -> None:
        # What a device copies to must be page-locked, which costs ten times the copy.
        page_locked = self._opened.medium.in_ram and self._movers.moves_device_arrays
        self._room.keep_spare(least_segments=1 if page_locked else 0)
        if self._hot is not None:
            self._hot.keep_spare(least_segments=1)

    def _relieve_ram(self) -> None:
        if self._hot is not None:
            self._hot.relieve()

    def _shrink_hot(self) -> None:
        """Bring the hot tier down to its capacity, after that was lowered."""
        hot = self._hot
        while hot is not None and hot.space.allocated_bytes > hot.space.capacity:
            if hot.give_back_one():
                continue
            self._writer.bring(list(self._ledger.conversations.values()))
            if not hot.give_back_one() and not hot.give_back_one(even_pinned=True):
                raise PoolFull(
                    f"the hot tier takes {hot.space.allocated_bytes} bytes, and what is under way in it keeps it from "
                    f"hot_capacity={hot.space.capacity}"
                )

    def _wipe_freed(self) -> None:
        self._room.wipe_some()
        if self._hot is not None:
            self._hot.wipe_freed()

    def _release_orphans(self) -> None:
        while self._orphans:
            self._release_lease(self._ledger, self._orphans.popleft())

    def _touch(self, name: str) -> None:
        with self._lock:
            found = self._ledger.conversations.get(name)
            if found is not None:
                found.taken, found.used = time.time(), self._ledger.next_use()
                if self._housekeeping is not None:
                    self._housekeeping.note_use(name, found.taken, found.used)

    def _abandon(self) -> None:
        """Make this copy of the pool, in a forked child, a closed one that holds no lock."""
        self._closed = (
            "this process is a forked child of its owner, which has no pool; open it anew after the owner closed it"
        )
        # A thread that is not here may hold the lock.
        self._lock = threading.RLock()
        if self._opened.lock is not None:
            self._opened.lock.abandon()
        self._catalog.leak()
        self._space.close()
        if self._opened.hot is not None:
            self._opened.hot.lock.abandon()
            self._opened.hot.space.close()


def _trouble(check: Callable[[], None]) -> str:
    """What a check raises, in words; empty where it is content."""
    try:
        check()
    except MmkvError as error:
        return str(error)
    return ""


def _gates(take: Take, handover: Gate | None) -> Gate | None:
    """What has to be waited for before a layer of a slot is overwritten: its bytes, and who leaves the slot."""
    if not take.waits:
        return handover

    def gate(layer: int) -> Event | None:
        take.wait(layer)
        return None if handover is None else handover(layer)

    return gate


def _leave_hot(pool: type[Pool], path: Path, layout: Layout | None, catalog: Path | None) -> None:
    """Bring what the hot tier of a pool has to the path, and forget it."""
    with pool.open(path, layout, catalog=catalog):
        # Closing brings everything to the path.
        pass
    forget_stored_hot(path, catalog)


def _require_room(slot: Slot | PagedSlot, tokens: int) -> None:
    if slot.max_tokens is not None and tokens > slot.max_tokens:
        raise ValueError(f"the slot holds {slot.max_tokens} tokens, fewer than the {tokens} that were asked for")


def _require_name(conversation: object) -> str:
    if not isinstance(conversation, str):
        raise TypeError(f"a conversation's id is a string, not {conversation!r}")
    return conversation


def _require_seconds(value: object, what: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be seconds or None, not {value!r}")
    if not float(value) > 0:
        raise ValueError(f"{what} must be positive seconds or None, not {value!r}")


_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _abandon_pools() -> None:
    for pool in list(_open_pools):
        pool._abandon()


os.register_at_fork(after_in_child=_abandon_pools)
