"""Where an array's bytes are: its address, size and device, whichever library made it."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmkv.layout import FOREIGN_DTYPES, dtype_bytes, dtype_name

__all__ = ["Buffer", "allocate_host", "buffer_of", "host_view"]

# An array of ctypes would be of a new type for each size, which takes ten times as long to make.
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_ONLY, _WRITABLE = 0x100, 0x200

# glibc puts a large array 16 bytes behind a page's start, and a read from the page cache into such memory runs at
# half speed (measured: 1.7 against 3.6 GB/s a thread), so host memory of our own starts at a page.
_PAGE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """The memory of one C-contiguous array.

    Attributes
    ----------
    address : int
        Address of the first byte.
    bytes : int
        Size in bytes.
    shape : tuple of int
        The array's shape.
    dtype : str
        The element type's name, as in a `Plane`.
    device : int or None
        The CUDA device's ordinal, `None` for host memory.
    writable : bool
        Whether the array may be written.
    owner : object
        The array itself, so that its memory lives as long as the buffer.
    """

    address: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: int | None
    writable: bool
    owner: object

    def host_view(self, offset: int, size: int) -> memoryview:
        """The bytes `[offset, offset + size)` of host memory, as a writable view."""
        return host_view(self.address + offset, size, writable=True)


def host_view(address: int, size: int, *, writable: bool) -> memoryview:
    """The bytes at an address of host memory, which the caller keeps alive."""
    view: memoryview = _view(address, size, _WRITABLE if writable else _READ_ONLY)
    return view


def allocate_host(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """A zeroed host array that starts at a page's start; of unsigned bytes or words where NumPy lacks the dtype."""
    numpy_dtype = np.dtype(f"uint{8 * dtype_bytes(dtype)}" if dtype in FOREIGN_DTYPES else dtype)
    size = math.prod(shape) * numpy_dtype.itemsize
    memory = np.zeros(size + _PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + size].view(numpy_dtype).reshape(shape)


def buffer_of(array: Any) -> Buffer:
    """The buffer of an array; copies nothing.

    Takes a NumPy array, a CuPy array, a Torch tensor, or anything that speaks `__cuda_array_interface__`,
    `__array_interface__` or DLPack.

    Raises
    ------
    TypeError
        The object speaks none of these.
    ValueError
        The array is not C-contiguous.
    """
    if type(array).__module__.split(".", 1)[0] == "torch" and hasattr(array, "data_ptr"):
        return _torch_buffer(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _cuda_buffer(array, interface)
    if isinstance(array, np.ndarray):
        return _numpy_buffer(array, array)
    if hasattr(array, "__dlpack__"):
        return _dlpack_buffer(array)
    if hasattr(array, "__array_interface__"):
        return _numpy_buffer(np.asarray(array), array)
    raise TypeError(
        f"{type(array).__name__!r} is no array: give a NumPy or CuPy array, a Torch tensor, "
        "or what speaks DLPack or __cuda_array_interface__"
    )


def _numpy_buffer(view: np.ndarray[Any, Any], owner: object) -> Buffer:
    if not view.flags.c_contiguous:
        raise ValueError(f"the array of shape {view.shape} and strides {view.strides} is not C-contiguous")
    name = dtype_name(view.dtype)
    return Buffer(view.ctypes.data, view.nbytes, view.shape, name, None, view.flags.writeable, (owner, view))


def _cuda_buffer(array: Any, interface: dict[str, Any]) -> Buffer:
    shape = tuple(int(size) for size in interface["shape"])
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, tuple(strides), dtype.itemsize):
        raise ValueError(f"the array of shape {shape} and strides {tuple(strides)} is not C-contiguous")
    address, readonly = interface["data"]
    name = str(getattr(array, "dtype", dtype.name))
    return Buffer(
        int(address),
        math.prod(shape) * dtype.itemsize,
        shape,
        name,
        _device_of(array, int(address)),
        not readonly,
        array,
    )


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _device_of(array: Any, address: int) -> int:
    device = getattr(array, "device", None)
    ordinal = getattr(device, "id", getattr(device, "index", None))
    if isinstance(ordinal, int):
        return ordinal
    from mmkv import device as cuda

    return cuda.device_of_pointer(address)


def _torch_buffer(tensor: Any) -> Buffer:
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} is not C-contiguous"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on {tensor.device} cannot be reached: use the CPU or a CUDA device")
    return Buffer(
        tensor.data_ptr(),
        tensor.numel() * tensor.element_size(),
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.device.index if tensor.device.type == "cuda" else None,
        True,
        tensor,
    )


_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3


def _dlpack_buffer(array: Any) -> Buffer:
    kind, _ = array.__dlpack_device__()
    if kind in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        return _numpy_buffer(np.from_dlpack(array), array)
    from mmkv import device as cuda

    view = cuda.from_dlpack(array)
    return _cuda_buffer(view, view.__cuda_array_interface__)
