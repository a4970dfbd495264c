"""The route of a transfer: which store moves which layers, where a version lies in one tier or in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmkv.memory import SlotMemory
from mmkv.movers import Movers, Share
from mmkv.store.contract import Gate, LayerCopies, Progress
from mmkv.transfer import Transfer

__all__ = ["Route", "plan_route"]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The shares of a transfer; none where no byte moves.

    Attributes
    ----------
    shares : list of Share
        What each store moves, and in which order they begin.
    stores_by_layer : list of int
        How many of them move a part of each layer.
    """

    shares: list[Share]
    stores_by_layer: list[int]

    @property
    def parts(self) -> int:
        """How often the transfer hears `released`."""
        return max(1, len(self.shares))

    def start(
        self,
        direction: Literal["read", "write"],
        transfer: Transfer,
        after: Sequence[Any] = (),
        gate: Gate | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Begin to move everything; `progress`, if there is one, hears what the stores say in the transfer's place."""
        transfer.begin()
        for share in self.shares:
            share.start(direction, progress or transfer, after, gate)
        if not self.shares:
            transfer.released()


def plan_route(memory: SlotMemory, tiers: Sequence[tuple[Movers, Sequence[LayerCopies]]]) -> Route:
    """The route of copies that lie in some tiers, whose stores are asked in that order.

    Each tier lists all layers, or the same ones; a layer without copies lands with the first tier.
    """
    by_layer = list(zip(*(layers for _, layers in tiers), strict=True))
    empty = [not any(copies.copies for copies in group) for group in by_layer]
    shares: list[Share] = []
    if not all(empty):
        for index, (movers, layers) in enumerate(tiers):
            mine = [
                copies
                for copies, nothing in zip(layers, empty, strict=True)
                if copies.copies or (index == 0 and nothing)
            ]
            shares += movers.shares(memory, mine)
    counts = [0] * len(memory.planes)
    for share in shares:
        for copies in share.layers:
            counts[copies.layer] += 1
    return Route(shares, counts)
