"""What a conversation's bytes look like: the planes and states of every layer, and the model that computed them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mmkv.sizes import as_count

__all__ = ["Layer", "Layout", "Plane", "State", "difference", "dtype_bytes", "dtype_name"]

# Types that models store and NumPy has no name for: bytes of one element.
_FOREIGN_DTYPE_BYTES = {
    "bfloat16": 2,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
FOREIGN_DTYPES = frozenset(_FOREIGN_DTYPE_BYTES)
_NUMPY_KINDS = "biufcV"
# What NumPy is asked for at all: names and codes, no structures, which may take long to read.
_DTYPE_NAME = re.compile(r"[<>=|]?[A-Za-z_][A-Za-z0-9_]{0,30}")
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 48
_MAX_LAYERS = 10_000
_MAX_ARRAYS_PER_LAYER = 10_000
_MAX_TOKEN_BYTES = 1 << 30
_MAX_STATE_BYTES = 1 << 36


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, by NumPy's names or those of `bfloat16` and the 8-bit floats.

    Raises
    ------
    ValueError
        The name is not a dtype of a fixed size of whole bytes.
    """
    if dtype in _FOREIGN_DTYPE_BYTES:
        return _FOREIGN_DTYPE_BYTES[dtype]
    try:
        known = np.dtype(dtype) if _DTYPE_NAME.fullmatch(dtype) else None
    except (TypeError, ValueError):
        known = None
    if known is None or known.kind not in _NUMPY_KINDS or known.itemsize == 0 or known.names is not None:
        raise ValueError(
            f"dtype {dtype[:80]!r} is unknown: use a NumPy name or one of {', '.join(sorted(_FOREIGN_DTYPE_BYTES))}; "
            "a type of less than a byte goes as 'uint8' with the packed shape"
        )
    return known.itemsize


def _canonical_dtype(dtype: object) -> str:
    if isinstance(dtype, str) and dtype in _FOREIGN_DTYPE_BYTES:
        return dtype
    if not isinstance(dtype, str):
        try:
            dtype = dtype_name(np.dtype(cast("npt.DTypeLike", dtype)))
        except TypeError as error:
            raise TypeError(f"dtype must be a name such as 'float16', not {dtype!r}") from error
    dtype_bytes(dtype)
    return dtype if dtype in _FOREIGN_DTYPE_BYTES else dtype_name(np.dtype(dtype))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype of NumPy's: its own, but for raw bytes, whose own (`void24` for three) it does not know."""
    return f"V{dtype.itemsize}" if dtype.type is np.void else dtype.name


def _canonical_shape(shape: object) -> tuple[int, ...]:
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if isinstance(shape, str | bytes) or not isinstance(shape, Iterable):
        raise TypeError(f"shape must be a tuple of positive integers, not {shape!r}")
    sizes = tuple(shape)
    if len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(sizes)} dimensions has more than {_MAX_DIMENSIONS}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"shape must be a tuple of positive integers, not {shape!r}")
        if size <= 0:
            raise ValueError(f"shape {sizes!r} has the size {size}: every size must be at least 1")
        if size > _MAX_SIZE:
            raise ValueError(f"a shape has a size of more than {_MAX_SIZE}")
    return tuple(int(size) for size in sizes)


@dataclass(frozen=True)
class Plane:
    """One array of a layer that grows by one row a token.

    Parameters
    ----------
    dtype : str
        The element type, by NumPy's names, or `bfloat16`, `float8_e4m3fn`, ... Only its size matters to the copies,
        its name to the fingerprint.
    shape : tuple of int
        The shape of one token's row. A slot's array for this plane is `(max_tokens, *shape)`.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _canonical_dtype(self.dtype))
        object.__setattr__(self, "shape", _canonical_shape(self.shape))
        if self.token_bytes > _MAX_TOKEN_BYTES:
            raise ValueError(f"a plane of {self.token_bytes} bytes a token is larger than {_MAX_TOKEN_BYTES}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's row."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class State:
    """One array of a layer that does not grow with tokens, such as a recurrent state.

    Parameters
    ----------
    dtype : str
        The element type, by the same names as a `Plane`'s.
    shape : tuple of int
        The shape of the whole array.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _canonical_dtype(self.dtype))
        object.__setattr__(self, "shape", _canonical_shape(self.shape))
        if self.bytes > _MAX_STATE_BYTES:
            raise ValueError(f"a state of {self.bytes} bytes is larger than {_MAX_STATE_BYTES}")

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


def _named(arrays: object, kind: type[Plane] | type[State]) -> Mapping[str, Any]:
    if not isinstance(arrays, Mapping):
        raise TypeError(f"the arrays of a layer must be a mapping of names to {kind.__name__}, not {arrays!r}")
    for name, array in arrays.items():
        if not isinstance(name, str) or not name or len(name) > 256:
            raise ValueError(f"an array of a layer is named {name!r}: names are strings of 1 to 256 characters")
        if not isinstance(array, kind):
            raise TypeError(f"{name!r} must be a {kind.__name__}, not {array!r}")
    if len(arrays) > _MAX_ARRAYS_PER_LAYER:
        raise ValueError(f"a layer of {len(arrays)} arrays has more than {_MAX_ARRAYS_PER_LAYER}")
    return MappingProxyType(dict(arrays))


