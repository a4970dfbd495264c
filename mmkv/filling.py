"""Fills: bytes on their way from the path into the hot tier, which several takes may wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmkv.errors import MmkvError, TransferCancelled, TransferError
from mmkv.transfer import Transfer

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Fill"]

_LOOK_SECONDS = 0.05


class Fill:
    """The progress of one read from the path into the hot tier. Every method is safe from any thread.

    Parameters
    ----------
    transfer : Transfer
        Hears of it as a store would tell; who asked for it ahead of need may cancel it.
    layers : int
        How many layers the layout has.
    finish : callable
        Makes what arrived resident, once all layers are there.
    release : callable
        Lets go of what the fill holds, after `finish` or an error.
    urgent : bool
        Whether a take waits for it: it then yields to nobody and ends well or with an error.
    """

    def __init__(
        self,
        transfer: Transfer,
        layers: int,
        *,
        finish: Callable[[Fill], None],
        release: Callable[[Fill], None],
        urgent: bool,
    ) -> None:
        self.what = transfer.what
        self.bytes = 0
        self.path = ""
        self.urgent = urgent
        self._transfer = transfer
        self._finish = finish
        self._release = release
        self._changed = threading.Condition()
        self._landed = [False] * layers
        self._error: Exception | None = None

    def hurry(self) -> bool:
        """A take waits for it from now on. Returns `False` where it has failed or was cancelled already."""
        with self._changed:
            if self._error is not None:
                return False
            self.urgent = True
            self._changed.notify_all()
            return True

    def wait(self, layer: int) -> None:
        """Wait until a layer is in the hot tier.

        Raises
        ------
        TransferError
            It could not be brought there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._landed[layer] or self._error is not None)
            if self._error is not None:
                raise TransferError(f"{self.what} failed: {self._error}", layer=layer) from self._error

    def yielding_gate(self, others_hurry: Callable[[], bool]) -> Callable[[int], Event | None]:
        """What lets each layer begin: once no urgent fill is under way, unless this one became urgent."""

        def gate(_: int) -> None:
            while not self._is_cancelled() and not self.urgent and others_hurry():
                with self._changed:
                    self._changed.wait_for(lambda: self.urgent, _LOOK_SECONDS)
            if self._error is not None:
                raise self._error

        return gate

    def _is_cancelled(self) -> bool:
        """Whether whoever asked for it gave up before a take came that waits for it; nothing joins it then."""
        with self._changed:
            if self._transfer.stopped and not self.urgent and self._error is None:
                self._error = TransferCancelled(f"{self.what} was cancelled")
            return self._error is not None

    # What the store calls: `mmkv.store.contract.Progress`

    @property
    def stopped(self) -> bool:
        """Whether no further copy is to be started."""
        return self._error is not None

    def submitted(self, layer: int, event: Event) -> None:
        """See `Progress.submitted`; a read into host memory submits nothing."""

    def landed(self, layer: int) -> None:
        """See `Progress.landed`."""
        with self._changed:
            self._landed[layer] = True
            self._changed.notify_all()
        self._transfer.landed(layer)

    def moved(self, path: str, size: int, _address: int | None = None) -> None:
        """See `Progress.moved`."""
        with self._changed:
            self.bytes += size
            self.path = path
        self._transfer.moved(path, size)

    def failed(self, error: Exception) -> None:
        """See `Progress.failed`."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        self._transfer.failed(error)

    def released(self) -> None:
        """See `Progress.released`."""
        if self._error is None:
            try:
                self._finish(self)
            except MmkvError as error:
                self.failed(error)
        self._release(self)
        self._transfer.released()
