"""What conversations hold and own alone, against sets of blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mmkv.geometry import Extent
from mmkv.info import _Holders, union_extents

_EXTENTS = st.lists(st.builds(Extent, st.integers(0, 30), st.integers(1, 4)), max_size=8)


def _blocks(extents: list[Extent]) -> set[int]:
    return {number for first, count in extents for number in range(first, first + count)}


@given(_EXTENTS)
def test_union(extents: list[Extent]) -> None:
    union = union_extents(extents)
    assert _blocks(union) == _blocks(extents)
    assert all(one.first + one.blocks < other.first for one, other in pairwise(union))


@given(st.lists(_EXTENTS, max_size=5))
def test_alone_is_what_nobody_else_holds(conversations: list[list[Extent]]) -> None:
    holders = _Holders(extent for extents in conversations for extent in union_extents(extents))
    for at, extents in enumerate(conversations):
        others = set().union(*(_blocks(other) for index, other in enumerate(conversations) if index != at))
        assert holders.alone(union_extents(extents)) == len(_blocks(extents) - others)
        assert holders.alone(extents) == sum(len(_blocks([extent]) - others) for extent in extents)


def test_large_numbers_cost_no_memory() -> None:
    far = Extent(1 << 60, 1 << 60)
    assert _Holders([far, Extent(0, 1)]).alone([far]) == 1 << 60
