"""The errors of mmkv. Every failure of a pool is one of these; a bad argument is a ValueError or a TypeError."""

from __future__ import annotations

__all__ = [
    "ConversationCorrupt",
    "ConversationNotFound",
    "LayoutMismatch",
    "MmkvError",
    "PoolClosed",
    "PoolCorrupt",
    "PoolFull",
    "PoolLocked",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
]


class MmkvError(Exception):
    """Base class of every error that mmkv raises on its own behalf."""


class ConversationNotFound(MmkvError, KeyError):
    """The pool holds no conversation of that id; read its prompt again."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class LayoutMismatch(MmkvError):
    """The bytes of a pool and those of a slot are laid out differently, or belong to different models."""


class PoolFull(MmkvError):
    """No room could be made, within the capacity or on the file system. Nothing was lost."""


class PoolLocked(MmkvError):
    """Another process owns the pool.

    Attributes
    ----------
    pid : int or None
        The owner's process id, where the lock file tells it.
    """

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class PoolCorrupt(MmkvError):
    """The pool's directory does not hold what a pool of this format must hold. Nothing was changed."""


class PoolClosed(MmkvError):
    """The pool was closed, or this process is a forked child of its owner."""


class ConversationCorrupt(MmkvError):
    """The bytes of a conversation are not those that were parked; read its prompt again.

    Attributes
    ----------
    layer : int or None
        The first layer that differs; -1 where it is the ids.
    plane : str or None
        The plane or the state there.
    tokens : tuple of int or None
        The tokens `[first, end)` of the first block that differs there.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: int | None = None,
        plane: str | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.plane = plane
        self.tokens = tokens


class TransferError(MmkvError):
    """A copy between a slot and the pool failed.

    Attributes
    ----------
    layer : int or None
        The layer whose copy failed.
    plane : str or None
        The plane or the state whose copy failed.
    """

    def __init__(self, message: str, *, layer: int | None = None, plane: str | None = None) -> None:
        super().__init__(message)
        self.layer = layer
        self.plane = plane


class TransferTimeout(TransferError, TimeoutError):
    """A transfer was not done by its deadline. What it uses stays in quarantine until the hardware lets go of it."""


class TransferCancelled(TransferError):
    """The transfer was cancelled before it was done."""
