"""The memory of a slot: its arrays, checked against the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mmkv.buffer import Buffer, buffer_of
from mmkv.layout import FOREIGN_DTYPES, Layout, Plane, State, dtype_bytes

__all__ = ["SlotMemory"]


class SlotMemory:
    """The buffers of a slot's arrays, by layer and name; holds references, copies nothing.

    Parameters
    ----------
    layout : Layout
        What the arrays are laid out as.
    arrays, state : sequence of mapping of str to array
        The arrays of the planes and of the states, by layer; see `Slot`.
    page_shape : tuple of int or None
        The axes between the first one and those of a plane's row: none for rows, `(page_tokens,)` for pages; `None`
        where a page's bytes are opaque.
    page_tokens : int
        Rows of one entry of the first axis.

    Attributes
    ----------
    planes, states : tuple of dict of str to Buffer
        The buffers, by layer.
    length : int or None
        The length of the first axis of the planes; `None` where there are none.

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
        state: Sequence[Mapping[str, Any]] | None,
        *,
        page_shape: tuple[int, ...] | None = (),
        page_tokens: int = 1,
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

        def check_plane(buffer: Buffer, plane: Plane) -> None:
            if page_shape is None:
                _check_opaque(buffer, plane, page_tokens)
            else:
                _check_rows(buffer, plane, page_shape)

        self.layout = layout
        self.planes: tuple[dict[str, Buffer], ...] = tuple(
            _layer_buffers(index, layer.planes, given, "plane", check_plane)
            for index, (layer, given) in enumerate(zip(layout.layers, arrays, strict=True))
        )
        self.states: tuple[dict[str, Buffer], ...] = tuple(
            _layer_buffers(index, layer.state, given, "state", _check_state)
            for index, (layer, given) in enumerate(zip(layout.layers, state, strict=True))
        )
        self.length = self._common_length("pages" if page_shape != () else "tokens")
        self._require_one_device_a_layer()

    def __repr__(self) -> str:
        where = ", ".join(sorted(f"cuda:{device}" for device in self.devices)) or "host memory"
        return f"SlotMemory(model={self.layout.model!r}, length={self.length}, {where})"

    @cached_property
    def devices(self) -> frozenset[int]:
        """The CUDA devices that hold a part of the slot."""
        return frozenset(
            buffer.device
            for layer in (*self.planes, *self.states)
            for buffer in layer.values()
            if buffer.device is not None
        )

    def _common_length(self, unit: str) -> int | None:
        first: tuple[int, str, int] | None = None
        for index, layer in enumerate(self.planes):
            for name, buffer in layer.items():
                length = buffer.shape[0]
                if first is None:
                    first = (index, name, length)
                elif length != first[2]:
                    raise ValueError(
                        f"layer {index}, plane {name!r} holds {length} {unit}, but layer {first[0]}, plane "
                        f"{first[1]!r} holds {first[2]}: all planes of a slot hold as many"
                    )
        return None if first is None else first[2]

    def _require_one_device_a_layer(self) -> None:
        for index, (planes, states) in enumerate(zip(self.planes, self.states, strict=True)):
            places = {name: buffer.device for name, buffer in (*planes.items(), *states.items())}
            if len(set(places.values())) > 1:
                named = ", ".join(
                    f"{name!r} on {'the host' if device is None else f'cuda:{device}'}"
                    for name, device in places.items()
                )
                raise ValueError(
                    f"layer {index} is spread over devices ({named}): one layer's arrays lie on one device"
                )

    @cached_property
    def layer_devices(self) -> tuple[int | None, ...]:
        """The CUDA device of each layer's arrays; `None` for host memory, and for a layer that has none."""
        first = (
            next(iter((*planes.values(), *states.values())), None)
            for planes, states in zip(self.planes, self.states, strict=True)
        )
        return tuple(None if buffer is None else buffer.device for buffer in first)

    def require_writable(self) -> None:
        """Raise `ValueError`, naming the layer and the plane, if an array may not be written."""
        for kind, layers in (("plane", self.planes), ("state", self.states)):
            for index, layer in enumerate(layers):
                for name, buffer in layer.items():
                    if not buffer.writable:
                        raise ValueError(f"layer {index}, {kind} {name!r}: the array is read-only")


def _layer_buffers(
    index: int,
    specs: Mapping[str, Plane] | Mapping[str, State],
    given: object,
    kind: str,
    check: Callable[[Buffer, Any], None],
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
            check(buffer, spec)
            _check_dtype(buffer, spec.dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {index}, {kind} {name!r}: {error}") from error
        buffers[name] = buffer
    return buffers


def _check_rows(buffer: Buffer, plane: Plane, page_shape: tuple[int, ...]) -> None:
    expected = (*page_shape, *plane.shape)
    if not buffer.shape or buffer.shape[1:] != expected:
        first = "pages" if page_shape else "max_tokens"
        raise ValueError(f"the array has the shape {buffer.shape}, not ({', '.join([first, *map(str, expected)])})")


def _check_opaque(buffer: Buffer, plane: Plane, page_tokens: int) -> None:
    page_bytes = page_tokens * plane.token_bytes
    if not buffer.shape or buffer.bytes != buffer.shape[0] * page_bytes:
        raise ValueError(
            f"the array of the shape {buffer.shape} has {buffer.bytes} bytes, not {page_bytes} for each entry of its "
            "first axis, the pages"
        )


def _check_state(buffer: Buffer, state: State) -> None:
    if buffer.shape != state.shape:
        raise ValueError(f"the array has the shape {buffer.shape}, not {state.shape}")


def _check_dtype(buffer: Buffer, dtype: str) -> None:
    # For a dtype that NumPy may lack, unsigned integers of its size will do.
    stands_for = dtype in FOREIGN_DTYPES and buffer.dtype in (
        f"uint{8 * dtype_bytes(dtype)}",
        f"V{dtype_bytes(dtype)}",
    )
    if buffer.dtype != dtype and not stands_for:
        raise ValueError(f"the array is of {buffer.dtype}, not of {dtype}")
