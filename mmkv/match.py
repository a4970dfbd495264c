"""Matches: the longest parked prefix of a prompt, and the lease that keeps it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv.ledger import Conversation, Ledger, Version
from mmkv.prefix import chain_hashes
from mmkv.quarantine import Quarantine
from mmkv.space import Space

__all__ = ["Match", "longest_prefix"]


class Match:
    """A leased version that starts with the ids that were asked for. Close it, or use it in a `with` block.

    Attributes
    ----------
    conversation : str or None
        Whose version it is; `None` where nothing matches.
    tokens : int
        How many leading ids it has in common, rounded down to a checkpoint where the layout has states; may be 0.
    tier : str or None
        Where the bytes are: `hot`, or `path` where some of them are in the pool's own files only.
    """

    def __init__(
        self,
        conversation: str | None = None,
        namespace: str = "",
        version: Version | None = None,
        tokens: int = 0,
        release: Callable[[Version], None] | None = None,
        orphan: Callable[[Version], None] | None = None,
        pool: object = None,
        tier: str = "path",
    ) -> None:
        self.conversation = conversation
        self.tokens = tokens
        self.tier = None if version is None else tier
        self._namespace = namespace
        self._version = version
        self._release = release
        self._orphan = orphan
        self._pool = pool
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Match(conversation={self.conversation!r}, tokens={self.tokens}{state})"

    def leased(self, pool: object) -> tuple[str, Version | None]:
        """The namespace and the version, for the pool that made the match.

        Raises
        ------
        ValueError
            The lease is over, or the match is another pool's.
        """
        if self._closed:
            raise ValueError(f"{self!r}: its lease is over; use it inside its with block, or match again")
        if self._version is not None and self._pool is not pool:
            raise ValueError(f"{self!r} was made by another pool: match in the one that it is taken from")
        return self._namespace, self._version

    def close(self) -> None:
        """End the lease. A second call does nothing; a take under way has a lease of its own."""
        if not self._closed:
            self._closed = True
            if self._version is not None and self._release is not None:
                self._release(self._version)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not getattr(self, "_closed", True) and self._version is not None:
            # The collector may run in the middle of anything: the pool ends the lease when it next comes round.
            if self._orphan is not None:
                self._orphan(self._version)
            _warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)


def longest_prefix(
    ledger: Ledger,
    space: Space,
    ids: npt.NDArray[np.int64],
    namespace: str,
    *,
    usable: Callable[[Version, int], int] | None = None,
    hashes: npt.NDArray[np.uint64] | None = None,
    other_than: str | None = None,
    least: int = 0,
) -> tuple[Conversation | None, int]:
    """The conversation that has the most leading ids in common with `ids`, and how many.

    Chain hashes name candidates, deepest first; the ids decide. Costs one hash of the ids and a read of those in
    common, once for all candidates that share their blocks.

    Parameters
    ----------
    usable : callable, optional
        How many of the tokens that a version has in common count.
    hashes : ndarray of uint64, optional
        The chain hashes of `ids`, if they are known.
    other_than : str, optional
        A conversation that does not count.
    least : int
        Only more tokens than these count.
    """
    block_tokens = space.geometry.block_tokens
    if hashes is None:
        hashes = chain_hashes(ids, namespace, block_tokens)
    comparer = _Comparer(space, ledger.quarantine, ids)
    best: Conversation | None = None
    most = least
    seen: set[Conversation] = set()
    for depth in range(len(hashes), -1, -1):
        if most >= min((depth + 1) * block_tokens, len(ids)):
            break
        candidates: Collection[Conversation] = (
            ledger.index.at(int(hashes[depth - 1])) if depth else ledger.namespaces.get(namespace, ())
        )
        for candidate in candidates:
            if candidate in seen or candidate.namespace != namespace or candidate.name == other_than:
                continue
            seen.add(candidate)
            if candidate.version.tokens <= most:
                continue
            common = comparer.common_prefix(candidate.version)
            if usable is not None:
                common = usable(candidate.version, common)
            if common > most or (common == most and best is not None and candidate.used > best.used):
                best, most = candidate, common
    return (None, 0) if best is None else (best, most)


class _Comparer:
    """Compares versions' ids with a prompt's, block by block, each block once."""

    def __init__(self, space: Space, quarantine: Quarantine, ids: npt.NDArray[np.int64]) -> None:
        self._space = space
        self._quarantine = quarantine
        self._ids = ids
        self._first = int(ids[0]) if len(ids) else None
        # Blocks that are known to hold the prompt's ids at the place where they stand in a version.
        self._equal: dict[int, int] = {}

    def common_prefix(self, version: Version) -> int:
        block_tokens = self._space.geometry.block_tokens
        known = 0
        for first, count in version.extents:
            # A shared block stands at the same place in every version that holds it.
            equal = 0
            while equal < count and self._equal.get(first + equal) == known // block_tokens + equal:
                equal += 1
            known += equal * block_tokens
            if equal < count:
                break
        if known == 0 and self._space.first_id(version.extents) != self._first:
            return 0
        block_tokens = self._space.geometry.block_tokens
        sound = self._quarantine.sound_tokens(version.extents, version.tokens, block_tokens)
        known = min(known, sound, len(self._ids))
        common = self._space.common_prefix(version.extents, sound, self._ids, known)
        self._note(version, common // block_tokens)
        return common

    def _note(self, version: Version, blocks: int) -> None:
        position = 0
        for first, count in version.extents:
            for block in range(first, first + min(count, blocks - position)):
                self._equal[block] = position
                position += 1
            if position >= blocks:
                break
