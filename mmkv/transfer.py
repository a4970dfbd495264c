"""Transfers: park and take under way, followed layer by layer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mmkv import device as cuda
from mmkv.errors import MmkvError, PoolClosed, TransferCancelled, TransferError, TransferTimeout
from mmkv.info import TransferKind, TransferStats
from mmkv.refused import started

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Receipt", "Transfer"]

# What stores and the pool call of a transfer.
_WITHIN = {
    "abandon", "begin", "deadline", "expire", "failed", "landed", "moved", "moved_bytes", "passed", "quarantined",
    "released", "started", "stopped", "submitted", "wait_for_parts",
}  # fmt: skip
_log = logging.getLogger("mmkv")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a transfer did.

    Attributes
    ----------
    tokens : int
        Tokens of the version that was parked, or of the prefix that was taken.
    tokens_written : int
        Those of them that were moved; the pool or the slot had the others.
    bytes : int
        Bytes moved.
    seconds : float
        From the call until the last byte was down and, for a park, committed.
    path : str
        What moved the bytes: `mapped`, `gds`, `kvikio-posix`, `posix-direct` (past the page cache), `posix`, several
        joined by `+`, `none` if none moved.
    verified : int
        Bytes that a take found to be those that were parked; 0 where they needed no check.
    """

    tokens: int
    tokens_written: int
    bytes: int
    seconds: float
    path: str
    verified: int = 0

    @property
    def gbps(self) -> float:
        """Bytes over seconds, in 10**9 bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Transfer:
    """A park or a take under way. Every method is safe from any thread.

    The pool makes transfers; stores tell them their progress. Iterating gives the layers' numbers in order, each when
    its bytes are down; `await` gives the receipt.
    """

    def __init__(
        self,
        what: str,
        layers: int,
        *,
        kind: TransferKind = "take",
        parts: int,
        deadline: float | None,
        finish: Callable[[], None],
        release: Callable[[Transfer], None],
        tokens: int = 0,
        tokens_written: int = 0,
        stores_by_layer: Sequence[int] | None = None,
    ) -> None:
        self.what = what
        self.kind = kind
        self.tokens = tokens
        self.tokens_written = tokens_written
        self.verified = 0
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.moved_bytes: dict[str, int] = {}
        self._seconds = deadline
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._layers = layers
        self._events: dict[int, Event] = {}
        self._landed = [False] * layers
        # How many stores have still to say that a layer landed.
        self._missing = [1] * layers if stores_by_layer is None else list(stores_by_layer)
        self._parts = parts
        self._finish = finish
        self._release = release
        self._error: Exception | None = None
        self._receipt: Receipt | None = None
        self._concluding = False
        self._settled = False
        self._released = False
        self._callbacks: list[Callable[[Transfer], None]] = []

    def __repr__(self) -> str:
        return f"Transfer({self.what!r}, layers={sum(self._landed)}/{self._layers}, {self._state()})"

    def __dir__(self) -> Iterable[str]:
        """What an engine calls: not what stores and the pool do."""
        return [name for name in super().__dir__() if name not in _WITHIN]

    def _state(self) -> str:
        if not self._settled:
            return "under way"
        return "done" if self._error is None else f"failed: {self._error}"

    # What the engine calls

    def wait(self, layer: int, stream: Any = None) -> None:
        """Wait for one layer.

        Parameters
        ----------
        layer : int
            The layer.
        stream : stream, optional
            A CuPy or Torch stream, or a handle. With one, the host waits only until the layer's copy is submitted,
            and the stream waits for the rest; without, the host waits until the layer's bytes are down.

        Raises
        ------
        TransferError, MmkvError
            The transfer failed.
        """
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer {layer} is not one of the {self._layers} layers")
        handle = None if stream is None else cuda.stream_handle(stream)
        self._require_process()
        with self._changed:
            self._changed.wait_for(
                lambda: self._landed[layer] or self._error is not None or (handle is not None and layer in self._events)
            )
            if self._error is not None:
                raise self._error
            event = None if handle is None or self._landed[layer] else self._events[layer]
        if event is not None and handle is not None:
            event.wait_on(handle)

    def done(self, layer: int | None = None) -> bool:
        """Whether a layer's bytes are down; without a layer, whether the whole transfer ended, well or not."""
        self._require_process()
        with self._changed:
            if layer is None:
                return self._settled
            if not 0 <= layer < self._layers:
                raise ValueError(f"layer {layer} is not one of the {self._layers} layers")
            return self._landed[layer]

    def __iter__(self) -> Iterator[int]:
        for layer in range(self._layers):
            self.wait(layer)
            yield layer

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until the transfer ended, and give its receipt.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; the transfer goes on afterwards.

        Raises
        ------
        TransferError, TransferTimeout, TransferCancelled, MmkvError
            The transfer failed, passed the pool's deadline or was cancelled.
        TimeoutError
            It did not end within `timeout`.
        """
        self._require_process()
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled, timeout):
                raise TimeoutError(f"{self.what} did not end within {timeout} s; it goes on")
            return self._outcome()

    def cancel(self) -> bool:
        """Start no further copy. Returns whether the transfer had not ended yet.

        What is under way is waited for; then `result` raises `TransferCancelled`. A cancelled park leaves the former
        version as it was; a cancelled take leaves the slot's rows undefined.
        """
        self._require_process()
        with self._changed:
            if self._settled or self._concluding:
                return False
            if self._error is None:
                self._error = TransferCancelled(f"{self.what} was cancelled")
            self._changed.notify_all()
            return True

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(transfer)` when the transfer ended, at once if it has."""
        self._require_process()
        with self._changed:
            if not self._settled:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Receipt]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Transfer) -> None:
            # Who waited may have given up and closed the loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(wake)
        yield from future
        return self.result()

    # What stores call: `mmkv.store.contract.Progress`

    @property
    def stopped(self) -> bool:
        """Whether no further copy is to be started."""
        return self._error is not None

    def submitted(self, layer: int, event: Event) -> None:
        """See `Progress.submitted`."""
        with self._changed:
            # One store's event says nothing of what another one moves.
            if self._missing[layer] <= 1:
                self._events[layer] = event
                self._changed.notify_all()

    def landed(self, layer: int) -> None:
        """See `Progress.landed`."""
        with self._changed:
            self._missing[layer] -= 1
            if self._error is None and self._missing[layer] <= 0:
                self._landed[layer] = True
                self._changed.notify_all()

    def moved(self, path: str, size: int, _address: int | None = None) -> None:
        """See `Progress.moved`."""
        with self._changed:
            self.moved_bytes[path] = self.moved_bytes.get(path, 0) + size

    def failed(self, error: Exception) -> None:
        """See `Progress.failed`."""
        with self._changed:
            if self._error is None:
                self._error = error if isinstance(error, MmkvError) else TransferError(f"{self.what} failed: {error}")
                if self._error is not error:
                    self._error.__cause__ = error
            self._changed.notify_all()

    def released(self) -> None:
        """See `Progress.released`; called once a part."""
        with self._changed:
            self._parts -= 1
            if self._parts > 0:
                self._changed.notify_all()
                return
            self._concluding = self._error is None
        if self._concluding:
            try:
                self._finish()
            except BaseException as error:
                self.failed(error if isinstance(error, Exception) else TransferError(f"interrupted: {error!r}"))
                self._concluding = False
                if not isinstance(error, Exception):
                    self._let_go()
                    raise
        self._let_go()

    def _let_go(self) -> None:
        try:
            self._release(self)
        finally:
            self._settle(final=True)

    # What the pool calls

    def begin(self) -> None:
        """Start the clock of the deadline and of the receipt."""
        self.started = time.monotonic()
        self.deadline = None if self._seconds is None else self.started + self._seconds

    def abandon(self, error: Exception) -> None:
        """End a transfer that was not begun, so that nothing holds it."""
        self.failed(error)
        for _ in range(self._parts):
            self.released()

    def passed(self, layer: int) -> Event | None:
        """Wait until a layer is submitted, and give its event, or until it landed."""
        with self._changed:
            self._changed.wait_for(lambda: self._landed[layer] or self._error is not None or layer in self._events)
            if self._error is not None:
                raise self._error
            return None if self._landed[layer] else self._events[layer]

    def wait_for_parts(self, parts: int) -> None:
        """Wait until only `parts` of those that hold the transfer have not released it."""
        with self._changed:
            self._changed.wait_for(lambda: self._parts <= parts)

    def exception(self) -> Exception | None:
        """Why the transfer failed, if it has."""
        return self._error

    def expire(self) -> bool:
        """End the transfer for those who wait, if it passed its deadline; the hardware may still be at it."""
        with self._changed:
            if self._concluding or self._settled or self.deadline is None or time.monotonic() < self.deadline:
                return False
            hanging = next((layer for layer, landed in enumerate(self._landed) if not landed), None)
            text = f"{self.what} was not done after {self._seconds} s"
            if self._error is not None:
                text += f"; before that, {self._error}"
            elif hanging is not None:
                text += f": layer {hanging} did not land"
            self._error = TransferTimeout(text, layer=hanging)
        self._settle(final=False)
        return True

    def stats(self) -> TransferStats:
        """How far it has come."""
        with self._changed:
            moved = sum(self.moved_bytes.values())
            seconds = time.monotonic() - self.started
            return TransferStats(self.what, self.kind, self._layers, sum(self._landed), moved, seconds)

    @property
    def quarantined(self) -> bool:
        """Whether the transfer ended for those who wait while the hardware may still be at it."""
        return self._settled and not self._released

    def _settle(self, *, final: bool) -> None:
        with self._changed:
            self._released = self._released or final
            if self._settled:
                return
            if self._error is None:
                self._receipt = Receipt(
                    self.tokens,
                    self.tokens_written,
                    sum(self.moved_bytes.values()),
                    time.monotonic() - self.started,
                    "+".join(sorted(self.moved_bytes)) or "none",
                    self.verified,
                )
                self._landed = [True] * self._layers
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if final or not callbacks:
            self._call(callbacks)
        else:
            # Whoever looks after deadlines has others to look after.
            try:
                started(partial(self._call, callbacks), "mmkv-callbacks")
            except MmkvError:
                # As at the interpreter's end, or at the limit of threads.
                self._call(callbacks)

    def _call(self, callbacks: list[Callable[[Transfer], None]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                # Not even one that exits may keep the others from being called.
                _log.exception("a callback of %s failed", self.what)

    def _outcome(self) -> Receipt:
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return self._receipt

    def _require_process(self) -> None:
        # Before any lock: in a forked child it may be held for ever.
        if os.getpid() != self._pid:
            raise PoolClosed(f"{self.what} belongs to process {self._pid}; a forked child has no pool")
