"""Swaps: one conversation leaves a slot while another arrives in its place, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mmkv.errors import MmkvError, TransferError
from mmkv.transfer import Transfer

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Handover"]


class Handover:
    """The order between the park that leaves a slot and the take that arrives in it.

    A layer is taken once it is parked. If the park fails after layers were overwritten, they are copied back before
    either transfer ends.

    Parameters
    ----------
    take : Transfer
        The take; the handover is one of its parts, so that it ends after the park was committed or undone.
    """

    def __init__(self, take: Transfer) -> None:
        self._take = take
        self._park: Transfer | None = None
        self._put_back: Callable[[Sequence[int]], None] | None = None
        self._overwritten: list[int] = []

    def leave(self, park: Transfer, put_back: Callable[[Sequence[int]], None]) -> None:
        """The park that makes way, and what copies layers of it back into the slot."""
        self._park, self._put_back = park, put_back

    def gate(self, layer: int) -> Event | None:
        """Wait until a layer of the slot may be overwritten; the event, if there is one, says when on a device."""
        assert self._park is not None
        event = self._park.passed(layer)
        self._overwritten.append(layer)
        return event

    def park_ended(self, park: Transfer) -> None:
        """The park was committed, or it failed while its blocks are still held: put the slot back."""
        error = park.exception()
        if error is not None:
            self._take.failed(TransferError(f"{park.what} failed, so that nothing could be taken: {error}"))
            self._take.wait_for_parts(1)
            if self._overwritten and self._put_back is not None:
                try:
                    self._put_back(self._overwritten)
                except MmkvError as second:
                    error.add_note(f"the slot's layers {self._overwritten} could not be put back: {second}")
        self._take.released()
