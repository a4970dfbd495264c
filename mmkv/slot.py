"""Slots: the engine's arrays that hold one running conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv import device as cuda
from mmkv.buffer import allocate_host
from mmkv.geometry import TokenRuns
from mmkv.layout import Layout
from mmkv.memory import SlotMemory
from mmkv.sizes import as_count

__all__ = ["Slot"]


class Slot:
    """The arrays of one running conversation; holds references, copies nothing.

    Parameters
    ----------
    layout : Layout
        What the arrays are laid out as.
    arrays : sequence of mapping of str to array
        `arrays[layer][plane]`, each of shape `(max_tokens, *plane.shape)`, C-contiguous: NumPy or CuPy arrays, Torch
        tensors, or anything that speaks DLPack or `__cuda_array_interface__`. A layer without planes takes an empty
        mapping. The layers may lie on several devices. For a dtype that NumPy lacks, an array of unsigned integers of
        the same size will do.
    state : sequence of mapping of str to array, optional
        `state[layer][name]`, each of the state's shape; needed where the layout has states.

    Raises
    ------
    ValueError, TypeError
        An array is missing, of another shape or dtype, not contiguous, or unknown to the layout. The text names the
        layer and the plane.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Sequence[Mapping[str, Any]],
        state: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.memory = SlotMemory(layout, arrays, state)
        if layout.opaque_page_tokens is not None:
            raise ValueError("the pages of this layout are opaque: give them as a PagedSlot")

    def __repr__(self) -> str:
        return f"Slot({self.memory!r})"

    @property
    def layout(self) -> Layout:
        """What the arrays are laid out as."""
        return self.memory.layout

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the slot holds; `None` where the layout has no planes, so that there is no limit."""
        return self.memory.length

    def place(self, runs: TokenRuns) -> tuple[TokenRuns, npt.NDArray[np.int64]]:
        """The runs as they lie in the arrays, and the row where each starts: here, its first token."""
        return runs, runs.token

    @classmethod
    def allocate(cls, layout: Layout, max_tokens: int, device: str | int = "cpu") -> Slot:
        """A slot of zeroed arrays of its own.

        Parameters
        ----------
        layout : Layout
            The layout.
        max_tokens : int
            How many tokens it holds.
        device : str or int
            `"cpu"` for NumPy arrays, each starting at a page; `"cuda"`, `"cuda:1"` or an ordinal for CuPy arrays.
        """
        tokens = as_count(max_tokens, "max_tokens", least=1)
        ordinal = _ordinal(device)

        def make(shape: tuple[int, ...], dtype: str) -> Any:
            return allocate_host(shape, dtype) if ordinal is None else cuda.allocate(shape, dtype, ordinal)

        arrays = [
            {name: make((tokens, *plane.shape), plane.dtype) for name, plane in layer.planes.items()}
            for layer in layout.layers
        ]
        state = [
            {name: make(state.shape, state.dtype) for name, state in layer.state.items()} for layer in layout.layers
        ]
        slot = cls(layout, arrays, state)
        slot.arrays, slot.state = arrays, state
        return slot

    # What `allocate` made, for its caller to use; a slot of given arrays has none of its own.
    arrays: list[dict[str, Any]]
    state: list[dict[str, Any]]


def _ordinal(device: str | int) -> int | None:
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if device == "cpu":
        return None
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind == "cuda" and (number.isdigit() or device == "cuda"):
            return int(number or 0)
    raise ValueError(f"device {device!r} is unknown: use 'cpu', 'cuda', 'cuda:1' or an ordinal")
