"""Which conversations are meant, and in which order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from mmkv.info import ConversationInfo

__all__ = ["Selection", "SortKey", "sort_infos"]


class SortKey(StrEnum):
    """What `list` can sort by."""

    RECENT = "recent"
    ID = "id"
    NAMESPACE = "namespace"
    TOKENS = "tokens"
    SIZE = "size"
    ALONE = "alone"
    EXTENTS = "extents"
    CHECKPOINTS = "checkpoints"
    AGE = "age"
    TAKEN = "taken"
    PINNED = "pinned"


# The largest, the oldest, the longest not taken and the pinned come first; names from a to z.
_ORDERS: dict[SortKey, Callable[[ConversationInfo], Any]] = {
    SortKey.ID: lambda info: info.conversation,
    SortKey.NAMESPACE: lambda info: (info.namespace, info.conversation),
    SortKey.TOKENS: lambda info: -info.tokens,
    SortKey.SIZE: lambda info: -info.bytes,
    SortKey.ALONE: lambda info: -info.owned_bytes,
    SortKey.EXTENTS: lambda info: -info.extents,
    SortKey.CHECKPOINTS: lambda info: -len(info.checkpoints),
    SortKey.AGE: lambda info: info.parked,
    SortKey.TAKEN: lambda info: info.taken or 0.0,
    SortKey.PINNED: lambda info: not info.pinned,
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that a conversation meets all at once; those left out are met by every one.

    Attributes
    ----------
    namespace : str or None
        Its namespace, to the letter; the empty one is a namespace, too.
    match : str or None
        A pattern for its id, with `*`, `?` and `[...]`.
    pinned : bool
        Whether it must be pinned.
    larger_than : int or None
        Bytes that its size must exceed.
    older_than : float or None
        Seconds since it was last parked that must have passed.
    """

    namespace: str | None = None
    match: str | None = None
    pinned: bool = False
    larger_than: int | None = None
    older_than: float | None = None

    def chosen(self, infos: Iterable[ConversationInfo], now: float) -> list[ConversationInfo]:
        """Those of `infos` that meet the conditions, in their order."""
        return [info for info in infos if self._meets(info, now)]

    def _meets(self, info: ConversationInfo, now: float) -> bool:
        return (
            (self.namespace is None or info.namespace == self.namespace)
            and (self.match is None or fnmatchcase(info.conversation, self.match))
            and (info.pinned or not self.pinned)
            and (self.larger_than is None or info.bytes > self.larger_than)
            and (self.older_than is None or now - info.parked > self.older_than)
        )


def sort_infos(infos: Iterable[ConversationInfo], key: SortKey, *, reverse: bool) -> list[ConversationInfo]:
    """The conversations in order; `infos` come the least recently used first, and equals the other way round."""
    recent_first = list(infos)[::-1]
    ordered = recent_first if key is SortKey.RECENT else sorted(recent_first, key=_ORDERS[key])
    return ordered[::-1] if reverse else ordered
