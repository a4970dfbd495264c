"""Slots: the engine's arrays that hold one running conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.buffer import Buffer, allocate_host, buffer_of
from mmkv.layout import FOREIGN_DTYPES, Layout, Plane, State, dtype_bytes
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
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must be a Layout, not {layout!r}")
        if state is None:
            if layout.state_bytes:
                raise ValueError("this layout has states: give their arrays as state=")
            state = [{}] * len(layout.layers)
        for what, given in (("arrays", arrays), ("state", state)):
            if len(given) != len(layout.layers):
                raise ValueError(f"{what} has {len(given)} layers, the layout {len(layout.layers)}")
        self.layout = layout
        self.planes: tuple[dict[str, Buffer], ...] = tuple(
            _layer_buffers(index, layer.planes, given, "plane")
            for index, (layer, given) in enumerate(zip(layout.layers, arrays, strict=True))
        )
        self.states: tuple[dict[str, Buffer], ...] = tuple(
            _layer_buffers(index, layer.state, given, "state")
            for index, (layer, given) in enumerate(zip(layout.layers, state, strict=True))
        )
        self.max_tokens: int | None = self._common_tokens()
        self._require_one_device_a_layer()

    def __repr__(self) -> str:
        where = ", ".join(sorted(f"cuda:{device}" for device in self.devices)) or "host memory"
        return f"Slot(model={self.layout.model!r}, max_tokens={self.max_tokens}, {where})"

    @cached_property
    def devices(self) -> frozenset[int]:
        """The CUDA devices that hold a part of the slot."""
        return frozenset(
            buffer.device for layer in (*self.planes, *self.states) for buffer in layer.values()
            if buffer.device is not None
        )  # fmt: skip

    def _common_tokens(self) -> int | None:
        first: tuple[int, str, int] | None = None
        for index, layer in enumerate(self.planes):
            for name, buffer in layer.items():
                tokens = buffer.shape[0]
                if first is None:
                    first = (index, name, tokens)
                elif tokens != first[2]:
                    raise ValueError(
                        f"layer {index}, plane {name!r} holds {tokens} tokens, but layer {first[0]}, plane "
                        f"{first[1]!r} holds {first[2]}: all planes of a slot hold as many"
                    )
        return None if first is None else first[2]

    def _require_one_device_a_layer(self) -> None:
        for index, (planes, states) in enumerate(zip(self.planes, self.states, strict=True)):
            places = {name: buffer.device for name, buffer in (*planes.items(), *states.items())}
            if len(set(places.values())) > 1:
                named = ", ".join(
                    f"{name!r} on {'the host' if device is None else f'cuda:{device}'}" for name, device in places.items()
                )
                raise ValueError(f"layer {index} is spread over devices ({named}): one layer's arrays lie on one device")

    @cached_property
    def layer_devices(self) -> tuple[int | None, ...]:
        """The CUDA device of each layer's arrays; `None` for host memory, and for a layer that has none."""
        first = (next(iter((*planes.values(), *states.values())), None) for planes, states in zip(
            self.planes, self.states, strict=True))  # fmt: skip
        return tuple(None if buffer is None else buffer.device for buffer in first)

    def require_room(self, tokens: int) -> None:
        """Raise `ValueError` unless the slot holds `tokens` tokens."""
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise ValueError(f"the slot holds {self.max_tokens} tokens, fewer than the {tokens} that were asked for")

    def require_writable(self) -> None:
        """Raise `ValueError`, naming the layer and the plane, if an array may not be written."""
        for kind, layers in (("plane", self.planes), ("state", self.states)):
            for index, layer in enumerate(layers):
                for name, buffer in layer.items():
                    if not buffer.writable:
                        raise ValueError(f"layer {index}, {kind} {name!r}: the array is read-only")

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


def _layer_buffers(
    index: int, specs: Mapping[str, Plane] | Mapping[str, State], given: object, kind: str
) -> dict[str, Buffer]:
    if not isinstance(given, Mapping):
        raise TypeError(f"layer {index}: its {kind}s must be a mapping of names to arrays, not {type(given).__name__}")
    unknown = sorted(set(given) - set(specs))
    if unknown:
        raise ValueError(f"layer {index} has no {kind} {unknown[0]!r} in the layout; it has {sorted(specs)}")
    buffers = {}
    for name, spec in specs.items():
        if name not in given:
            raise ValueError(f"layer {index}, {kind} {name!r}: its array is missing")
        try:
            buffer = buffer_of(given[name])
            _check(buffer, spec)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {index}, {kind} {name!r}: {error}") from error
        buffers[name] = buffer
    return buffers


def _check(buffer: Buffer, spec: Plane | State) -> None:
    if isinstance(spec, Plane):
        if not buffer.shape or buffer.shape[1:] != spec.shape:
            expected = ", ".join(["max_tokens", *map(str, spec.shape)])
            raise ValueError(f"the array has the shape {buffer.shape}, not ({expected})")
    elif buffer.shape != spec.shape:
        raise ValueError(f"the array has the shape {buffer.shape}, not {spec.shape}")
    if buffer.dtype != spec.dtype and not _stands_for(buffer, spec.dtype):
        raise ValueError(f"the array is of {buffer.dtype}, not of {spec.dtype}")


def _stands_for(buffer: Buffer, dtype: str) -> bool:
    # By its name: NumPy knows these types where another library has taught it.
    bits = 8 * dtype_bytes(dtype)
    return dtype in FOREIGN_DTYPES and buffer.dtype in (f"uint{bits}", f"void{bits}")
