"""One transfer on its way through the page-locked map: what was submitted, and who hears when it landed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from mmkv.device import Event
from mmkv.errors import MmkvError, TransferError
from mmkv.store.contract import Gate, Progress
from mmkv.store.runs import PlannedLayer, Planner

__all__ = ["Parts", "Transit"]


class Parts:
    """The progress of a transfer that several stores share: ended and released once all of them let go."""

    def __init__(self, whole: Progress, ended: Callable[[], None]) -> None:
        self._whole = whole
        self._ended = ended
        self._held = 1
        self._lock = threading.Lock()
        self.submitted = whole.submitted
        self.landed = whole.landed
        self.moved = whole.moved
        self.failed = whole.failed

    @property
    def stopped(self) -> bool:
        """See `Progress.stopped`."""
        return self._whole.stopped

    def add_part(self) -> None:
        """Wait for one more store to release the transfer."""
        with self._lock:
            self._held += 1

    def released(self) -> None:
        """See `Progress.released`; called once a part."""
        with self._lock:
            self._held -= 1
            last = self._held == 0
        if last:
            self._ended()
            self._whole.released()


@dataclass(slots=True, eq=False)
class Transit:
    """One call of `read` or `write`.

    Attributes
    ----------
    progress : Parts
        Who hears of it.
    after : tuple of Event
        What the copies wait for.
    to_device : bool
        Whether bytes go from files to devices.
    gate : Gate or None
        What each layer waits for.
    planner : Planner
        Finds the addresses of the runs.
    landing : SimpleQueue of (layer, bytes, Event)
        The layers that were submitted, in order, and `None` when nothing more will be.
    streams : dict of int to stream
        The streams that the copies are in, by device.
    keep : list
        What must live until the copies are done.
    has_failed : bool
        Whether copies may be in the streams that no event follows.
    """

    progress: Parts
    after: tuple[Event, ...]
    to_device: bool
    gate: Gate | None
    planner: Planner
    landing: SimpleQueue[tuple[int, int, Event] | None] = field(default_factory=SimpleQueue)
    streams: dict[int, Any] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)
    has_failed: bool = False

    def submitted(self, layer: PlannedLayer, event: Event) -> None:
        """All copies of a layer are in the streams, before `event`."""
        self.progress.submitted(layer.layer, event)
        self.landing.put((layer.layer, layer.bytes, event))

    def fail(self, error: Exception) -> None:
        """Tell that nothing more is submitted, and why."""
        self.has_failed = True
        self.progress.failed(error if isinstance(error, MmkvError) else TransferError(f"the copy failed: {error}"))

    def land(self, path: str) -> None:
        """Wait for the layers' events in order and tell the progress; at last, release the transfer."""
        moved = 0
        try:
            for layer, size, event in iter(self.landing.get, None):
                try:
                    event.synchronize()
                except (MmkvError, RuntimeError) as error:
                    self.fail(TransferError(f"layer {layer}: the device failed to copy: {error}", layer=layer))
                    continue
                moved += size
                self.progress.landed(layer)
            if self.has_failed:
                for stream in self.streams.values():
                    stream.synchronize()
        except Exception as error:
            self.fail(error)
        finally:
            if moved:
                self.progress.moved(path, moved)
            self.keep.clear()
            self.progress.released()
