"""Device arrays and files in RAM: copies at the speed of the bus, through a page-locked map of the files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from mmkv import device as cuda
from mmkv.device import Event
from mmkv.errors import MmkvError, TransferError
from mmkv.store.contract import Gate, LayerCopies, Progress, Store
from mmkv.store.files import PoolFile
from mmkv.store.lanes import Lanes
from mmkv.store.locked import LockedSegments
from mmkv.store.runs import Batch, NotLockedError, Planner, SegmentKey, kernel_for, submit

__all__ = ["MappedStore"]

_logger = logging.getLogger("mmkv")

# To page-lock what a transfer waits for pays up to this many times the bytes that it moves; beyond, the next best
# path is faster, and the background page-locks in its own time.
_WORTH_LOCKING = 4
_LOCKING_THREADS = 8


class MappedStore(Store):
    """Copies between device memory and files on tmpfs or hugetlbfs by the device's copy engines.

    Each segment of a file is mapped and page-locked once, for all devices. A transfer whose segments are all
    page-locked is submitted to the devices before `read` or `write` returns, in about a millisecond for 150 copies.

    Parameters
    ----------
    fallback : Store or None
        The next best path, for segments that are not page-locked; closed with this store. Without one they are
        page-locked when a transfer needs them.
    """

    path = "mapped"

    def __init__(self, fallback: Store | None) -> None:
        self._fallback = fallback
        self._locked = LockedSegments()
        self._lanes = Lanes("mmkv-mapped")
        self._streams: dict[tuple[int, bool], Any] = {}
        self._kernels: dict[int, Any] = {}
        self._kernel_refused: str | None = None
        self._lock = threading.Lock()

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`. With a gate, a thread of the store's submits the layers."""
        self._start(layers, self._transfer(progress, after, gate, to_device=True))

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files; see `Store.write`."""
        self._start(layers, self._transfer(progress, after, to_device=False))

    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Page-lock these segments of all files in the background."""
        device = cuda.current_ordinal()
        self._locked.prepare([(file, segment) for segment in segments for file in files], device)
        if device not in self._kernels:
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
            self._kernels.clear()
        cuda.trim()

    def describe(self) -> dict[str, Any]:
        """The path, the bytes that are page-locked, the next best path, and why a segment or a kernel was refused."""
        reason = self._locked.reason or self._kernel_refused
        return {
            "path": self.path,
            "locked_bytes": self._locked.locked_bytes,
            "fallback": None if self._fallback is None else self._fallback.describe(),
            **({} if reason is None else {"reason": reason}),
        }

    def _transfer(
        self, progress: Progress, after: Sequence[Event], gate: Gate | None = None, *, to_device: bool
    ) -> _Transfer:
        parts = _Parts(progress, self._locked.transfer_ended)
        planner = Planner(self._locked.bases, to_device=to_device, kernel=self._kernel_refused is None)
        return _Transfer(parts, tuple(after), to_device, gate, planner)

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job on a thread of the store's, or here and now where none can be started."""
        try:
            self._lanes.submit(job)
        except (MmkvError, RuntimeError):
            job()

    def _start(self, layers: Sequence[LayerCopies], transfer: _Transfer) -> None:
        self._locked.transfer_began()
        later: _Shares | None = None
        done = 0
        try:
            if transfer.gate is not None:
                later = self._share(transfer, layers)
            while later is None and done < len(layers):
                # The first layer is under way while the others are planned.
                share = layers[done : 2 * done + 1]
                try:
                    batch = self._plan(transfer, share)
                except NotLockedError:
                    later = self._share(transfer, layers[done:])
                else:
                    self._submit(transfer, batch)
                    done += len(share)
        except Exception as error:
            transfer.fail(error)
        if later is None:
            transfer.landing.put(None)
        else:
            self._start_step_by_step(transfer, later)
        self._run(partial(self._land, transfer))

    def _plan(self, transfer: _Transfer, layers: Sequence[LayerCopies]) -> Batch:
        planner = transfer.planner
        for layer in layers:
            _check_whole(layer, planner)
        batch = planner.plan(layers)
        if all(self._has_kernel(device) for device in batch.tables):
            return batch
        planner.kernel = False
        return planner.plan(layers)

    def _has_kernel(self, device: int) -> bool:
        if device not in self._kernels:
            self._compile(device)
        return device in self._kernels

    def _compile(self, device: int) -> None:
        with self._lock:
            if device not in self._kernels and self._kernel_refused is None:
                try:
                    self._kernels[device] = kernel_for(device)
                except MmkvError as error:
                    self._kernel_refused = str(error)
                    _logger.warning("many short copies go one by one, which is slower: %s", error)

    def _submit(self, transfer: _Transfer, batch: Batch, gate: Event | None = None) -> None:
        """Give the devices all copies of a batch, layer after layer, with an event after each; after `gate` fires."""
        progress = transfer.progress
        tables = {}
        for device, words in batch.tables.items():
            stream = self._stream(transfer, device)
            with cuda.current(device):
                address, keep = cuda.upload(words, device, stream)
            transfer.keep.append(keep)
            tables[device] = (address, len(words) // 4)
        for layer, size, by_device in batch.layers:
            if progress.stopped:
                return
            if not by_device:
                progress.landed(layer.layer)
                continue
            events: list[Event] = []
            for device, runs in by_device.items():
                stream = self._stream(transfer, device)
                if gate is not None:
                    gate.wait_on(stream.ptr)
                with cuda.current(device):
                    submit(runs, stream, self._kernels.get(device), tables.get(device), to_device=transfer.to_device)
                for event in events:
                    event.wait_on(stream.ptr)
                events = [cuda.record(device, stream.ptr)]
            progress.submitted(layer.layer, events[0])
            transfer.landing.put((layer.layer, size, events[0]))

    def _stream(self, transfer: _Transfer, device: int) -> Any:
        """The stream of the transfer's direction; at the transfer's first use it waits for the producer."""
        stream = transfer.streams.get(device)
        if stream is None:
            key = (device, transfer.to_device)
            with self._lock:
                stream = self._streams.get(key)
                if stream is None:
                    stream = self._streams[key] = cuda.new_stream(device)
            for event in transfer.after:
                event.wait_on(stream.ptr)
            transfer.streams[device] = stream
        return stream

    def _land(self, transfer: _Transfer) -> None:
        """Wait for the layers' events in order and tell the progress."""
        try:
            for layer, size, event in iter(transfer.landing.get, None):
                try:
                    event.synchronize()
                except (MmkvError, RuntimeError) as error:
                    transfer.fail(TransferError(f"layer {layer}: the device failed to copy: {error}", layer=layer))
                    continue
                transfer.progress.moved(self.path, size)
                transfer.progress.landed(layer)
            if transfer.failed:
                # Copies that no event follows may be under way.
                for stream in transfer.streams.values():
                    stream.synchronize()
        except Exception as error:
            transfer.fail(error)
        finally:
            transfer.keep.clear()
            transfer.progress.released()

    # --- layers that wait, for a gate or for their segments to be page-locked -----------------------------------

    def _share(self, transfer: _Transfer, layers: Sequence[LayerCopies]) -> _Shares:
        """Who moves which layer, where not all segments are page-locked."""
        own: list[LayerCopies] = []
        shares = _Shares(own, [], [])
        for layer in layers:
            lacks = [place for place in _places(layer, transfer.planner) if _key(place) not in self._locked.bases]
            cost = sum(file.segment_bytes for file, _, _ in lacks)
            refused = any(self._locked.is_refused(_key(place)) for place in lacks)
            if self._fallback is not None and (refused or cost > _WORTH_LOCKING * layer.bytes):
                shares.others.append(layer)
            else:
                own.append(layer)
                shares.missing.extend(lacks)
        return shares

    def _start_step_by_step(self, transfer: _Transfer, shares: _Shares) -> None:
        """Page-lock what is missing with several threads; submit each layer when it may be and its segments are."""
        queue = iter(shares.missing)
        turn = threading.Lock()
        for _ in range(min(_LOCKING_THREADS, len(shares.missing))):
            self._run(partial(self._lock_segments, transfer, queue, turn))
        # Before the own layers can be done, so that the progress is not released without these.
        if shares.others:
            self._by_fallback(transfer, shares.others)
        self._run(partial(self._submit_step_by_step, transfer, shares.own))

    def _lock_segments(
        self, transfer: _Transfer, queue: Iterator[tuple[PoolFile, int, int]], turn: threading.Lock
    ) -> None:
        while not transfer.progress.stopped:
            with turn:
                place = next(queue, None)
            if place is None:
                return
            try:
                self._locked.lock(*place)
            except MmkvError:
                # The layer that needs it finds out and takes another path.
                continue

    def _submit_step_by_step(self, transfer: _Transfer, layers: Sequence[LayerCopies]) -> None:
        try:
            for layer in layers:
                if transfer.progress.stopped:
                    break
                try:
                    for place in _places(layer, transfer.planner):
                        self._locked.lock(*place)
                except MmkvError as error:
                    if self._fallback is None:
                        raise TransferError(f"layer {layer.layer}: {error}", layer=layer.layer) from error
                    self._by_fallback(transfer, [layer])
                    continue
                batch = self._plan(transfer, [layer])
                event = transfer.gate(layer.layer) if transfer.gate is not None and layer.copies else None
                self._submit(transfer, batch, event)
        except Exception as error:
            transfer.fail(error)
        finally:
            transfer.landing.put(None)

    def _by_fallback(self, transfer: _Transfer, layers: Sequence[LayerCopies]) -> None:
        assert self._fallback is not None
        transfer.progress.add_part()
        if transfer.to_device:
            self._fallback.read(layers, transfer.progress, transfer.after, transfer.gate)
        else:
            self._fallback.write(layers, transfer.progress, transfer.after)


class _Parts:
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
        return self._whole.stopped

    def add_part(self) -> None:
        with self._lock:
            self._held += 1

    def released(self) -> None:
        with self._lock:
            self._held -= 1
            last = self._held == 0
        if last:
            self._ended()
            self._whole.released()


@dataclass(slots=True, eq=False)
class _Transfer:
    """One call of `read` or `write`.

    `landing` holds layers with their bytes and events, in order, and `None` when nothing more will be submitted.
    """

    progress: _Parts
    after: tuple[Event, ...]
    to_device: bool
    gate: Gate | None
    planner: Planner
    landing: SimpleQueue[tuple[int, int, Event] | None] = field(default_factory=SimpleQueue)
    streams: dict[int, Any] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)
    failed: bool = False

    def fail(self, error: Exception) -> None:
        self.failed = True
        self.progress.failed(error if isinstance(error, MmkvError) else TransferError(f"the copy failed: {error}"))


