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
    what : str
        What is brought, for errors.
    layers : int
        How many layers the layout has.
    finish : callable
        Makes what arrived resident, once all layers are there.
    release : callable
        Lets go of what the fill holds, after `finish` or an error.
    prefetch : Transfer, optional
        Who asked for it ahead of need, hears of it as a store would tell, and may cancel it. Without one, the fill is
        urgent.
    """

    def __init__(
        self,
        what: str,
        layers: int,
        *,
        finish: Callable[[Fill], None],
        release: Callable[[Fill], None],
        prefetch: Transfer | None = None,
    ) -> None:
        self.what = what
        self.bytes = 0
        self.path = ""
        self.urgent = prefetch is None
        self._prefetch = prefetch
        self._finish = finish
        self._release = release
        self._changed = threading.Condition()
        self._landed = [False] * layers
        self._error: Exception | None = None
        self._ended = False

    def hurry(self) -> None:
        """A take waits for it from now on: it yields to nobody, and cannot be cancelled."""
        self.urgent = True

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
            while not self.urgent:
                if self._prefetch is not None and self._prefetch.stopped:
                    raise TransferCancelled(f"{self.what} was cancelled")
                if not others_hurry():
                    return
                with self._changed:
                    self._changed.wait(_LOOK_SECONDS)

        return gate

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
        if self._prefetch is not None:
            self._prefetch.landed(layer)

    def moved(self, path: str, size: int) -> None:
        """See `Progress.moved`."""
        with self._changed:
            self.bytes += size
            self.path = path
        if self._prefetch is not None:
            self._prefetch.moved(path, size)

    def failed(self, error: Exception) -> None:
        """See `Progress.failed`."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
        if self._prefetch is not None:
            self._prefetch.failed(error)

    def released(self) -> None:
        """See `Progress.released`."""
        if self._error is None:
            try:
                self._finish(self)
            except MmkvError as error:
                self.failed(error)
        self._release(self)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._prefetch is not None:
            self._prefetch.released()
