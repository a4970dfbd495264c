"""The transfers under way: who is being parked, what is held until when, and what has moved so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, NamedTuple

from mmkv.info import TransferStats
from mmkv.transfer import Transfer

if TYPE_CHECKING:
    from mmkv.importing import Arrival
    from mmkv.parking import Park

__all__ = ["Parking", "Traffic"]


class Parking(NamedTuple):
    """A park under way and its transfer."""

    park: Park | Arrival
    transfer: Transfer


class Traffic:
    """Counts transfers in and out. `lock` is the pool's; methods take it themselves.

    Attributes
    ----------
    counters : dict of str to int
        Transfers and bytes, done and failed, since the pool was opened.
    moved : dict of str to int
        Bytes by path.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._changed = threading.Condition(lock)
        # `None` while a park is prepared.
        self._parking: dict[str, Parking | None] = {}
        self._held: dict[Transfer, int] = {}
        self.counters = dict.fromkeys(("parks", "takes", "failures", "bytes_parked", "bytes_taken"), 0)
        self.moved: dict[str, int] = {}

    @property
    def parking(self) -> Container[str]:
        """The conversations that are being parked."""
        return self._parking

    @property
    def under_way(self) -> int:
        """How many transfers are under way, those in quarantine left out."""
        return sum(not transfer.quarantined for transfer in self._held)

    def progress(self) -> tuple[TransferStats, ...]:
        """How far the transfers under way have come, the oldest first."""
        return tuple(transfer.stats() for transfer in self._held if not transfer.quarantined)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the blocks that transfers in quarantine hold."""
        return sum(size for transfer, size in self._held.items() if transfer.quarantined)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way, not even in quarantine."""
        return not self._held

    def enter_park(self, name: str, require_open: Callable[[], None]) -> None:
        """Wait until a conversation is not being parked, and let it be from now on."""
        with self._changed:
            while name in self._parking:
                self._changed.wait()
                require_open()
            require_open()
            self._parking[name] = None

    def leave_park(self, name: str) -> None:
        """Undo `enter_park`: nothing has begun."""
        with self._changed:
            self._parking.pop(name, None)
            self._changed.notify_all()

    @property
    def moves_slots(self) -> bool:
        """Whether a park or a take is under way, to which others give way."""
        with self._changed:
            return any(transfer.kind in ("park", "take") for transfer in self._held)

    def enter(self, transfer: Transfer, held_bytes: int, require_open: Callable[[], None]) -> None:
        """Count a transfer that holds so many bytes of blocks."""
        with self._changed:
            require_open()
            # From here on it is held, begun or not: so that one whose beginning was interrupted meets its deadline.
            transfer.begin()
            self._held[transfer] = held_bytes

    def begin_park(self, name: str, parking: Parking) -> None:
        """The park that `enter_park` made way for is prepared."""
        with self._changed:
            self._parking[name] = parking
            self._changed.notify_all()

    def prepared(self, name: str) -> Parking | None:
        """The park of a conversation that is under way, if one is; waits while it is being prepared."""
        with self._changed:
            while name in self._parking and self._parking[name] is None:
                self._changed.wait()
            return self._parking.get(name)

    def ended(self, transfer: Transfer) -> None:
        """Book a transfer that let go of everything."""
        kind = transfer.kind
        with self._changed:
            for name, parking in list(self._parking.items()):
                if parking is not None and parking.transfer is transfer:
                    del self._parking[name]
            self._held.pop(transfer, None)
            if kind in ("park", "take"):
                for path, size in transfer.moved_bytes.items():
                    self.moved[path] = self.moved.get(path, 0) + size
                self.counters["bytes_parked" if kind == "park" else "bytes_taken"] += sum(transfer.moved_bytes.values())
                self.counters["failures" if transfer.stopped else f"{kind}s"] += 1
            elif transfer.stopped:
                self.counters["failures"] += 1
            self._changed.notify_all()

    def expire(self) -> None:
        """End the transfers that passed their deadline, for those who wait.

        Their blocks stay held, so that nothing is appended to them, but a conversation may be parked anew.
        """
        with self._changed:
            under_way = list(self._held)
        for transfer in under_way:
            if transfer.expire():
                with self._changed:
                    for name, parking in list(self._parking.items()):
                        if parking is not None and parking.transfer is transfer:
                            del self._parking[name]
                    self._changed.notify_all()

    def wait_until_quiet(self) -> None:
        """Wait until nothing is under way but what is in quarantine."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: None not in self._parking.values() and all(transfer.quarantined for transfer in self._held)
            )
