"""Where a token's bytes lie: sizes of blocks, segments and regions, and the runs of a span of tokens.

A block is the smallest number of tokens for which every plane's unit, and the ids', is a multiple of 4096 bytes. A
plane of `b` bytes a token needs `4096 / gcd(b, 4096)` tokens for that, a power of two, so a block is the largest of
these; the ids' 8 bytes make it 512 at least.

A layer file is a row of equal segments. In a segment each plane has one region, the units of the segment's blocks in
their order, so that row `r` of a plane in segment `s` lies at `s * segment_bytes + region + r * token_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmkv.layout import Layer, Layout
from mmkv.sizes import round_up

__all__ = ["ID_BYTES", "Extent", "Geometry", "TokenRuns", "choose_geometry", "extent_blocks"]

ID_BYTES = 8
_UNIT = 4096
_HUGE_PAGE = 2 << 20
_SEGMENTS_PER_CAPACITY = 64
_MAX_FILE_SEGMENT = 1 << 30
# Padding regions to 2 MiB may cost at most this share of a segment; smaller pools pad to 4 KiB.
_MAX_PADDING = 1 / 64


class Extent(NamedTuple):
    """A run of consecutive blocks."""

    first: int
    blocks: int


def extent_blocks(extents: Sequence[Extent]) -> int:
    """How many blocks the extents hold."""
    return sum(extent.blocks for extent in extents)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRuns:
    """Token positions that are consecutive in a segment; arrays of int64, shape (runs,).

    Attributes
    ----------
    segment : ndarray
        The segment of each run.
    row : ndarray
        The run's first row in each region of that segment.
    token : ndarray
        The run's first token in the conversation.
    tokens : ndarray
        The run's length.
    """

    segment: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """The sizes that one pool fixes when it is created; they never change afterwards.

    Attributes
    ----------
    layout : Layout
        The pool's layout.
    block_tokens : int
        Tokens of a block.
    segment_blocks : int
        Blocks of a segment.
    segment_checkpoints : int
        Checkpoints of a segment of the state files; 0 where the layout has no states.
    alignment : int
        What regions and segments are aligned to, 4096 bytes or 2 MiB.
    """

    layout: Layout
    block_tokens: int
    segment_blocks: int
    segment_checkpoints: int
    alignment: int

    @cached_property
    def plane_regions(self) -> tuple[dict[str, tuple[int, int]], ...]:
        """For each layer, plane by plane: where its region starts in a segment, and its bytes a token."""
        regions = []
        for layer in self.layout.layers:
            start, layer_regions = 0, {}
            for name, plane in layer.planes.items():
                layer_regions[name] = (start, plane.token_bytes)
                start += round_up(self.segment_blocks * self.block_tokens * plane.token_bytes, self.alignment)
            regions.append(layer_regions)
        return tuple(regions)

    @cached_property
    def layer_segment_bytes(self) -> tuple[int, ...]:
        """Bytes of a segment in each layer's file."""
        rows = self.segment_blocks * self.block_tokens
        return tuple(
            sum(round_up(rows * plane.token_bytes, self.alignment) for plane in layer.planes.values())
            for layer in self.layout.layers
        )

    @cached_property
    def like_layer(self) -> tuple[int, ...]:
        """For each layer, the first one that is laid out like it, whose offsets are the same."""
        first: dict[Layer, int] = {}
        return tuple(first.setdefault(layer, index) for index, layer in enumerate(self.layout.layers))

    @cached_property
    def state_offsets(self) -> tuple[dict[str, int], ...]:
        """For each layer: where each state starts in a checkpoint's record."""
        offsets = []
        for layer in self.layout.layers:
            start, layer_offsets = 0, {}
            for name, state in layer.state.items():
                layer_offsets[name] = start
                start += round_up(state.bytes, 64)
            offsets.append(layer_offsets)
        return tuple(offsets)

    @cached_property
    def layer_record_bytes(self) -> tuple[int, ...]:
        """Bytes of one checkpoint's record in each layer's state file."""
        return tuple(
            round_up(sum(round_up(state.bytes, 64) for state in layer.state.values()), _UNIT)
            for layer in self.layout.layers
        )

    @property
    def layer_state_segment_bytes(self) -> tuple[int, ...]:
        """Bytes of a segment in each layer's state file."""
        return tuple(self.segment_checkpoints * size for size in self.layer_record_bytes)

    @property
    def tokens_segment_bytes(self) -> int:
        """Bytes of a segment in the file of ids."""
        return self.segment_blocks * self.block_tokens * ID_BYTES

    @cached_property
    def segment_bytes(self) -> int:
        """Bytes of a segment over all layers and the ids."""
        return sum(self.layer_segment_bytes) + self.tokens_segment_bytes

    @cached_property
    def state_segment_bytes(self) -> int:
        """Bytes of a segment of the state files over all layers."""
        return sum(self.layer_state_segment_bytes)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers and the ids, padding left out."""
        return self.block_tokens * (self.layout.token_bytes + ID_BYTES)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's records over all layers."""
        return sum(self.layer_record_bytes)

    @property
    def smallest_capacity(self) -> int:
        """The least capacity that holds one segment of each kind."""
        return self.segment_bytes + self.state_segment_bytes

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def token_runs(self, extents: Sequence[Extent], start: int, stop: int) -> TokenRuns:
        """The runs that hold tokens `[start, stop)` of a conversation that lies in `extents`.

        Costs a few array operations, whatever the number of layers and planes.
        """
        per_segment = self.segment_blocks * self.block_tokens
        pieces: list[tuple[int, int, int, int]] = []
        token = 0
        for first, count in extents:
            extent_tokens = count * self.block_tokens
            begin, end = max(start - token, 0), min(stop - token, extent_tokens)
            position = first * self.block_tokens + begin
            while begin < end:
                segment, row = divmod(position, per_segment)
                length = min(end - begin, per_segment - row)
                pieces.append((segment, row, token + begin, length))
                begin += length
                position += length
            token += extent_tokens
            if token >= stop:
                break
        columns = np.array(pieces, dtype=np.int64).reshape(-1, 4)
        return TokenRuns(*(np.ascontiguousarray(column) for column in columns.T))

    def block_runs(
        self, positions: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64], start: int, stop: int
    ) -> TokenRuns:
        """The runs that hold those of the tokens `[start, stop)` that lie in some blocks of a conversation.

        Parameters
        ----------
        positions, numbers : ndarray of int64, shape (blocks,)
            Which blocks of the conversation they are, in rising order, and their numbers.
        start, stop : int
            The tokens; each of the blocks holds some of them.
        """
        joined = np.zeros(len(numbers), dtype=bool)
        joined[1:] = (np.diff(positions) == 1) & (np.diff(numbers) == 1) & (numbers[1:] % self.segment_blocks > 0)
        heads = np.flatnonzero(~joined)
        last = np.append(heads[1:], len(numbers))[: len(heads)] - 1
        token = np.maximum(positions[heads] * self.block_tokens, start)
        end = np.minimum((positions[last] + 1) * self.block_tokens, stop)
        segment, block = np.divmod(numbers[heads], self.segment_blocks)
        row = block * self.block_tokens + token - positions[heads] * self.block_tokens
        return TokenRuns(segment, row, token, end - token)

    def plane_offsets(self, runs: TokenRuns, layer: int, name: str) -> npt.NDArray[np.int64]:
        """Where each run starts in the layer's file, for one plane; int64, shape (runs,)."""
        region, token_bytes = self.plane_regions[layer][name]
        return runs.segment * self.layer_segment_bytes[layer] + region + runs.row * token_bytes

    def id_offsets(self, runs: TokenRuns) -> npt.NDArray[np.int64]:
        """Where each run starts in the file of ids; int64, shape (runs,)."""
        return runs.segment * self.tokens_segment_bytes + runs.row * ID_BYTES

    def state_offset(self, layer: int, name: str, record: int) -> int:
        """Where a state of a checkpoint's record starts in the layer's state file."""
        return record * self.layer_record_bytes[layer] + self.state_offsets[layer][name]

    def to_json(self) -> dict[str, Any]:
        """The sizes as plain JSON values, without the layout."""
        return {
            "block_tokens": self.block_tokens,
            "segment_blocks": self.segment_blocks,
            "segment_checkpoints": self.segment_checkpoints,
            "alignment": self.alignment,
        }

    @classmethod
    def from_json(cls, layout: Layout, value: Any) -> Geometry:
        """The geometry that `to_json` wrote.

        Raises
        ------
        ValueError
            The sizes are not those of a pool of this layout.
        """
        names = ("block_tokens", "segment_blocks", "segment_checkpoints", "alignment")
        if not isinstance(value, dict) or any(type(value.get(name)) is not int for name in names):
            raise ValueError(f"the sizes must be integers named {', '.join(names)}, not {value!r}")
        geometry = cls(layout, *(value[name] for name in names))
        if geometry.block_tokens != block_tokens(layout):
            raise ValueError(
                f"block_tokens is {geometry.block_tokens}; this layout's blocks have {block_tokens(layout)}"
            )
        if geometry.alignment not in (_UNIT, _HUGE_PAGE):
            raise ValueError(f"alignment is {geometry.alignment}, not {_UNIT} or {_HUGE_PAGE}")
        if not 1 <= geometry.segment_blocks <= 1 << 40:
            raise ValueError(f"segment_blocks is {geometry.segment_blocks}")
        if (geometry.segment_checkpoints > 0) != (layout.state_bytes > 0) or geometry.segment_checkpoints > 1 << 40:
            raise ValueError(f"segment_checkpoints is {geometry.segment_checkpoints}")
        # One block or one checkpoint may itself be larger than the limit of a segment.
        sizes = [*geometry.layer_segment_bytes, geometry.tokens_segment_bytes] if geometry.segment_blocks > 1 else []
        sizes += [size for size in geometry.layer_state_segment_bytes if geometry.segment_checkpoints > 1]
        if max(sizes, default=0) > _MAX_FILE_SEGMENT:
            raise ValueError(f"a segment of {max(sizes)} bytes in one file is larger than {_MAX_FILE_SEGMENT}")
        return geometry


