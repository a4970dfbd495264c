"""One take: the version that it leases, and where its tokens are until it ended."""

from __future__ import annotations

import threading

import numpy as np

from mmkv.blocks import block_numbers
from mmkv.geometry import extent_blocks
from mmkv.hot import Hot, Reading
from mmkv.ledger import Ledger, Version
from mmkv.placement import Placement, place
from mmkv.sizes import round_up
from mmkv.space import Space
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
        self._version = version
        self._have = have
        self._stop = have if have == count else round_up(count, space.geometry.layout.granule)
        self._record = next((point.record for point in version.row.checkpoints if point.tokens == count), None)
        self._reading: Reading | None = None
        if hot is not None:
            block_tokens = space.geometry.block_tokens
            first, last = have // block_tokens, -(-self._stop // block_tokens)
            numbers = block_numbers(version.extents)[first : last if self._stop > have else first]
            records = np.array([] if self._record is None else [self._record], dtype=np.int64)
            self._reading = hot.read(repr(name), {"blocks": numbers, "checkpoints": records}, promote=promote)

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that the take holds until it ends."""
        return extent_blocks(self._version.extents) * self._space.geometry.block_bytes

    def placements(self) -> list[Placement]:
        """Where the rows and the states come from."""
        reading = self._reading
        record = -1
        if reading is not None and self._record is not None:
            record = int(reading.places["checkpoints"][0])
        return place(
            self._space,
            None if self._hot is None else self._hot.space,
            self._version.extents,
            self._have,
            self._stop,
            self._record,
            hot_blocks=None if reading is None else reading.places["blocks"],
            hot_record=record,
        )

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
            self._ledger.release(self._version)
