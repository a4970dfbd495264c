"""The ways to move conversations in and out of slots that `rotation` compares."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import mmkv
from benchmarks.contenders import wait_until_locked
from benchmarks.memory import Memory, PlaneRows
from benchmarks.rig import POOL_CONVERSATIONS
from benchmarks.rooms import LockedRoom, PageableRoom, Room
from benchmarks.work import Ids

__all__ = ["MOVERS", "Mover"]


class Mover(Protocol):
    """How conversations leave and enter slots. A method returns when its bytes are where they belong.

    Attributes
    ----------
    clears : bool
        Whether the slot may be cleared before a take, so that nothing but the take brings its bytes.
    most_turns : int
        How many turns are enough to know what one costs.
    """

    name: str
    title: str
    clears: bool
    most_turns: int

    @property
    def path(self) -> str:
        """The path that bytes took in the turns."""

    def ready(self) -> None:
        """All prompts are parked, and the turns begin."""

    def gave_back(self, slot: int, conversation: str, ids: Ids) -> None:
        """The conversation leaves its slot."""

    def takes(self, slot: int, conversation: str, tokens: int, leaving: str, leaving_ids: Ids) -> None:
        """The next one enters it, in the place of the one that left."""

    def parked(self, slot: int, conversation: str, ids: Ids) -> None:
        """It is some tokens longer, and is parked."""

    def close(self) -> None:
        """Give everything back."""


class _Rooms:
    """RAM with a room for each conversation, into which everything moves each time, or only what is new."""

    name = title = path = ""
    clears = True
    only_new = False
    most_turns = 1000

    def __init__(
        self, memory: Memory, layout: mmkv.Layout, slots: Sequence[mmkv.Slot], rows: Sequence[Sequence[PlaneRows]],
        max_tokens: int, directory: Path,
    ) -> None:  # fmt: skip
        del layout, slots, directory
        self._memory = memory
        self._rows = rows
        self._max_tokens = max_tokens
        self._rooms: dict[str, Room] = {}
        self._held: dict[str, int] = {}

    def _new_room(self) -> Room:
        return LockedRoom(self._memory, self._rows[0], self._max_tokens)

    def ready(self) -> None:
        pass

    def gave_back(self, slot: int, conversation: str, ids: Ids) -> None:
        self._out(slot, conversation, len(ids))

    def takes(self, slot: int, conversation: str, tokens: int, leaving: str, leaving_ids: Ids) -> None:  # noqa: ARG002
        self._rooms[conversation].back(self._rows[slot], 0, tokens)

    def parked(self, slot: int, conversation: str, ids: Ids) -> None:
        self._out(slot, conversation, len(ids))

    def _out(self, slot: int, conversation: str, tokens: int) -> None:
        room = self._rooms.get(conversation)
        if room is None:
            room = self._rooms[conversation] = self._new_room()
        start = self._held.get(conversation, 0) if self.only_new else 0
        if start < tokens:
            room.out(self._rows[slot], start, tokens)
        self._held[conversation] = tokens

    def close(self) -> None:
        for room in self._rooms.values():
            room.free()
        self._rooms.clear()


class Report(_Rooms):
    """The report's way: pageable, fresh from the heap at each park, synchronous, everything."""

    name, title, path = "report", "the report's way: pageable RAM, everything", "pageable"
    most_turns = 5

    def _new_room(self) -> Room:
        return PageableRoom(self._memory)


class RamEverything(_Rooms):
    """Page-locked RAM at the bus's speed, everything."""

    name, title, path = "ram_everything", "page-locked RAM, everything", "page-locked"


class RamNew(_Rooms):
    """Page-locked RAM at the bus's speed, out of the slot only what is new."""

    name, title, path = "ram_new", "page-locked RAM, only what is new", "page-locked"
    only_new = True


class Mmkv:
    """A pool: park and take."""

    name, title = "mmkv", "mmkv, park and take"
    clears = True
    most_turns = 1000

    def __init__(
        self, memory: Memory, layout: mmkv.Layout, slots: Sequence[mmkv.Slot], rows: Sequence[Sequence[PlaneRows]],
        max_tokens: int, directory: Path,
    ) -> None:  # fmt: skip
        del memory, rows
        self._slots = slots
        self._directory = directory
        self._paths: set[str] = set()
        capacity = POOL_CONVERSATIONS * max_tokens * (layout.token_bytes + 8) + (64 << 20)
        self._pool = mmkv.Pool.open(directory, layout, capacity=capacity)

    @property
    def path(self) -> str:
        """The paths that bytes took in the turns."""
        return "+".join(sorted({part for path in self._paths for part in path.split("+") if part != "none"}))

    def ready(self) -> None:
        wait_until_locked(self._pool)
        self._paths.clear()

    def gave_back(self, slot: int, conversation: str, ids: Ids) -> None:
        self._paths.add(self._pool.park(conversation, self._slots[slot], ids).result().path)

    def takes(self, slot: int, conversation: str, tokens: int, leaving: str, leaving_ids: Ids) -> None:  # noqa: ARG002
        self._paths.add(self._pool.take(conversation, self._slots[slot], tokens=tokens).result().path)

    def parked(self, slot: int, conversation: str, ids: Ids) -> None:
        self._paths.add(self._pool.park(conversation, self._slots[slot], ids).result().path)

    def close(self) -> None:
        self._pool.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class MmkvSwap(Mmkv):
    """A pool: what is new of one conversation leaves while the other enters. Nothing is parked at a turn's end."""

    name, title = "mmkv_swap", "mmkv, swap"
    clears = False

    def __init__(
        self, memory: Memory, layout: mmkv.Layout, slots: Sequence[mmkv.Slot], rows: Sequence[Sequence[PlaneRows]],
        max_tokens: int, directory: Path,
    ) -> None:  # fmt: skip
        super().__init__(memory, layout, slots, rows, max_tokens, directory)
        self._turning = False

    def ready(self) -> None:
        super().ready()
        self._turning = True

    def gave_back(self, slot: int, conversation: str, ids: Ids) -> None:
        if not self._turning:
            super().gave_back(slot, conversation, ids)

    def takes(self, slot: int, conversation: str, tokens: int, leaving: str, leaving_ids: Ids) -> None:
        park, take = self._pool.swap(
            self._slots[slot], leaving=leaving, leaving_ids=leaving_ids, arriving=conversation, arriving_tokens=tokens
        )
        self._paths |= {park.result().path, take.result().path}

    def parked(self, slot: int, conversation: str, ids: Ids) -> None:
        if not self._turning:
            super().parked(slot, conversation, ids)


MOVERS: dict[str, type[_Rooms] | type[Mmkv]] = {
    mover.name: mover for mover in (Report, RamEverything, RamNew, Mmkv, MmkvSwap)
}
