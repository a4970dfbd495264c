"""The copies of a transfer: which bytes of a slot's arrays go where in the pool's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer
from mmkv.geometry import TokenRuns
from mmkv.placement import Placement
from mmkv.store.contract import Copy, LayerCopies

__all__ = ["Arrays", "layer_copies"]

_Runs: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Memory(Protocol):
    """The buffers of a slot; see `SlotMemory`."""

    @property
    def planes(self) -> Sequence[Mapping[str, Buffer]]:
        """The arrays of the planes, by layer."""


class Arrays(Protocol):
    """What holds the rows of a conversation: a `Slot`, a `PagedSlot` or the like."""

    @property
    def memory(self) -> Memory:
        """Its arrays."""

    def place(self, runs: TokenRuns) -> tuple[TokenRuns, npt.NDArray[np.int64]]:
        """The runs as they lie in the arrays, and the row where each starts."""


def layer_copies(placement: Placement, slot: Arrays, states: Sequence[Mapping[str, Buffer]]) -> list[LayerCopies]:
    """The copies between a slot and one tier's share of a version, layer by layer.

    Parameters
    ----------
    placement : Placement
        The tier's files, and the runs and the record in them.
    slot : Slot, PagedSlot or the like
        The arrays.
    states : sequence of mapping of str to Buffer
        The state arrays of each layer, which move to or from the record.
    """
    space, record, geometry = placement.space, placement.record, placement.space.geometry
    runs, rows = slot.place(placement.runs)
    # Most models have many layers alike, whose runs are the same.
    plane_runs: dict[tuple[int, str], _Runs] = {}
    layers = []
    for layer, planes in enumerate(slot.memory.planes):
        copies = []
        file = space.planes[layer]
        if file is not None and len(runs.tokens):
            like = geometry.like_layer[layer]
            for name, (_, token_bytes) in geometry.plane_regions[layer].items():
                found = plane_runs.get((like, name))
                if found is None:
                    found = plane_runs[like, name] = (
                        geometry.plane_offsets(runs, layer, name),
                        rows * token_bytes,
                        runs.tokens * token_bytes,
                    )
                copies.append(Copy(name, file, planes[name], *found))
        state_file = space.states[layer]
        if state_file is not None and record is not None:
            for name, buffer in states[layer].items():
                offset = geometry.state_offset(layer, name, record)
                copies.append(Copy(name, state_file, buffer, _one(offset), _one(0), _one(buffer.bytes)))
        layers.append(LayerCopies(layer, tuple(copies)))
    return layers


def _one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([value], dtype=np.int64)
