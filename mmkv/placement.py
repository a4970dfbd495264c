"""Where the tokens of a version lie: which runs of them in which tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.geometry import Extent, TokenRuns
from mmkv.space import Space

__all__ = ["Placement", "place"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The share of one tier in a transfer.

    Attributes
    ----------
    space : Space
        The tier's files.
    runs : TokenRuns
        The runs of tokens that move to or from them.
    record : int or None
        The record of the states that move to or from them.
    """

    space: Space
    runs: TokenRuns
    record: int | None


def place(
    path: Space,
    hot: Space | None,
    extents: Sequence[Extent],
    start: int,
    stop: int,
    record: int | None,
    *,
    hot_blocks: npt.NDArray[np.int64] | None = None,
    hot_record: int = -1,
) -> list[Placement]:
    """Where the tokens `[start, stop)` of a version and its states lie, the hot tier first.

    Parameters
    ----------
    path, hot : Space
        The files of both tiers.
    extents : sequence of Extent
        The version's blocks at the path.
    record : int, optional
        The record of its states at the path; without one, states do not move.
    hot_blocks : ndarray of int64, optional
        The hot number of every block of the version that holds some of the tokens; -1 where it has none.
    hot_record : int
        The record of its states in the hot tier, or -1.
    """
    if hot is None or hot_blocks is None:
        return [Placement(path, path.geometry.token_runs(extents, start, stop), record)]
    block_tokens = path.geometry.block_tokens
    positions = np.arange(start // block_tokens, start // block_tokens + len(hot_blocks))
    warm = hot_blocks >= 0
    placements = [
        Placement(
            hot,
            hot.geometry.block_runs(positions[warm], hot_blocks[warm], start, stop),
            hot_record if record is not None and hot_record >= 0 else None,
        )
    ]
    if not warm.all() or (record is not None and hot_record < 0):
        numbers = block_numbers(extents)[positions[~warm]]
        runs = path.geometry.block_runs(positions[~warm], numbers, start, stop)
        placements.append(Placement(path, runs, record if hot_record < 0 else None))
    return placements
