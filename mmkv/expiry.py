"""Dropping what nobody has used for long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container
from typing import NamedTuple

from mmkv.errors import PoolClosed
from mmkv.ledger import Conversation, Ledger

__all__ = ["Expiry"]

_LOOK_SECONDS = 1.0
_log = logging.getLogger("mmkv")


class _Use(NamedTuple):
    """The last use of a conversation: its number in the order of use, and when it was, on the monotonic clock."""

    number: int
    at: float


class Expiry:
    """Drops conversations that were neither parked nor taken for a time.

    The wall clock is asked once, about what was parked before the pool was opened. From there on the monotonic one
    counts, so that a clock that is set in between drops nothing. A use counts from the look that finds it, which comes
    within a second.

    Parameters
    ----------
    lock : RLock
        The pool's lock.
    ledger : Ledger
        What is parked.
    busy : container of str
        The conversations that are being parked, which stay.
    drop : callable
        Drops a conversation.
    max_idle : float
        How many seconds.
    """

    def __init__(
        self,
        lock: threading.RLock,
        ledger: Ledger,
        busy: Container[str],
        *,
        drop: Callable[[str], None],
        max_idle: float,
    ) -> None:
        self._lock = lock
        self._ledger = ledger
        self._busy = busy
        self._drop = drop
        self._max_idle = max_idle
        self._looked = now = time.monotonic()
        wall = time.time()
        with lock:
            self._uses = {
                found.name: _Use(found.used, now - max(0.0, wall - max(found.parked, found.taken or 0.0)))
                for found in ledger.conversations.values()
            }
        self.expirations = 0

    def drop_idle(self) -> None:
        """Look once a second, and drop what is due. Costs a pass over the conversations."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for name in self._due(now):
            # One at a time: parks and takes may come in between.
            with self._lock:
                found = self._ledger.conversations.get(name)
                if found is None or not self._may_go(found):
                    continue
                try:
                    self._drop(name)
                except PoolClosed:
                    return
                self.expirations += 1
                _log.info("dropped %r, which was not used for %g s", name, now - self._uses[name].at)

    def _due(self, now: float) -> list[str]:
        with self._lock:
            found = list(self._ledger.conversations.values())
            self._uses = {one.name: self._last_use(one, now) for one in found}
            return [one.name for one in found if now - self._uses[one.name].at >= self._max_idle and self._may_go(one)]

    def _last_use(self, conversation: Conversation, now: float) -> _Use:
        known = self._uses.get(conversation.name)
        return known if known is not None and known.number == conversation.used else _Use(conversation.used, now)

    def _may_go(self, conversation: Conversation) -> bool:
        return (
            not conversation.pinned
            and conversation.version.leases == 0
            and conversation.name not in self._busy
            and conversation.used == self._uses[conversation.name].number
        )
