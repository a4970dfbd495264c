"""Block allocation against a model: a dict of reference counts and a set of free numbers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from mmkv.blocks import BlockAllocator, leading_extents, merge_extents, zero_runs
from mmkv.geometry import Extent

LENGTH = 8


def numbers(extents: tuple[Extent, ...]) -> list[int]:
    return [number for first, count in extents for number in range(first, first + count)]


class AllocatorMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(defer=st.booleans())
    def start(self, defer: bool) -> None:
        self.allocator = BlockAllocator(LENGTH, defer=defer)
        self.defer = defer
        self.references: Counter[int] = Counter()
        self.free: set[int] = set()
        self.unsettled: set[int] = set()

    @rule()
    def add_segment(self) -> None:
        segment = self.allocator.next_segment()
        assert segment == min(set(range(50)) - self.allocator.segments)
        self.allocator.add_segment(segment)
        self.free |= set(range(segment * LENGTH, (segment + 1) * LENGTH))

    @rule()
    def remove_drained_segments(self) -> None:
        drained = self.allocator.drained_segments()
        whole = [s for s in self.allocator.segments if set(range(s * LENGTH, (s + 1) * LENGTH)) <= self.free]
        assert drained == sorted(whole, reverse=True)
        for segment in drained[:1]:
            self.allocator.remove_segment(segment)
            self.free -= set(range(segment * LENGTH, (segment + 1) * LENGTH))

    @rule(target=held, count=st.integers(0, 20), behind=held, tail_apart=st.booleans())
    def allocate(self, count: int, behind: tuple[Extent, ...], tail_apart: bool) -> tuple[Extent, ...]:
        extents = self.allocator.allocate(count, behind, tail_apart=tail_apart)
        if count > len(self.free):
            assert extents is None
            return ()
        assert extents is not None
        taken = numbers(extents)
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= self.free
        last = behind[-1].first + behind[-1].blocks - 1 if behind else None
        if last is not None and self.references[last] and count > tail_apart and last + 1 in self.free:
            assert taken[0] == last + 1, "what grows continues where it ended"
        self.free -= set(taken)
        self.references.update(taken)
        return extents

    @rule(target=held, extents=held)
    def hold(self, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        live = tuple(e for e in extents if all(self.references[n] for n in range(e.first, e.first + e.blocks)))
        self.allocator.hold(live)
        self.references.update(numbers(live))
        return live

    @rule(extents=consumes(held))
    def release(self, extents: tuple[Extent, ...]) -> None:
        freed = self.allocator.release(extents)
        self.references.subtract(numbers(extents))
        gone = {number for number in numbers(extents) if not self.references[number]}
        assert freed == len(gone)
        if self.defer:
            self.unsettled |= gone
        else:
            self.free |= gone

    @rule()
    def settle(self) -> None:
        self.allocator.settle()
        self.free |= self.unsettled
        self.unsettled = set()

    @invariant()
    def the_counts_are_those_of_the_model(self) -> None:
        counts = self.allocator.counts
        assert all(counts[number] == self.references[number] for number in range(len(counts)))
        assert self.allocator.free == len(self.free)
        assert self.allocator.unsettled == len(self.unsettled)
        assert self.allocator.used == sum(1 for value in self.references.values() if value)
        assert self.allocator.total == self.allocator.free + self.allocator.used + self.allocator.unsettled

    @invariant()
    def free_runs_are_as_long_as_can_be(self) -> None:
        marks = np.array([number not in self.free for number in range(60 * LENGTH)], dtype=np.int32)
        runs = zero_runs(marks, 0)
        assert self.allocator.free_runs == len(runs)
        assert self.allocator.largest_free_run == max((run.blocks for run in runs), default=0)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def filled(length: int = LENGTH) -> BlockAllocator:
    allocator = BlockAllocator(length)
    allocator.add_segment(0)
    return allocator


def test_loading_holds_blocks_that_were_free() -> None:
    allocator = filled()
    allocator.hold([Extent(2, 3)])
    allocator.hold([Extent(0, 4)])
    assert allocator.counts.tolist() == [1, 1, 2, 2, 1, 0, 0, 0]
    assert allocator.free == 3


@pytest.mark.parametrize("extent", [Extent(6, 3), Extent(100, 1)])
def test_holding_what_is_not_allocated_is_refused(extent: Extent) -> None:
    with pytest.raises(ValueError, match="outside"):
        filled().hold([extent])


def test_holding_in_a_gap_between_segments_is_refused() -> None:
    allocator = filled()
    allocator.add_segment(2)
    with pytest.raises(ValueError, match="outside the segments"):
        allocator.hold([Extent(LENGTH, 1)])


def test_releasing_what_nobody_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="not all held"):
        filled().release([Extent(0, 1)])


def test_a_segment_in_use_cannot_be_removed() -> None:
    allocator = filled()
    allocator.allocate(1)
    with pytest.raises(ValueError, match="segment 0 is in use"):
        allocator.remove_segment(0)


def grown(allocator: BlockAllocator, extents: tuple[Extent, ...], count: int) -> tuple[Extent, ...]:
    more = allocator.allocate(count, extents)
    assert more is not None
    return merge_extents((*extents, *more))


def test_a_new_conversation_leaves_its_neighbour_room_to_grow() -> None:
    allocator = filled(32)
    first, second = grown(allocator, (), 3), grown(allocator, (), 3)
    for _ in range(5):
        first, second = grown(allocator, first, 2), grown(allocator, second, 2)
    assert len(first) == len(second) == 1


def test_one_that_fits_nowhere_as_a_whole_takes_the_largest_runs() -> None:
    allocator = filled(12)
    allocator.allocate(12)
    allocator.release([Extent(0, 3), Extent(5, 2), Extent(9, 1)])
    assert allocator.allocate(5) == (Extent(0, 3), Extent(5, 2))


def test_a_tail_that_is_soon_replaced_leaves_the_place_behind_the_others_free() -> None:
    allocator = filled(32)
    body, tail = grown(allocator, (), 4), None
    for _ in range(5):
        new = allocator.allocate(3, body, tail_apart=True)
        assert new is not None
        if tail is not None:
            allocator.release([tail])
        *more, tail = new
        body = merge_extents((*body, *more))
    assert len(body) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=8), st.integers(0, 30))
def test_leading_and_merged_extents_are_the_same_blocks(pairs: list[tuple[int, int]], blocks: int) -> None:
    extents = tuple(Extent(*pair) for pair in pairs)
    assert numbers(leading_extents(extents, blocks)) == numbers(extents)[:blocks]
    merged = merge_extents(extents)
    assert numbers(merged) == numbers(extents)
    assert all(a.first + a.blocks != b.first for a, b in itertools.pairwise(merged))