def block_tokens(layout: Layout) -> int:
    """The smallest number of tokens for which every plane's unit, and the ids', is a multiple of 4096 bytes."""
    sizes = {plane.token_bytes for layer in layout.layers for plane in layer.planes.values()} | {ID_BYTES}
    return max(_UNIT // math.gcd(size, _UNIT) for size in sizes)


def choose_geometry(layout: Layout, capacity: int) -> Geometry:
    """The sizes of a new pool: segments of about a 64th of the capacity, in one file at most 1 GiB.

    Raises
    ------
    ValueError
        The capacity holds not even one block and one checkpoint.
    """
    tokens = block_tokens(layout)
    if tokens % layout.granule:
        raise ValueError(
            f"opaque_page_tokens is {layout.granule}, but a block of this layout has {tokens} tokens: whole pages must "
            "fill a block"
        )
    block = Geometry(layout, tokens, 1, 1, _UNIT)
    has_states = layout.state_bytes > 0
    smallest = block.block_bytes + (block.checkpoint_bytes if has_states else 0)
    if capacity < smallest:
        raise ValueError(
            f"a capacity of {capacity} bytes is too small: a block of this layout has {tokens} tokens, and "
            f"{'with the states of one token count ' if has_states else ''}it takes {smallest} bytes"
        )
    target = capacity // _SEGMENTS_PER_CAPACITY
    largest_layer = max(*block.layer_segment_bytes, tokens * ID_BYTES)
    blocks = max(1, min(target // block.block_bytes, _MAX_FILE_SEGMENT // largest_layer))
    checkpoints = 0
    if has_states:
        checkpoints = max(1, min(target // block.checkpoint_bytes, _MAX_FILE_SEGMENT // max(block.layer_record_bytes)))
    small = Geometry(layout, tokens, blocks, checkpoints, _UNIT)
    # A power of two among the factors makes regions whole huge pages, at the price of a smaller segment.
    for count in (blocks, _rounder(blocks)):
        huge = Geometry(layout, tokens, count, checkpoints, _HUGE_PAGE)
        padding = huge.segment_bytes - count * block.block_bytes
        if max(huge.layer_segment_bytes) <= _MAX_FILE_SEGMENT and padding <= huge.segment_bytes * _MAX_PADDING:
            return huge
    return small


def _rounder(blocks: int) -> int:
    """At most a quarter fewer blocks, a multiple of as large a power of two as can be."""
    power = 1
    while blocks // (2 * power) * (2 * power) * 4 >= blocks * 3:
        power *= 2
    return blocks // power * power
