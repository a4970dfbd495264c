"""Host memory for whole blocks of a conversation, of which a slot takes only some rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer, allocate_host, buffer_of
from mmkv.geometry import Geometry, TokenRuns

__all__ = ["Scratch"]


@dataclass(frozen=True, slots=True)
class _Memory:
    planes: tuple[Mapping[str, Buffer], ...]


class Scratch:
    """The planes of some blocks, one block behind the other; stands in the place of a slot.

    Parameters
    ----------
    geometry : Geometry
        The sizes of a block.
    positions : ndarray of int64
        Which blocks of the conversation, in rising order.
    """

    def __init__(self, geometry: Geometry, positions: npt.NDArray[np.int64]) -> None:
        self._block_tokens = geometry.block_tokens
        self._positions = positions
        rows = len(positions) * geometry.block_tokens
        self.memory = _Memory(
            tuple(
                {
                    name: buffer_of(allocate_host((rows * plane.token_bytes,), "uint8"))
                    for name, plane in layer.planes.items()
                }
                for layer in geometry.layout.layers
            )
        )

    def place(self, runs: TokenRuns) -> tuple[TokenRuns, npt.NDArray[np.int64]]:
        """The runs, each of which lies in one of the blocks, and the row where each starts."""
        position, row = np.divmod(runs.token, self._block_tokens)
        return runs, np.searchsorted(self._positions, position) * self._block_tokens + row
