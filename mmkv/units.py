"""Units, the bytes that one checksum covers, and what is known of those of each number.

A block has a unit for each plane of each layer, and one for its ids; a record has one for each state. Their checksums
cover the tokens that were parked into the block, and belong to its number: whoever shares the block shares them, and in
which tier it lies does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmkv.blocks import BlockAllocator
from mmkv.castagnoli import Values
from mmkv.geometry import ID_BYTES
from mmkv.layout import Layout
from mmkv.space import Kind

__all__ = ["IDS", "Columns", "Spans", "Unit", "Units"]

_Numbers = npt.NDArray[np.int64]

# The name of the ids where one of a plane is asked for; their layer is -1.
IDS = "token_ids"


class Unit(NamedTuple):
    """A unit of a block, or of a record.

    Attributes
    ----------
    layer, name : int and str
        The layer, and the plane or the state.
    bytes : int
        Bytes of a token; of a state, all.
    """

    layer: int
    name: str
    bytes: int


class Columns:
    """The units of a layout, each a column of a table of checksums: layer after layer, the ids last.

    Attributes
    ----------
    blocks, checkpoints : tuple of Unit
        Those of a block and of a record.
    planes, states : tuple of slice
        The columns of each layer.
    """

    def __init__(self, layout: Layout) -> None:
        blocks: list[Unit] = []
        checkpoints: list[Unit] = []
        planes, states = [], []
        for index, layer in enumerate(layout.layers):
            planes.append(slice(len(blocks), len(blocks) + len(layer.planes)))
            blocks += [Unit(index, name, plane.token_bytes) for name, plane in layer.planes.items()]
            states.append(slice(len(checkpoints), len(checkpoints) + len(layer.state)))
            checkpoints += [Unit(index, name, state.bytes) for name, state in layer.state.items()]
        self.blocks = (*blocks, Unit(-1, IDS, ID_BYTES))
        self.checkpoints = tuple(checkpoints)
        self.planes, self.states = tuple(planes), tuple(states)

    def of(self, kind: Kind) -> tuple[Unit, ...]:
        """The units of a number of `kind`."""
        return self.blocks if kind == "blocks" else self.checkpoints


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of consecutive blocks of a conversation, each within one block; int64, shape (spans,).

    Attributes
    ----------
    token : ndarray
        The first token of each, in rising order.
    tokens : ndarray
        How many there are.
    """

    token: _Numbers
    tokens: _Numbers

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def cut(cls, start: int, stop: int, block_tokens: int) -> Spans:
        """The tokens `[start, stop)`, cut where blocks end."""
        if stop <= start:
            return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        borders = np.arange(start // block_tokens + 1, -(-stop // block_tokens), dtype=np.int64) * block_tokens
        token = np.append(start, borders)
        return cls(token, np.diff(np.append(token, stop)))

    def rounded(self, granule: int) -> Spans:
        """The rows that move with these tokens: whole pages, where those are opaque."""
        if granule == 1:
            return self
        return Spans(self.token, _round_up(self.token + self.tokens, granule) - self.token)


def _round_up(values: _Numbers, multiple: int) -> _Numbers:
    rounded: _Numbers = -(-values // multiple) * multiple
    return rounded


class Units:
    """The checksums of the numbers of one kind. The pool's lock guards it.

    Of each number it is known how many of its tokens they cover (of a record, 1), none where it has no checksums; and
    whether its bytes were proven since they came from a medium or from another process.

    Parameters
    ----------
    allocator : BlockAllocator
        The numbers of the path.
    columns : int
        How many units a number has.
    """

    def __init__(self, allocator: BlockAllocator, columns: int) -> None:
        self._allocator = allocator
        self._columns = columns
        self._tokens = np.zeros(0, dtype=np.int32)
        self._proven = np.zeros(0, dtype=bool)
        self._values = np.zeros((0, columns), dtype=np.uint32)

    def tokens(self, numbers: _Numbers) -> _Numbers:
        """How many tokens the checksums of each of `numbers` cover; 0 where it has none."""
        self._cover()
        return self._tokens[numbers].astype(np.int64)

    def values(self, numbers: _Numbers) -> Values:
        """The checksums of `numbers`; uint32, shape (numbers, columns)."""
        self._cover()
        return self._values[numbers]

    def proven(self, numbers: _Numbers) -> npt.NDArray[np.bool_]:
        """Whether the bytes of each of `numbers` need no proof."""
        self._cover()
        return self._proven[numbers]

    def put(
        self, numbers: _Numbers, tokens: _Numbers, values: Values, proven: npt.NDArray[np.bool_] | bool = False
    ) -> None:
        """What is known of `numbers` from now on."""
        self._cover()
        self._tokens[numbers], self._values[numbers], self._proven[numbers] = tokens, values, proven

    def forget(self, numbers: _Numbers) -> None:
        """Nothing is known of `numbers`, which somebody writes who takes no checksums."""
        self._cover()
        self._tokens[numbers], self._proven[numbers] = 0, False

    def prove(self, numbers: _Numbers) -> None:
        """The bytes of `numbers` are those that were parked."""
        self._cover()
        self._proven[numbers] = True

    def doubt(self, numbers: _Numbers) -> None:
        """The bytes of `numbers` came from a medium."""
        self._cover()
        self._proven[numbers] = False

    @property
    def unknown(self) -> int:
        """How many of the numbers that are held have no checksums."""
        self._cover()
        counts = self._allocator.counts
        return int(np.count_nonzero((counts > 0) & (self._tokens[: len(counts)] == 0)))

    def _cover(self) -> None:
        missing = len(self._allocator.counts) - len(self._tokens)
        if missing > 0:
            self._tokens = np.concatenate([self._tokens, np.zeros(missing, dtype=np.int32)])
            self._proven = np.concatenate([self._proven, np.zeros(missing, dtype=bool)])
            self._values = np.concatenate([self._values, np.zeros((missing, self._columns), dtype=np.uint32)])