@dataclass(frozen=True)
class Layer:
    """The planes and the states of one layer; either may be empty.

    Parameters
    ----------
    planes : mapping of str to Plane
        The arrays that grow with tokens, by name.
    state : mapping of str to State
        The arrays that are valid at exactly one token count, by name.
    """

    planes: Mapping[str, Plane] = field(default_factory=dict)
    state: Mapping[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", _named(self.planes, Plane))
        object.__setattr__(self, "state", _named(self.state, State))
        both = set(self.planes) & set(self.state)
        if both:
            raise ValueError(f"{sorted(both)} name both a plane and a state of one layer")

    def __hash__(self) -> int:
        return hash((tuple(self.planes.items()), tuple(self.state.items())))

    def __reduce__(self) -> tuple[type[Layer], tuple[dict[str, Plane], dict[str, State]]]:
        return Layer, (dict(self.planes), dict(self.state))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this layer."""
        return sum(plane.token_bytes for plane in self.planes.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of this layer's states."""
        return sum(state.bytes for state in self.state.values())


@dataclass(frozen=True)
class Layout:
    """The planes and states of every layer plus the model's name: what makes bytes reusable.

    Parameters
    ----------
    layers : sequence of Layer
        The layers, first to last.
    model : str
        Any string that must match for the bytes to be reusable: name, revision, quantisation, adapters.
    opaque_page_tokens : int, optional
        Tokens of a page, where only the engine knows the order of a page's bytes: whole pages move then, and a prefix
        ends at a page. See `PagedSlot`.

    Examples
    --------
    >>> layer = Layer({"k": Plane("int8", (4, 128)), "v": Plane("uint8", (4, 64)), "scale": Plane("float16", (24,))})
    >>> Layout([layer] * 48, model="example").token_bytes
    39168
    """

    layers: tuple[Layer, ...]
    model: str
    opaque_page_tokens: int | None

    def __init__(self, layers: Sequence[Layer], model: str, opaque_page_tokens: int | None = None) -> None:
        for layer in layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"layers must be a sequence of Layer, not of {layer!r}")
        if not isinstance(model, str):
            raise TypeError(f"model must be a string, not {model!r}")
        if not 1 <= len(layers) <= _MAX_LAYERS:
            raise ValueError(f"a layout has 1 to {_MAX_LAYERS} layers, not {len(layers)}")
        object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "model", model)
        pages = None if opaque_page_tokens is None else as_count(opaque_page_tokens, "opaque_page_tokens", least=1)
        object.__setattr__(self, "opaque_page_tokens", pages)
        if self.token_bytes == 0 and self.state_bytes == 0:
            raise ValueError("a layout needs a plane or a state in one layer at least")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.token_bytes for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: the states of all layers."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def granule(self) -> int:
        """The tokens that move together: those of an opaque page, else one."""
        return self.opaque_page_tokens or 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the layout's canonical JSON, in hexadecimal: equal for equal layouts, on every machine."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The layout as plain JSON values, the order of planes and states kept."""
        pages = {} if self.opaque_page_tokens is None else {"opaque_page_tokens": self.opaque_page_tokens}
        return pages | {
            "model": self.model,
            "layers": [
                {
                    "planes": [[name, plane.dtype, list(plane.shape)] for name, plane in layer.planes.items()],
                    "state": [[name, state.dtype, list(state.shape)] for name, state in layer.state.items()],
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> Layout:
        """The layout that `to_json` wrote.

        Raises
        ------
        ValueError
            The value is not a layout; the text says where.
        """
        try:
            layers = [
                Layer(
                    {name: Plane(dtype, tuple(shape)) for name, dtype, shape in layer["planes"]},
                    {name: State(dtype, tuple(shape)) for name, dtype, shape in layer["state"]},
                )
                for layer in value["layers"]
            ]
            return cls(layers, value["model"], value.get("opaque_page_tokens"))
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a layout: {type(error).__name__}: {error}") from error


def difference(one: Layout, other: Layout) -> str:
    """In what a layout is not another one, as an end of a sentence about the former."""
    if one.model != other.model:
        return f"it is of the model {one.model!r}, not {other.model!r}"
    if len(one.layers) != len(other.layers):
        return f"it has {len(one.layers)} layers, not {len(other.layers)}"
    for index, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=True)):
        pairs: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("plane", dict(mine.planes), dict(theirs.planes)),
            ("state", dict(mine.state), dict(theirs.state)),
        ]
        for kind, here, there in pairs:
            for name in [*here, *there]:
                if here.get(name) != there.get(name):
                    return f"layer {index}, {kind} {name!r}: it has {here.get(name)}, not {there.get(name)}"
            if list(here) != list(there):
                return f"layer {index}: its {kind}s come in the order {list(here)}, not {list(there)}"
    pages = [layout.opaque_page_tokens for layout in (one, other)]
    return f"its opaque_page_tokens is {pages[0]}, not {pages[1]}"
