"""Device arrays and files in RAM: copies at the speed of the bus, through a page-locked map of the files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.device import Event
from mmkv.errors import MmkvError, TransferError
from mmkv.store.contract import Gate, LayerCopies, Progress, Store
from mmkv.store.files import PoolFile
from mmkv.store.kernel import CopyKernel
from mmkv.store.lanes import Lanes
from mmkv.store.locked import LockedSegments
from mmkv.store.runs import NotLockedError, PlannedLayer, Planner, Share, segments_of
from mmkv.store.transit import Parts, Transit

__all__ = ["MappedStore"]

_LOCKING_THREADS = 8


class MappedStore(Store):
    """Copies between device memory and files on tmpfs or hugetlbfs by the device's copy engines.

    Each segment of a file is mapped and page-locked once, for all devices, in the background. A layer whose segments
    are all page-locked is submitted to its devices before `read` or `write` returns, in some ten microseconds.

    Parameters
    ----------
    fallback : Store or None
        The next best path, for layers that are not page-locked yet: to page-lock them would take as long as their
        copy, and hold up the driver meanwhile. Closed with this store. Without one they are page-locked when a
        transfer needs them.
    """

    path = "mapped"

    def __init__(self, fallback: Store | None) -> None:
        self._fallback = fallback
        self._locked = LockedSegments()
        self._lanes = Lanes("mmkv-mapped")
        self._streams: dict[tuple[int, bool], Any] = {}
        self._kernel = CopyKernel()
        self._lock = threading.Lock()

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`. With a gate, a thread of the store's submits the layers."""
        self._start(layers, self._transit(progress, after, gate, to_device=True))

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files; see `Store.write`."""
        self._start(layers, self._transit(progress, after, None, to_device=False))

    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Page-lock these segments of all files in the background."""
        device = cuda.current_ordinal()
        self._locked.prepare([(file, segment, device) for segment in segments for file in files])
        self._run(partial(self._compile, device))

    def forget(self, file: PoolFile, segment: int) -> None:
        """Unlock and unmap a segment; costs 0.014 s a GB."""
        self._locked.forget(file, segment)
        if self._fallback is not None:
            self._fallback.forget(file, segment)

    def close(self) -> None:
        """Unlock and unmap all segments; costs 0.014 s a GB."""
        self._lanes.close()
        self._locked.close()
        if self._fallback is not None:
            self._fallback.close()
        with self._lock:
            self._streams.clear()
        cuda.trim()

    def describe(self) -> dict[str, Any]:
        """The path, the bytes that are page-locked, the next best path, and why a segment or a kernel was refused."""
        reason = self._locked.reason or self._kernel.refused
        return {
            "path": self.path,
            "locked_bytes": self._locked.locked_bytes,
            "fallback": None if self._fallback is None else self._fallback.describe(),
            **({} if reason is None else {"reason": reason}),
        }

    def _transit(self, progress: Progress, after: Sequence[Event], gate: Gate | None, *, to_device: bool) -> Transit:
        parts = Parts(progress, self._locked.transfer_ended)
        planner = Planner(self._locked.bases, kernel=self._kernel.refused is None)
        return Transit(parts, tuple(after), to_device, gate, planner)

    def _compile(self, device: int) -> None:
        self._kernel.ready(device)

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job on a thread of the store's, or here and now where none can be started."""
        try:
            self._lanes.submit(job)
        except (MmkvError, RuntimeError):
            job()

    def _start(self, layers: Sequence[LayerCopies], transit: Transit) -> None:
        self._locked.transfer_began()
        by_thread: Sequence[LayerCopies] | None = None
        try:
            left = layers if transit.gate is not None else layers[self._submit_locked(transit, layers) :]
            own = left if self._fallback is None else self._leave_to_fallback(transit, left)
            if own and (transit.gate is not None or self._fallback is None):
                by_thread = own
            else:
                self._submit_locked(transit, own)
        except Exception as error:
            transit.fail(error)
        if by_thread is None:
            transit.landing.put(None)
        else:
            self._lock_ahead(transit, by_thread)
            self._run(partial(self._submit_one_by_one, transit, by_thread))
        # Not before all is submitted: it would take turns with this thread.
        self._run(partial(transit.land, self.path))

    # --- what is page-locked -------------------------------------------------------------------------------------

    def _submit_locked(self, transit: Transit, layers: Sequence[LayerCopies]) -> int:
        """Submit layers up to the first one that is not page-locked. Returns how many that are."""
        done = 0
        while done < len(layers):
            planned = []
            # The first layer is under way while the others are planned.
            wanted = layers[done : 2 * done + 1]
            for layer in wanted:
                try:
                    planned.append(self._plan(transit.planner, layer))
                except NotLockedError:
                    break
            self._submit(transit, planned)
            done += len(planned)
            if len(planned) < len(wanted):
                break
        return done

    def _plan(self, planner: Planner, layer: LayerCopies) -> PlannedLayer:
        planned = planner.plan(layer)
        if all(share.shape.table is None or self._kernel.ready(share.device) for share in planned.shares):
            return planned
        planner.kernel = False
        return planner.plan(layer)

    def _submit(self, transit: Transit, planned: Sequence[PlannedLayer], gate: Event | None = None) -> None:
        """Give the devices some layers in their order, with an event after each; the first once `gate` fires."""
        first = next((share.device for layer in planned for share in layer.shares), None)
        if first is None:
            for layer in planned:
                transit.progress.landed(layer.layer)
            return
        # One change of the current device for all layers, most often.
        with cuda.current(first):
            self._upload(transit, planned)
            for layer in planned:
                if transit.progress.stopped:
                    return
                if layer.shares:
                    self._submit_layer(transit, layer, gate)
                else:
                    transit.progress.landed(layer.layer)

    def _submit_layer(self, transit: Transit, layer: PlannedLayer, gate: Event | None) -> None:
        event: Event | None = None
        for share in layer.shares:
            stream = self._stream(transit, share.device)
            with cuda.current(share.device):
                if gate is not None:
                    gate.wait_on(stream.ptr)
                self._give(transit, share, stream)
                if event is not None:
                    # The layer's event is that of the last device.
                    event.wait_on(stream.ptr)
                event = cuda.record(share.device, stream.ptr)
        assert event is not None
        transit.submitted(layer, event)

    def _give(self, transit: Transit, share: Share, stream: Any) -> None:
        shape = share.shape
        if shape.table is None:
            targets, sources = shape.copies(share.addresses, to_device=transit.to_device)
            cuda.copy_all(targets, sources, shape.sizes, stream.ptr, to_device=transit.to_device)
        else:
            table = (shape.placed, shape.runs)
            self._kernel.launch(share.device, stream, table, share.placed, to_device=transit.to_device)

    def _upload(self, transit: Transit, planned: Sequence[PlannedLayer]) -> None:
        """Bring the kernel's tables and addresses to the devices, in one copy for each."""
        by_device: dict[int, list[Share]] = {}
        for layer in planned:
            for share in layer.shares:
                if share.shape.table is not None:
                    by_device.setdefault(share.device, []).append(share)
        for device, shares in by_device.items():
            words = []
            tables = {id(share.shape): share.shape for share in shares if not share.shape.placed}
            for shape in tables.values():
                assert shape.table is not None
                words.append(shape.table)
            words.append(np.array([address for share in shares for address in share.addresses], dtype=np.int64))
            stream = self._stream(transit, device)
            with cuda.current(device):
                place, keep = cuda.upload(np.concatenate(words), device, stream)
            transit.keep.append(keep)
            for shape, table in zip(tables.values(), words, strict=False):
                shape.placed = place
                place += table.nbytes
            for share in shares:
                share.placed = place
                place += 8 * len(share.addresses)

    def _stream(self, transit: Transit, device: int) -> Any:
        """The stream of the transfer's direction; at the transfer's first use it waits for the producer."""
        stream = transit.streams.get(device)
        if stream is None:
            key = (device, transit.to_device)
            with self._lock:
                stream = self._streams.get(key)
                if stream is None:
                    stream = self._streams[key] = cuda.new_stream(device)
            for event in transit.after:
                event.wait_on(stream.ptr)
            transit.streams[device] = stream
        return stream

    # --- what is not, and what waits for a gate --------------------------------------------------------------------

    def _leave_to_fallback(self, transit: Transit, layers: Sequence[LayerCopies]) -> list[LayerCopies]:
        """Let the fallback move the layers that are not page-locked, which the background does next. Gives the rest."""
        assert self._fallback is not None
        own: list[LayerCopies] = []
        others: list[LayerCopies] = []
        missing: list[tuple[PoolFile, int, int]] = []
        for layer in layers:
            lacks = [place for place in _places(layer) if (place[0].identity, place[1]) not in self._locked.bases]
            (others if lacks else own).append(layer)
            missing += lacks
        if others:
            self._locked.prepare(missing, first=True)
            transit.progress.add_part()
            if transit.to_device:
                self._fallback.read(others, transit.progress, transit.after, transit.gate)
            else:
                self._fallback.write(others, transit.progress, transit.after)
        return own

    def _lock_ahead(self, transit: Transit, layers: Sequence[LayerCopies]) -> None:
        """Page-lock what layers lack, with several threads, in their order."""
        if self._fallback is None:
            places = [place for layer in layers for place in _places(layer)]
            missing = [place for place in places if (place[0].identity, place[1]) not in self._locked.bases]
            queue, turn = iter(missing), threading.Lock()
            for _ in range(min(_LOCKING_THREADS, len(missing))):
                self._run(partial(self._lock_places, transit, queue, turn))

    def _lock_places(self, transit: Transit, queue: Iterator[tuple[PoolFile, int, int]], turn: threading.Lock) -> None:
        while not transit.progress.stopped:
            with turn:
                place = next(queue, None)
            if place is None:
                return
            try:
                self._locked.lock(*place)
            except MmkvError:
                # The layer that needs it finds out.
                continue

    def _submit_one_by_one(self, transit: Transit, layers: Sequence[LayerCopies]) -> None:
        """Submit each layer when its gate lets it and its segments are page-locked."""
        try:
            for layer in layers:
                if transit.progress.stopped:
                    break
                planned = self._plan_locked(transit.planner, layer)
                event = transit.gate(layer.layer) if transit.gate is not None and layer.copies else None
                self._submit(transit, [planned], event)
        except Exception as error:
            transit.fail(error)
        finally:
            transit.landing.put(None)

    def _plan_locked(self, planner: Planner, layer: LayerCopies) -> PlannedLayer:
        try:
            return self._plan(planner, layer)
        except NotLockedError:
            pass
        try:
            for place in _places(layer):
                self._locked.lock(*place)
        except MmkvError as error:
            raise TransferError(f"layer {layer.layer}: {error}", layer=layer.layer) from error
        return self._plan(planner, layer)


def _places(layer: LayerCopies) -> list[tuple[PoolFile, int, int]]:
    """The files and segments that a layer touches, each with a device that reaches for it."""
    places: dict[tuple[PoolFile, int], tuple[PoolFile, int, int]] = {}
    for copy in layer.copies:
        device = copy.buffer.device
        if device is None:
            raise ValueError(f"layer {layer.layer}, {copy.name!r}: host memory moves by no page-locked map")
        for segment in segments_of(copy):
            places.setdefault((copy.file, segment), (copy.file, segment, device))
    return list(places.values())
