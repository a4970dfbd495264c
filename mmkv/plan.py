"""The copies of a transfer: which bytes of a slot's arrays go where in the pool's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer
from mmkv.geometry import Extent
from mmkv.paged import PagedSlot
from mmkv.slot import Slot
from mmkv.space import Space
from mmkv.store.contract import Copy, LayerCopies

__all__ = ["layer_copies"]

_Runs: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def layer_copies(
    space: Space,
    slot: Slot | PagedSlot,
    extents: Sequence[Extent],
    start: int,
    stop: int,
    *,
    states: Sequence[dict[str, Buffer]] | None = None,
    record: int | None = None,
) -> list[LayerCopies]:
    """The copies between a slot and the rows `[start, stop)` of a version, layer by layer.

    Parameters
    ----------
    space : Space
        The pool's files.
    slot : Slot or PagedSlot
        The arrays.
    extents : sequence of Extent
        Where the version lies.
    start, stop : int
        The tokens whose rows move.
    states : sequence of dict of str to Buffer, optional
        The state arrays of each layer, which move to or from `record`.
    record : int, optional
        The checkpoint's record; without one, states do not move.
    """
    geometry = space.geometry
    runs, rows = slot.place(geometry.token_runs(extents, start, stop))
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
        if state_file is not None and record is not None and states is not None:
            for name, buffer in states[layer].items():
                offset = geometry.state_offset(layer, name, record)
                copies.append(Copy(name, state_file, buffer, _one(offset), _one(0), _one(buffer.bytes)))
        layers.append(LayerCopies(layer, tuple(copies)))
    return layers


def _one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([value], dtype=np.int64)
