"""One take: the version that it leases, and where its tokens are until it ended."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.geometry import extent_blocks
from mmkv.hot import Hot, Reading
from mmkv.ledger import Ledger, Version
from mmkv.placement import Placement, place
from mmkv.sizes import round_up
from mmkv.space import Kind, Space
from mmkv.transfer import Transfer

__all__ = ["Take"]


class Take:
    """A leased version whose bytes are being brought, or are where they can be copied from.

    Parameters
    ----------
    lock, ledger, space, hot
        The pool's parts. The lock is not held.
    name : str
        The conversation.
    version : Version
        Its version, which has a lease that is this take's from here on.
    have, count : int
        The tokens `[have, count)` move.
    promote : bool
        Whether what is only at the path goes through the hot tier and stays there.

    Attributes
    ----------
    stop : int
        The rows `[have, stop)` move: whole pages, where those are opaque.
    positions, numbers : ndarray of int64
        Which blocks of the conversation hold them, and their numbers.
    record : int or None
        The record of its states.
    """

    def __init__(
        self,
        lock: threading.RLock,
        ledger: Ledger,
        space: Space,
        hot: Hot | None,
        *,
        name: str,
        version: Version,
        have: int,
        count: int,
        promote: bool,
    ) -> None:
        self._lock, self._ledger, self._space, self._hot = lock, ledger, space, hot
        self.name, self.version = name, version
        self.have, self.count = have, count
        self.stop = have if have == count else round_up(count, space.geometry.layout.granule)
        self.record = next((point.record for point in version.row.checkpoints if point.tokens == count), None)
        block_tokens = space.geometry.block_tokens
        last = -(-self.stop // block_tokens) if self.stop > have else have // block_tokens
        self.positions = np.arange(have // block_tokens, last, dtype=np.int64)
        self.numbers = block_numbers(version.extents)[self.positions]
        self._reading: Reading | None = None
        if hot is not None:
            records = np.array([] if self.record is None else [self.record], dtype=np.int64)
            self._reading = hot.read(repr(name), {"blocks": self.numbers, "checkpoints": records}, promote=promote)

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that the take holds until it ends."""
        return extent_blocks(self.version.extents) * self._space.geometry.block_bytes

    def placements(self) -> list[Placement]:
        """Where the rows and the states come from."""
        hot_record = -1
        if self._reading is not None and self.record is not None:
            hot_record = int(self._reading.places["checkpoints"][0])
        return self._placements(self.have, self.stop, self.record, hot_record)

    def placements_of(self, start: int, stop: int) -> list[Placement]:
        """Where the rows `[start, stop)` of blocks that are taken from lie, whether they are taken or not."""
        return self._placements(start, stop, None, -1)

    def _placements(self, start: int, stop: int, record: int | None, hot_record: int) -> list[Placement]:
        hot_blocks = None
        if self._reading is not None:
            block_tokens = self._space.geometry.block_tokens
            first = self.have // block_tokens
            touched = slice(start // block_tokens - first, -(-stop // block_tokens) - first)
            hot_blocks = self._reading.places["blocks"][touched if stop > start else slice(0)]
        return place(
            self._space,
            None if self._hot is None else self._hot.space,
            self.version.extents,
            start,
            stop,
            record,
            hot_blocks=hot_blocks,
            hot_record=hot_record,
        )

    def is_cold(self, kind: Kind) -> npt.NDArray[np.bool_]:
        """Which of the blocks, or whether the record, is read from the path without a stop in the hot tier."""
        if self._reading is not None:
            return self._reading.places[kind] < 0
        return np.ones(len(self.numbers) if kind == "blocks" else 1, dtype=bool)

    @property
    def waits(self) -> bool:
        """Whether some of it is still on its way into the hot tier."""
        return self._reading is not None and bool(self._reading.fills)

    def wait(self, layer: int) -> None:
        """Wait until a layer is where it is copied from.

        Raises
        ------
        TransferError
            It could not be brought there.
        """
        if self._reading is not None:
            for fill in self._reading.fills:
                fill.wait(layer)

    def release(self, transfer: Transfer | None) -> None:
        """Let go of everything. The receipt tells by which path the bytes came that a fill brought."""
        if self._hot is not None and self._reading is not None:
            for fill in self._reading.fills:
                if fill.path and transfer is not None:
                    transfer.moved(fill.path, 0)
            self._hot.end_reading(self._reading)
        with self._lock:
            self._ledger.release(self.version)