@dataclass(slots=True, eq=False)
class _Shares:
    """The layers that this store moves, those of its fallback, and the segments that have yet to be page-locked."""

    own: Sequence[LayerCopies]
    others: list[LayerCopies]
    missing: list[tuple[PoolFile, int, int]]


def _places(layer: LayerCopies, planner: Planner) -> list[tuple[PoolFile, int, int]]:
    """The files and segments that a layer touches, each with a device that reaches for it."""
    places: dict[SegmentKey, tuple[PoolFile, int, int]] = {}
    for copy in layer.copies:
        device = copy.buffer.device
        if device is None:
            raise ValueError(f"layer {layer.layer}, {copy.name!r}: host memory moves by no page-locked map")
        for segment in planner.segments(copy):
            places.setdefault((copy.file.identity, segment), (copy.file, segment, device))
    return list(places.values())


def _key(place: tuple[PoolFile, int, int]) -> SegmentKey:
    return place[0].identity, place[1]


def _check_whole(layer: LayerCopies, planner: Planner) -> None:
    """Check that the files reach to the end of the last segments that are touched: a map does not tell."""
    ends: dict[PoolFile, tuple[int, str]] = {}
    for copy in layer.copies:
        if segments := planner.segments(copy):
            end = (segments[-1] + 1) * copy.file.segment_bytes
            ends[copy.file] = max(ends.get(copy.file, (0, "")), (end, copy.name))
    for file, (end, name) in ends.items():
        try:
            file.require(end)
        except MmkvError as error:
            raise TransferError(f"layer {layer.layer}, {name!r}: {error}", layer=layer.layer, plane=name) from error
