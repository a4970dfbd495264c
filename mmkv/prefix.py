"""Finding prefixes: a chain of hashes over whole blocks of ids names candidates, the ids themselves decide."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Set
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["PrefixIndex", "as_token_ids", "chain_hashes", "continued_hashes", "first_seed"]

Item = TypeVar("Item", bound=Hashable)


def as_token_ids(token_ids: Any) -> npt.NDArray[np.int64]:
    """The ids as a contiguous array of int64; unsigned 64-bit ids keep their bits.

    Raises
    ------
    TypeError
        They are no integers, or lie on a device.
    ValueError
        They are not one-dimensional, or do not fit into 64 bits.
    """
    if token_ids is None or isinstance(token_ids, str | bytes | Set | Mapping | Iterator):
        raise TypeError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"token ids must be a sequence of integers in host memory: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, not of the shape {ids.shape}")
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.dtype.kind in "fO" and not isinstance(token_ids, np.ndarray):
        ids = _large_ids(ids, token_ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, not {ids.dtype.name}")
    if ids.dtype == np.uint64:
        return np.ascontiguousarray(ids).view(np.int64)
    return np.ascontiguousarray(ids, dtype=np.int64)


def _large_ids(ids: npt.NDArray[Any], values: Any) -> npt.NDArray[Any]:
    # Of a list with ids of 2**63 and more NumPy makes floating-point numbers or objects.
    if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values):
        return ids
    try:
        return np.array([int(value) for value in values], dtype=np.uint64)
    except OverflowError:
        raise ValueError("token ids must fit into 64 bits, all signed or all unsigned") from None


def chain_hashes(
    ids: npt.NDArray[np.int64], namespace: str, block_tokens: int, known: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.uint64]:
    """The hash after each whole block of `ids`, each seeded with the one before, the first with the namespace's.

    Parameters
    ----------
    ids : ndarray of int64, shape (tokens,)
        The ids.
    known : ndarray of uint64, optional
        The hashes of the leading blocks, if they are known.

    Returns
    -------
    ndarray of uint64, shape (tokens // block_tokens,)
        XXH3-64 chain values. About 0.1 ms for 100,000 ids.
    """
    blocks = len(ids) // block_tokens
    hashes = np.empty(blocks, dtype=np.uint64)
    start = 0 if known is None else min(len(known), blocks)
    if known is not None:
        hashes[:start] = known[:start]
    seed = int(hashes[start - 1]) if start else first_seed(namespace)
    hashes[start:] = continued_hashes(ids[start * block_tokens : blocks * block_tokens], seed, block_tokens)
    return hashes


def first_seed(namespace: str) -> int:
    """The seed of the first block's hash."""
    return xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass"))


def continued_hashes(ids: npt.NDArray[np.int64], seed: int, block_tokens: int) -> list[int]:
    """The hashes of whole blocks of ids behind one whose hash is `seed`."""
    data = ids.data.cast("B")
    size = block_tokens * ids.itemsize
    hashes = []
    for start in range(0, len(ids) * ids.itemsize, size):
        seed = xxhash.xxh3_64_intdigest(data[start : start + size], seed=seed)
        hashes.append(seed)
    return hashes


class PrefixIndex(Generic[Item]):
    """Which items pass through which chain hash."""

    def __init__(self) -> None:
        # Most prefixes belong to one item: a set only where several share one.
        self._items: dict[int, Item | set[Item]] = {}

    def add(self, hashes: npt.NDArray[np.uint64], item: Item) -> None:
        """Let `item` pass through `hashes`."""
        for value in hashes.tolist():
            held = self._items.setdefault(value, item)
            if isinstance(held, set):
                held.add(item)
            elif held is not item:
                self._items[value] = {held, item}

    def remove(self, hashes: npt.NDArray[np.uint64], item: Item) -> None:
        """Undo `add`."""
        for value in hashes.tolist():
            held = self._items.get(value)
            if isinstance(held, set):
                held.discard(item)
                if not held:
                    del self._items[value]
            elif held is item:
                del self._items[value]

    def at(self, value: int) -> Collection[Item]:
        """The items that pass through a hash."""
        held = self._items.get(value)
        if held is None:
            return ()
        return tuple(held) if isinstance(held, set) else (held,)
