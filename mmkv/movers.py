"""Which store moves which layer: host arrays with system calls, device arrays by what the medium offers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmkv.medium import Medium
from mmkv.memory import SlotMemory
from mmkv.store import PosixStore, Store, open_device_store
from mmkv.store.contract import Gate, LayerCopies, Progress
from mmkv.store.files import PoolFile

__all__ = ["Movers", "Share"]


class Share(NamedTuple):
    """Layers of a transfer that one store moves."""

    store: Callable[[], Store]
    layers: list[LayerCopies]

    def start(
        self, direction: Literal["read", "write"], progress: Progress, after: Sequence[Any], gate: Gate | None
    ) -> None:
        """Begin to move the layers; `progress` hears `released` once, come what may."""
        try:
            store = self.store()
        except Exception as error:
            progress.failed(error)
            progress.released()
            return
        if direction == "read":
            store.read(self.layers, progress, after, gate)
        else:
            store.write(self.layers, progress, after)


class Movers:
    """The stores of one pool; the one for device arrays is opened when the first of them comes.

    Parameters
    ----------
    directory : Path
        The pool's directory.
    medium : Medium
        What it lies on.
    choice : str
        `auto`, or the store that device arrays are forced through: `mapped`, `direct`, `posix`.
    threads : int
        How many threads copy at once in one transfer.
    allocated : callable
        Gives the files and segments that are allocated when the store of device arrays is opened.
    """

    def __init__(
        self,
        directory: Path,
        medium: Medium,
        choice: str,
        threads: int,
        allocated: Callable[[], Sequence[tuple[list[PoolFile], list[int]]]],
    ) -> None:
        self._allocated = allocated
        self._directory = directory
        self._medium = medium
        self._choice = choice
        self._threads = threads
        self._opening = threading.Lock()
        self._host: Store = PosixStore(threads, disk=not medium.in_ram)
        self._device: Store | None = None

    def shares(self, memory: SlotMemory, layers: Sequence[LayerCopies]) -> list[Share]:
        """Which store moves which of `layers`: at most one store for host arrays and one for device arrays."""
        on_host = [layer for layer in layers if memory.layer_devices[layer.layer] is None]
        on_device = [layer for layer in layers if memory.layer_devices[layer.layer] is not None]
        if on_device and not any(memory.planes[layer.layer] or memory.states[layer.layer] for layer in on_host):
            # Layers without arrays go with the others.
            on_host, on_device = [], list(layers)
        shares = [Share(self.host_store, on_host), Share(self.device_store, on_device)]
        return [share for share in shares if share.layers]

    def host_store(self) -> Store:
        """The store of host arrays."""
        return self._host

    def device_store(self) -> Store:
        """The store of device arrays, opened on first use."""
        with self._opening:
            if self._device is None:
                device = open_device_store(
                    self._medium, choice=self._choice, threads=self._threads, directory=self._directory
                )
                for files, segments in self._allocated():
                    device.prepare(files, segments)
                self._device = device
            return self._device

    @property
    def moves_device_arrays(self) -> bool:
        """Whether a device array has come."""
        return self._device is not None

    @property
    def path(self) -> str:
        """The path that device arrays take here, `posix` before one came."""
        store = self._host if self._device is None else self._device
        return str(store.describe()["path"])

    @property
    def reaches_devices(self) -> bool:
        """Whether device arrays move to and from the medium without a stop in host memory: by GPUDirect Storage."""
        return bool(self.device_store().describe()["path"] == "gds")

    def prepare(self, files: Sequence[PoolFile], segment: int) -> None:
        """Let the store of device arrays get ready for a segment that was allocated."""
        if self._device is not None:
            self._device.prepare(files, [segment])

    def forget(self, file: PoolFile, segment: int) -> None:
        """Let go of a segment that is about to be given back."""
        self._host.forget(file, segment)
        if self._device is not None:
            self._device.forget(file, segment)

    def close(self) -> None:
        """Close the stores."""
        self._host.close()
        if self._device is not None:
            self._device.close()
