"""Deltas: what a park keeps of the former version, and from which token on it writes."""

from __future__ import annotations

import pytest

from mmkv.delta import Delta, keep_checkpoints, own_delta, with_shared
from mmkv.geometry import Extent
from mmkv.rows import Checkpoint

BLOCK = 10
# 25 tokens in blocks 4, 5 and 9.
FORMER = (Extent(4, 2), Extent(9, 1))


@pytest.mark.parametrize(
    ("common", "tokens", "append", "kept", "start"),
    [
        (25, 40, True, FORMER, 25),
        (25, 40, False, (Extent(4, 2),), 20),
        (25, 25, False, FORMER, 25),
        (12, 12, False, (Extent(4, 2),), 12),
        (10, 10, False, (Extent(4, 1),), 10),
        (12, 30, True, (Extent(4, 1),), 10),
        (20, 30, True, (Extent(4, 2),), 20),
        (9, 30, True, (), 0),
        (0, 30, True, (), 0),
    ],
    ids=[
        "grown in RAM", "grown on a disk", "the same", "cut within a block", "cut at a block", "edited in a block",
        "edited at a block", "edited in the first block", "another",
    ],
)  # fmt: skip
def test_the_difference_to_the_former_version(
    common: int, tokens: int, append: bool, kept: tuple[Extent, ...], start: int
) -> None:
    assert own_delta(FORMER, 25, common, tokens, BLOCK, append=append) == Delta(kept, start)


def test_what_is_not_kept_is_needed_anew() -> None:
    assert Delta(FORMER, 25).new_blocks(5) == 2


THEIRS = (Extent(30, 1), Extent(40, 5))


@pytest.mark.parametrize(
    ("own", "common", "expected"),
    [
        (Delta((), 0), 9, Delta((), 0)),
        (Delta((), 0), 30, Delta((Extent(30, 1), Extent(40, 2)), 30)),
        (Delta((), 0), 35, Delta((Extent(30, 1), Extent(40, 2)), 30)),
        (Delta((Extent(4, 2),), 20), 29, Delta((Extent(4, 2),), 20)),
        (Delta((Extent(4, 2),), 20), 40, Delta((Extent(4, 2), Extent(41, 2)), 40)),
        (Delta(FORMER, 25), 29, Delta(FORMER, 25)),
        (Delta(FORMER, 25), 30, Delta((Extent(4, 2), Extent(41, 1)), 30)),
    ],
)
def test_whole_blocks_of_another_conversation_continue_what_is_kept(own: Delta, common: int, expected: Delta) -> None:
    assert with_shared(own, THEIRS, common, BLOCK) == expected


def test_a_shared_neighbour_is_joined() -> None:
    assert with_shared(Delta((Extent(4, 1),), 10), (Extent(4, 3),), 30, BLOCK) == Delta((Extent(4, 3),), 30)


def points(*tokens: int, boundary: int | None = None) -> list[Checkpoint]:
    return [Checkpoint(count, 100 + count, count == boundary) for count in tokens]


def kept_counts(former: list[Checkpoint], common: int, new: Checkpoint, older: int) -> list[int]:
    return [point.tokens for point in keep_checkpoints(former, common, new, older)]


@pytest.mark.parametrize(
    ("older", "expected"), [(0, [50]), (1, [40, 50]), (2, [30, 40, 50]), (9, [10, 20, 30, 40, 50])]
)
def test_the_newest_checkpoint_and_some_older_ones_stay(older: int, expected: list[int]) -> None:
    assert kept_counts(points(10, 20, 30, 40), 45, Checkpoint(50, 0, False), older) == expected


def test_the_last_boundary_stays_beside_the_older_ones() -> None:
    assert kept_counts(points(10, 20, 30, 40, boundary=10), 45, Checkpoint(50, 0, False), 1) == [10, 40, 50]


def test_a_new_boundary_takes_the_place_of_the_former() -> None:
    assert kept_counts(points(10, 20, boundary=10), 45, Checkpoint(50, 0, True), 0) == [50]


def test_a_boundary_behind_the_common_prefix_is_void_and_an_earlier_one_counts() -> None:
    former = [Checkpoint(10, 1, True), Checkpoint(20, 2, False), Checkpoint(30, 3, True)]
    assert kept_counts(former, 25, Checkpoint(50, 0, False), 0) == [10, 50]


def test_a_checkpoint_at_the_same_count_is_replaced() -> None:
    new = Checkpoint(20, 7, False)
    assert keep_checkpoints(points(10, 20), 20, new, 2) == (Checkpoint(10, 110, False), new)
