"""A memory-mapped, file-backed pool for the KV caches of an LLM engine's conversations."""

from mmkv.errors import (
    ConversationCorrupt,
    ConversationNotFound,
    LayoutMismatch,
    MmkvError,
    PoolClosed,
    PoolCorrupt,
    PoolFull,
    PoolLocked,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mmkv.info import ConversationInfo, PoolStats, TierStats, TransferStats
from mmkv.layout import Layer, Layout, Plane, State
from mmkv.match import Match
from mmkv.paged import PagedSlot
from mmkv.pool import Pool
from mmkv.slot import Slot
from mmkv.transfer import Receipt, Transfer

__all__ = [
    "ConversationCorrupt",
    "ConversationInfo",
    "ConversationNotFound",
    "Layer",
    "Layout",
    "LayoutMismatch",
    "Match",
    "MmkvError",
    "PagedSlot",
    "Plane",
    "Pool",
    "PoolClosed",
    "PoolCorrupt",
    "PoolFull",
    "PoolLocked",
    "PoolStats",
    "Receipt",
    "Slot",
    "State",
    "TierStats",
    "Transfer",
    "TransferCancelled",
    "TransferError",
    "TransferStats",
    "TransferTimeout",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    # Not the modules, which are an affair of the library's.
    return [*__all__, "__version__"]
