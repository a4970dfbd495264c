"""The copies between the two tiers: whole units and records, from files of the path to maps of the hot ones or back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer
from mmkv.geometry import Geometry
from mmkv.space import KINDS, Kind, Space
from mmkv.store.contract import Copy, LayerCopies
from mmkv.store.filemap import map_file
from mmkv.store.files import PoolFile

__all__ = ["Between", "Pairs"]

_Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Numbers of the path and the hot numbers that stand for them; int64, both of shape (numbers,)."""

    numbers: _Numbers
    hot: _Numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, where: slice | npt.NDArray[np.bool_]) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.numbers[where], self.hot[where])


class Between:
    """What lies between the tiers: maps of the hot files, and the copies that pairs of numbers mean.

    Parameters
    ----------
    path, hot : Space
        The files of both tiers.
    """

    def __init__(self, path: Space, hot: Space) -> None:
        self._path = path
        self._hot = hot
        self._maps = {
            file: map_file(file, _most_segments(hot, kind) * file.segment_bytes)
            for kind in KINDS
            for file in hot.files(kind)
        }

    def copies(self, pairs: Mapping[Kind, Pairs]) -> list[LayerCopies]:
        """The copies of some blocks and records, layer by layer. The buffers are maps of the hot files."""
        path, hot = self._path.geometry, self._hot.geometry
        blocks, records = pairs["blocks"], pairs["checkpoints"]
        heads, counts = _runs(blocks, path.segment_blocks, hot.segment_blocks)
        record_heads, record_counts = _runs(records, path.segment_checkpoints, hot.segment_checkpoints)
        known: dict[tuple[int, str], tuple[_Numbers, _Numbers, _Numbers]] = {}
        layers = []
        for layer in range(len(path.layout.layers)):
            copies = []
            file, target = self._path.planes[layer], self._hot.planes[layer]
            if file is not None and target is not None and len(heads):
                for name, (_, token_bytes) in path.plane_regions[layer].items():
                    like = (path.like_layer[layer], name)
                    if like not in known:
                        known[like] = (
                            _unit_offsets(path, blocks.numbers[heads], layer, name),
                            _unit_offsets(hot, blocks.hot[heads], layer, name),
                            counts * path.block_tokens * token_bytes,
                        )
                    copies.append(Copy(name, file, self._map(target), *known[like]))
            file, target = self._path.states[layer], self._hot.states[layer]
            if file is not None and target is not None and len(record_heads):
                size = path.layer_record_bytes[layer]
                in_path, in_hot = records.numbers[record_heads] * size, records.hot[record_heads] * size
                copies.append(Copy("state", file, self._map(target), in_path, in_hot, record_counts * size))
            layers.append(LayerCopies(layer, tuple(copies)))
        return layers

    def bytes(self, pairs: Mapping[Kind, Pairs]) -> int:
        """Bytes of some blocks and records."""
        return sum(len(pairs[kind]) * self._hot.number_bytes(kind) for kind in KINDS)

    def _map(self, file: PoolFile) -> Buffer:
        return self._maps[file]

    def close(self) -> None:
        """Unmap the files."""
        self._maps.clear()


def _most_segments(hot: Space, kind: Kind) -> int:
    """Where the segments of a tier end that it has, from a larger capacity perhaps, or may come to have."""
    return max(1, hot.capacity // hot.segment_bytes(kind), max(hot.allocator(kind).segments, default=0) + 1)


def _runs(pairs: Pairs, path_segment: int, hot_segment: int) -> tuple[_Numbers, _Numbers]:
    """Where runs of pairs start that are consecutive in both tiers and within a segment of each; and their lengths."""
    if not len(pairs):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    joined = np.zeros(len(pairs), dtype=bool)
    joined[1:] = (
        (np.diff(pairs.numbers) == 1)
        & (np.diff(pairs.hot) == 1)
        & (pairs.numbers[1:] % path_segment > 0)
        & (pairs.hot[1:] % hot_segment > 0)
    )
    heads = np.flatnonzero(~joined)
    return heads, np.diff(np.append(heads, len(pairs)))


def _unit_offsets(geometry: Geometry, numbers: _Numbers, layer: int, name: str) -> _Numbers:
    """Where the units of blocks start in the layer's file; int64, shape (blocks,)."""
    region, token_bytes = geometry.plane_regions[layer][name]
    segment, block = np.divmod(numbers, geometry.segment_blocks)
    offsets: _Numbers = (
        segment * geometry.layer_segment_bytes[layer] + region + block * geometry.block_tokens * token_bytes
    )
    return offsets
