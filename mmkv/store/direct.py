"""Device arrays, on disks and shared file systems: kvikio's `CuFile` on threads of our own."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.buffer import Buffer, buffer_of
from mmkv.device import Event
from mmkv.errors import MmkvError
from mmkv.store.contract import Gate, LayerCopies, Progress, Store
from mmkv.store.files import PoolFile
from mmkv.store.kernel import CopyKernel
from mmkv.store.lanes import Lanes, drain
from mmkv.store.pieces import Piece, Scatter, read_batches, write_batches

__all__ = ["DirectStore"]

_PIECE_BYTES = 4 << 20
_NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
# Counts in that file that rise with every use of GDS, whether or not its I/O statistics are enabled.
_NVIDIA_FS_COUNTS = re.compile(r"(?:Reads|Writes|Mmap|Bar1-map) +: n=(\d+)|Ops +: Read=(\d+) Write=(\d+)")
_PROBE_BYTES = 1 << 20


class DirectStore(Store):
    """Copies between device memory and files with kvikio: by GPUDirect Storage where it is, by system calls elsewhere.

    Which of the two it is, `path` says: `gds`; `cufile-compat`, where cuFile takes a path through host memory of its
    own; or `kvikio-posix`. None of kvikio's settings is touched. Rows that lie scattered in device memory but together
    in the file move together, through 4 MiB of device memory for each thread.

    Parameters
    ----------
    directory : Path
        Where the files lie; a file is written and read back there if cuFile says that it is in use.
    threads : int
        How many threads copy at once in one transfer, each with at most 4 MiB in flight.

    Raises
    ------
    MmkvError
        kvikio is not installed, or does not work here; the text says why.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._cufile = _cufile_class()
        self._threads = threads
        self._lanes = Lanes("mmkv-direct")
        self._handles: dict[tuple[int, int], Any] = {}
        self._kernel = CopyKernel()
        self._idle: list[_Bounce] = []
        self._lock = threading.Lock()
        self.path, self._reason = _path_taken(self._cufile, directory)

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`."""
        batches = read_batches(layers, _PIECE_BYTES, gate)
        drain(self._lanes, layers, batches, self._read, progress, threads=self._threads, after=after)

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files, each lane into a file of its own; see `Store.write`."""
        batches = write_batches(layers, _PIECE_BYTES)
        drain(self._lanes, layers, batches, self._write, progress, threads=self._threads, after=after)

    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Nothing is to be done for a segment."""

    def forget(self, file: PoolFile, segment: int) -> None:
        """Nothing is held of a segment."""

    def close(self) -> None:
        """Close the files and stop the idle threads."""
        self._lanes.close()
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
            self._idle.clear()
        for handle in handles:
            handle.close()
        cuda.trim()

    def describe(self) -> dict[str, Any]:
        """The path, the number of threads, and why it is not GDS."""
        reason = {} if self._reason is None else {"reason": self._reason}
        return {"path": self.path, "threads": self._threads, **reason}

    def _handle(self, file: PoolFile) -> Any:
        """The `CuFile` of a file, kept until the store is closed: longer than any read or write."""
        with self._lock:
            handle = self._handles.get(file.identity)
            if handle is None:
                handle = _open(self._cufile, file.path)
                status = os.fstat(handle.fileno())
                if (status.st_dev, status.st_ino) != file.identity:
                    handle.close()
                    raise MmkvError(f"{file.path} was replaced while the pool is open")
                self._handles[file.identity] = handle
            return handle

    def _read(self, piece: Piece) -> str:
        file = piece.copy.file
        # kvikio tells of a short file only after it has overwritten the array.
        file.require(piece.file_offset + piece.size)
        self._move(self._handle(file).raw_read, piece, to_device=True)
        return self.path

    def _write(self, piece: Piece) -> str:
        self._move(self._handle(piece.copy.file).raw_write, piece, to_device=False)
        return self.path

    def _move(self, call: Any, piece: Piece, *, to_device: bool) -> None:
        buffer, path, scatter = piece.copy.buffer, piece.copy.file.path, piece.scatter
        if buffer.device is None:
            raise MmkvError("host memory does not move by kvikio")
        with cuda.current(buffer.device):
            if scatter is None:
                _move_all(call, buffer.address + piece.buffer_offset, piece.size, piece.file_offset, path)
            elif self._kernel.ready(buffer.device):
                bounce = self._bounce(buffer.device)
                if not to_device:
                    bounce.copy(piece, scatter, self._kernel, to_buffer=False)
                _move_all(call, bounce.address, piece.size, piece.file_offset, path)
                if to_device:
                    bounce.copy(piece, scatter, self._kernel, to_buffer=True)
                # One whose copy failed is not given back: the device may still be at it.
                with self._lock:
                    self._idle.append(bounce)
            else:
                file_offset = piece.file_offset
                for offset, size in zip(scatter.buffer_offsets.tolist(), scatter.sizes.tolist(), strict=True):
                    _move_all(call, buffer.address + offset, size, file_offset, path)
                    file_offset += size

    def _bounce(self, device: int) -> _Bounce:
        with self._lock:
            for index, bounce in enumerate(self._idle):
                if bounce.device == device:
                    return self._idle.pop(index)
        return _Bounce(device)


class _Bounce:
    """Device memory for one piece, whose parts lie scattered in an array, and a stream. The device is current."""

    __slots__ = ("_memory", "_stream", "address", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self._memory = cuda.scratch(device, _PIECE_BYTES)
        self._stream = cuda.new_stream(device)
        self.address: int = self._memory.ptr

    def copy(self, piece: Piece, scatter: Scatter, kernel: CopyKernel, *, to_buffer: bool) -> None:
        """Copy the parts to or from the array, and wait for it."""
        keep = kernel.move_parts(
            self.address, piece.copy.buffer.address, scatter, self.device, self._stream, to_buffer=to_buffer
        )
        self._stream.synchronize()
        del keep


class _Window:
    """A part of a device buffer, as kvikio wants to be given it."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None
        }  # fmt: skip


def _move_all(call: Any, address: int, size: int, file_offset: int, path: Path) -> None:
    """Move bytes between a file and memory of the device that is current."""
    done = 0
    while done < size:
        window = _Window(address + done, size - done)
        try:
            moved = call(window, size - done, file_offset + done, 0)
        except RuntimeError as error:
            raise _clear_error(path, error) from error
        if moved <= 0:
            raise MmkvError(f"kvikio moved only {done} of {size} bytes at {file_offset} of {path}")
        done += moved


def _clear_error(path: Path, error: RuntimeError) -> MmkvError:
    # kvikio raises RuntimeError for every error of the system, the name only in the text.
    text = str(error)
    if "No space left" in text or "Disk quota exceeded" in text:
        return MmkvError(f"no space is left on the file system of {path}: free some, or give the pool less capacity")
    if "Too many open files" in text:
        return MmkvError(f"cannot open {path}: too many open files, of which kvikio keeps two a layer: raise ulimit -n")
    return MmkvError(f"kvikio failed on {path}: {text}")


def _open(cufile: Any, path: Path) -> Any:
    try:
        return cufile(path, "r+")
    except RuntimeError as error:
        raise _clear_error(path, error) from error


@functools.cache
def _cufile_class() -> Any:
    try:
        import kvikio
    except ImportError as error:
        raise MmkvError(f"kvikio cannot be imported ({error}): install kvikio-cu13 or kvikio-cu12") from error
    return kvikio.CuFile


def _path_taken(cufile: Any, directory: Path) -> tuple[str, str | None]:
    """Which way kvikio's bytes take in a directory, and why it is not GDS."""
    import kvikio.defaults

    if kvikio.defaults.is_compat_mode_preferred():
        return "kvikio-posix", _why_no_cufile()
    try:
        with NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
            if not _opens_direct(Path(probe.name)):
                return "kvikio-posix", f"files in {directory} do not open with O_DIRECT, which GDS needs"
            before = _nvidia_fs_counts()
            _round_trip(cufile, Path(probe.name))
            after = _nvidia_fs_counts()
    except OSError as error:
        raise MmkvError(f"cuFile cannot be tried in {directory}: {error}") from error
    if before is None or after is None:
        return "cufile-compat", f"GDS needs the kernel module nvidia-fs: there is no {_NVIDIA_FS}"
    if after == before:
        return "cufile-compat", f"cuFile does not use nvidia-fs for files in {directory}"
    return "gds", None


def _why_no_cufile() -> str:
    import kvikio.defaults

    if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
        return "kvikio's compatibility mode is switched on"
    if not os.access("/run/udev", os.R_OK):
        return "kvikio does not use cuFile because /run/udev is not readable"
    return "kvikio does not find a libcufile that works"


def _opens_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _nvidia_fs_counts() -> list[tuple[str, ...]] | None:
    try:
        return _NVIDIA_FS_COUNTS.findall(_NVIDIA_FS.read_text())
    except OSError:
        return None


def _round_trip(cufile: Any, path: Path) -> None:
    """Write random bytes with cuFile, read them back with and without it, and compare."""
    ordinal = cuda.current_ordinal()
    sent = np.random.default_rng().integers(0, 256, _PROBE_BYTES, dtype=np.uint8)
    os.truncate(path, _PROBE_BYTES)
    source = cuda.allocate((_PROBE_BYTES,), "uint8", ordinal)
    target = cuda.allocate((_PROBE_BYTES,), "uint8", ordinal)
    handle = _open(cufile, path)
    try:
        with cuda.current(ordinal):
            source.set(sent)
            cuda.synchronize(ordinal)
            handle.raw_write(_window(buffer_of(source)), _PROBE_BYTES, 0, 0)
            handle.raw_read(_window(buffer_of(target)), _PROBE_BYTES, 0, 0)
            received = target.get()
    except RuntimeError as error:
        raise _clear_error(path, error) from error
    finally:
        handle.close()
    if path.read_bytes() != sent.tobytes() or not np.array_equal(received, sent):
        raise MmkvError(f"cuFile gave back other bytes than were written in {path.parent}: it cannot be used here")


def _window(buffer: Buffer) -> _Window:
    return _Window(buffer.address, buffer.bytes)
