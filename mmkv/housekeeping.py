"""A thread that looks after a pool a few times a second: deadlines, requests, what the catalog should know."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mmkv.catalog import Catalog
from mmkv.errors import ConversationNotFound, MmkvError
from mmkv.info import PoolStats
from mmkv.refused import started
from mmkv.traffic import Traffic

__all__ = ["Housekeeping"]

_log = logging.getLogger("mmkv")
_TICK_SECONDS = 0.2
_STATS_SECONDS = 1.0


class Housekeeping:
    """The chores of a pool's owner, on a daemon thread.

    Parameters
    ----------
    lock : RLock
        The pool's lock.
    catalog : Catalog
        Where requests come from, and uses and figures go to.
    traffic : Traffic
        The transfers, which have deadlines.
    drop : callable
        Carries out a request to drop a conversation.
    stats : callable
        Gives the figures.
    chores : sequence of callable
        What else is to be done at each tick.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        traffic: Traffic,
        *,
        drop: Callable[[str], None],
        stats: Callable[[], PoolStats],
        chores: Sequence[Callable[[], None]],
    ) -> None:
        self._lock = lock
        self._catalog = catalog
        self._traffic = traffic
        self._drop = drop
        self._stats = stats
        self._chores = chores
        self._used: dict[str, tuple[float | None, int]] = {}
        self._noted: dict[str, Any] | None = None
        self._noted_at = 0.0
        self._seen_changes = -1
        self._stopping = threading.Event()
        self._thread = started(self._run, "mmkv-housekeeping")

    def note_use(self, name: str, taken: float | None, used: int) -> None:
        """Let the catalog know of a use at the next tick."""
        with self._lock:
            self._used[name] = (taken, used)

    def stop(self) -> None:
        """End the thread, wait for it, and write down what it had still to."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self._note_uses()
            self._note_stats()
        except MmkvError as error:
            _log.warning("the last uses and figures are not in %s: %s", self._catalog.path, error)

    def _run(self) -> None:
        jobs = (self._expire, *self._chores, self._carry_out_requests, self._note_uses, self._note_stats_in_time)
        failing: set[int] = set()
        while not self._stopping.wait(_TICK_SECONDS):
            for number, job in enumerate(jobs):
                try:
                    job()
                    failing.discard(number)
                except Exception:
                    # No call owns this: tell once, and go on; what needs the catalog, too, meets the same error.
                    if number not in failing:
                        _log.exception("housekeeping of the pool of %s failed", self._catalog.path)
                    failing.add(number)

    def _expire(self) -> None:
        self._traffic.expire()

    def _note_stats_in_time(self) -> None:
        if time.monotonic() - self._noted_at > _STATS_SECONDS:
            self._note_stats()

    def _carry_out_requests(self) -> None:
        changes = self._catalog.change_counter()
        if changes == self._seen_changes:
            return
        requests = self._catalog.requests()
        for request in requests:
            if request.action != "drop":
                _log.warning("%s holds an unknown request: %r", self._catalog.path, request.action)
                continue
            try:
                self._drop(request.argument)
            except ConversationNotFound:
                _log.info("asked to drop %r, which is gone already", request.argument)
        if requests:
            self._catalog.remove_requests(request.id for request in requests)
        self._seen_changes = changes

    def _note_uses(self) -> None:
        with self._lock:
            if self._used:
                used, self._used = self._used, {}
                self._catalog.touch([(name, *use) for name, use in used.items()])

    def _note_stats(self) -> None:
        self._noted_at = time.monotonic()
        with self._lock:
            stats = asdict(self._stats())
            if stats != self._noted:
                self._catalog.set_property("stats", {**stats, "noted": time.time()})
                self._noted = stats
