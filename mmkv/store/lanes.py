"""Threads that copy the pieces of a transfer, a few at a time: what blocking reads and writes need to be fast."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mmkv.errors import MmkvError, TransferError
from mmkv.store.contract import LayerCopies, Progress
from mmkv.store.pieces import Batch, Piece

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Lanes", "drain"]

_IDLE_SECONDS = 10.0
# A lane is worth its start from about this many bytes on.
_BYTES_PER_LANE = 1 << 20


class Lanes:
    """Daemon threads that run jobs at once, kept for a while when idle.

    There is no queue: a job that hangs holds up no other. Who submits bounds how many run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, on an idle thread or a new one."""
        with self._changed:
            if self._closed:
                raise MmkvError(f"the threads {self._name!r} were stopped")
            if self._idle > len(self._jobs):
                self._jobs.append(job)
                self._changed.notify()
                return
        threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def _run(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            job()
            # The job holds buffers; an idle thread must not keep them alive.
            job = None
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._jobs or self._closed, timeout=_IDLE_SECONDS)
                self._idle -= 1
                if self._jobs:
                    job = self._jobs.popleft()

    def close(self) -> None:
        """Let idle threads end; a running job runs on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def drain(
    lanes: Lanes,
    layers: Sequence[LayerCopies],
    batches: Iterator[Batch],
    move: Callable[[Piece], str],
    progress: Progress,
    *,
    threads: int,
    after: Sequence[Event] = (),
) -> None:
    """Copy `batches` with `move` on at most `threads` lanes, and tell `progress`. Returns at once.

    Parameters
    ----------
    move : callable
        Copies one piece, or raises. Gives the path that it took, as receipts name it.
    """
    left = {layer.layer: layer.bytes for layer in layers}
    total = sum(left.values())
    wanted = running = max(1, min(threads, -(-total // _BYTES_PER_LANE)))
    lock = threading.Lock()
    # Apart from the other: whose turn it is may wait for a gate, while others land what they have.
    turn = threading.Lock()

    def lane() -> None:
        nonlocal running
        try:
            for event in after:
                event.synchronize()
            while not progress.stopped:
                with turn:
                    batch = next(batches, None)
                if batch is None:
                    break
                _move_batch(batch)
        except Exception as error:
            progress.failed(error)
        finally:
            with lock:
                running -= 1
                last = running == 0
            if last:
                progress.released()

    def _move_batch(batch: Batch) -> None:
        for piece in batch:
            if progress.stopped:
                return
            path = _call(move, piece)
            progress.moved(path, piece.size, piece.host_address)
            with lock:
                left[piece.layer] -= piece.size
                landed = left[piece.layer] == 0
            if landed:
                progress.landed(piece.layer)

    for layer in layers:
        if left[layer.layer] == 0:
            progress.landed(layer.layer)
    for started in range(wanted):
        try:
            lanes.submit(lane)
        except (MmkvError, RuntimeError) as error:
            # Fewer lanes do it, too, but none does not.
            if started == 0:
                progress.failed(MmkvError(f"no thread could be started to copy with: {error}"))
            with lock:
                running -= wanted - started
                last = running == 0
            if last:
                progress.released()
            return


def _call(move: Callable[[Piece], str], piece: Piece) -> str:
    """Move a piece; an error names its layer and its plane."""
    where = f"layer {piece.layer}, {piece.copy.name!r}"
    try:
        return move(piece)
    except MmkvError as error:
        raise TransferError(f"{where}: {error}", layer=piece.layer, plane=piece.copy.name) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise TransferError(
            f"{where}: copying {piece.size} bytes at {piece.file_offset} of {piece.copy.file.path} failed: {error}",
            layer=piece.layer,
            plane=piece.copy.name,
        ) from error
