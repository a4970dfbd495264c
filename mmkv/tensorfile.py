"""Files of named tensors in the safetensors format: a header in JSON, then the bytes, one tensor behind the other.

Nothing here holds a tensor's bytes. What is read may be made to harm: the header is limited, and every number in it
is checked against the file's size before it is used.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.errors import MmkvError

__all__ = ["Tensor", "TensorFile", "header_of", "safetensors_dtype"]

_MAX_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_DIMENSIONS = 66
_MAX_SIZE = 1 << 62
_NAMES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_SIZES = dict(_NAMES.values())


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

    Attributes
    ----------
    name, dtype : str
        Its name, and its type by the format's names.
    shape : tuple of int
        Its shape; rows are contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _SIZES[self.dtype]


def safetensors_dtype(dtype: str, shape: tuple[int, ...], item_bytes: int) -> tuple[str, tuple[int, ...]]:
    """The format's name of a dtype, and the shape. Of one that it has no name for, the bytes are a last dimension."""
    if dtype in _NAMES:
        return _NAMES[dtype][0], shape
    return "U8", (*shape, item_bytes)


def header_of(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds tensors in this order, with its length before it.

    Raises
    ------
    MmkvError
        There are too many.
    """
    value: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        value[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(value, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise MmkvError(f"{len(tensors)} tensors take a header of {len(text)} bytes, more than {_MAX_HEADER_BYTES}")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """A file of tensors, opened for reading; a context manager.

    Attributes
    ----------
    metadata : dict of str to str
        What else the header says.
    tensors : dict of str to Tensor
        The tensors by name.

    Raises
    ------
    MmkvError
        It cannot be read.
    ValueError
        It is no such file; the text says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting for a writer, where a pipe stands in the file's place.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise MmkvError(f"cannot open {path}: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a plain file")
        length = int.from_bytes(self._read(0, min(_LENGTH_BYTES, status.st_size)), "little")
        if status.st_size < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER_BYTES, status.st_size - _LENGTH_BYTES):
            raise ValueError(
                f"{self.path} is no safetensors file: its header has {length} bytes, the file {status.st_size}"
            )
        text = self._read(_LENGTH_BYTES, length)
        try:
            value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
            self.metadata, self.tensors, self._begins = _parse(value, status.st_size - _LENGTH_BYTES - length)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} is no safetensors file: {error}") from error
        self._start = _LENGTH_BYTES + length

    def _read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def read(self, name: str, view: memoryview, offset: int = 0) -> None:
        """Fill `view` with bytes of a tensor, from `offset` on.

        Raises
        ------
        MmkvError
            The file became shorter, or cannot be read.
        """
        assert 0 <= offset <= offset + len(view) <= self.tensors[name].bytes
        self._fill(view, self._start + self._begins[name] + offset)

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise MmkvError(f"cannot read {self.path}: {error.strerror}") from error
            if got == 0:
                raise MmkvError(f"{self.path} ends before {offset + len(view)} bytes: it was cut")
            done += got

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name comes twice")
    return value


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _parse(value: Any, size: int) -> tuple[dict[str, str], dict[str, Tensor], dict[str, int]]:
    if not isinstance(value, dict):
        raise ValueError("its header is no JSON object")
    metadata = value.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are no texts")
    tensors: dict[str, Tensor] = {}
    begins: dict[str, int] = {}
    for name, entry in value.items():
        tensors[name], begins[name] = _parse_tensor(name, entry)
    # One behind the other, from the first byte to the last: nothing overlaps, and nothing is left over.
    end = 0
    for name in sorted(begins, key=lambda name: (begins[name], tensors[name].bytes)):
        if begins[name] != end:
            raise ValueError(f"tensor {name[:80]!r} begins at {begins[name]}, not at {end}, where the one before ends")
        end += tensors[name].bytes
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, and there are {size}")
    return metadata, tensors, begins


def _parse_tensor(name: str, entry: Any) -> tuple[Tensor, int]:
    what = f"tensor {name[:80]!r}"
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if len(entry) == 3:
            pass
        case _:
            raise ValueError(f"{what} is no tensor")
    if dtype not in _SIZES:
        raise ValueError(f"{what} is of the type {dtype[:40]!r}")
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and 0 <= length < _MAX_SIZE for length in shape):
        raise ValueError(f"{what} has a shape that cannot be")
    size = _SIZES[dtype]
    for length in shape:
        size *= length
        if size >= _MAX_SIZE:
            raise ValueError(f"{what} has a shape that cannot be")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _MAX_SIZE or end - begin != size:
        raise ValueError(f"{what} takes {size} bytes, and lies at {str(begin)[:40]} to {str(end)[:40]}")
    return Tensor(name, dtype, tuple(shape)), begin
