"""What a park has to move: which blocks the new version keeps, and from which token on rows are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv.blocks import leading_extents, merge_extents
from mmkv.geometry import Extent, extent_blocks
from mmkv.rows import Checkpoint

__all__ = ["Delta", "keep_checkpoints", "own_delta", "with_shared"]


@dataclass(frozen=True, slots=True)
class Delta:
    """The difference between what the pool has and a new version.

    Attributes
    ----------
    kept : tuple of Extent
        The leading blocks that the version has already.
    start : int
        The first token whose rows are written.
    """

    kept: tuple[Extent, ...]
    start: int

    def new_blocks(self, blocks: int) -> int:
        """How many blocks a version of `blocks` blocks needs anew."""
        return blocks - extent_blocks(self.kept)


def own_delta(
    extents: Sequence[Extent], former_tokens: int, common: int, tokens: int, block_tokens: int, *, append: bool
) -> Delta:
    """The difference to a conversation's former version.

    Parameters
    ----------
    extents : sequence of Extent
        Where the former version lies.
    former_tokens, common, tokens : int
        Tokens of the former version, of the prefix that it shares with the new one, and of the new one.
    append : bool
        Whether rows may be appended to the former version's last block in place.
    """
    if common == tokens:
        # The new version is a prefix of the former one, or equals it.
        return Delta(leading_extents(extents, -(-tokens // block_tokens)), tokens)
    if common == former_tokens and append:
        return Delta(tuple(extents), common)
    whole = common // block_tokens
    return Delta(leading_extents(extents, whole), whole * block_tokens)


def with_shared(own: Delta, extents: Sequence[Extent], common: int, block_tokens: int) -> Delta:
    """`own`, continued with the whole blocks of another conversation's common prefix where that reaches further.

    What a conversation has of its own stays; of the other only blocks behind that are shared.
    """
    shared = common // block_tokens
    if shared * block_tokens <= own.start:
        return own
    mine = leading_extents(own.kept, own.start // block_tokens)
    theirs = _without_leading(leading_extents(extents, shared), extent_blocks(mine))
    return Delta(merge_extents((*mine, *theirs)), shared * block_tokens)


def _without_leading(extents: Sequence[Extent], blocks: int) -> tuple[Extent, ...]:
    rest = []
    for first, count in extents:
        skipped = min(count, blocks)
        blocks -= skipped
        if count > skipped:
            rest.append(Extent(first + skipped, count - skipped))
    return tuple(rest)


def keep_checkpoints(former: Sequence[Checkpoint], common: int, new: Checkpoint, older: int) -> tuple[Checkpoint, ...]:
    """The checkpoints of a new version, in the order of their tokens.

    The new one, the last one at a prompt boundary, and the `older` last others; of the former version only those
    inside the common prefix still hold.
    """
    points = sorted(
        [point for point in former if point.tokens <= common and point.tokens != new.tokens] + [new],
        key=lambda point: point.tokens,
    )
    boundary = next((point for point in reversed(points) if point.boundary), None)
    others = [point for point in points if point is not new and point is not boundary]
    kept = {new, *others[len(others) - min(older, len(others)) :]} | ({boundary} if boundary else set())
    return tuple(point for point in points if point in kept)
