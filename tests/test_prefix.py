"""Prefixes: ids as 64-bit integers, their chain of hashes, and the index that names candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkv.prefix import PrefixIndex, as_token_ids, chain_hashes

BLOCK = 4


@pytest.mark.parametrize(
    ("given_ids", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        (range(3), [0, 1, 2]),
        ([], []),
        (np.array([7, 8], dtype=np.uint8), [7, 8]),
        (np.array([2**64 - 1], dtype=np.uint64), [-1]),
        ([2**64 - 1, 0], [-1, 0]),
        ([2**63, np.int64(5)], [-(2**63), 5]),
        (np.arange(6)[::2], [0, 2, 4]),
        (np.array([1, 2], dtype=">i4"), [1, 2]),
    ],
)
def test_ids_become_int64(given_ids: Any, expected: list[int]) -> None:
    ids = as_token_ids(given_ids)
    assert ids.dtype == np.int64
    assert ids.flags.c_contiguous
    assert ids.tolist() == expected


@pytest.mark.parametrize("value", [[1.0], [1.5], "12", b"12", [None], [[1], [2, 3]], [True], [2**64, 0.5], ["a"]])
def test_what_is_no_integer_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="integers"):
        as_token_ids(value)


@pytest.mark.parametrize("value", [5, object(), [[1, 2]], [2**64], [-(2**63) - 1], [-1, 2**63]])
def test_ids_of_a_wrong_shape_or_size_are_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        as_token_ids(value)


small_ids = st.lists(st.integers(0, 2), max_size=20)


@given(small_ids, small_ids)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(one: list[int], other: list[int]) -> None:
    a, b = (chain_hashes(as_token_ids(ids), "n", BLOCK) for ids in (one, other))
    assert len(a) == len(one) // BLOCK
    for block in range(min(len(a), len(b))):
        end = (block + 1) * BLOCK
        assert (a[block] == b[block]) == (one[:end] == other[:end])


@given(small_ids.filter(lambda ids: len(ids) >= BLOCK))
def test_namespaces_have_chains_of_their_own(ids: list[int]) -> None:
    chains = [set(chain_hashes(as_token_ids(ids), name, BLOCK).tolist()) for name in ("", "a", "\ud800")]
    assert not chains[0] & chains[1] | chains[1] & chains[2]


@given(small_ids, st.integers(0, 5))
def test_known_hashes_are_taken_over(ids: list[int], known: int) -> None:
    whole = chain_hashes(as_token_ids(ids), "n", BLOCK)
    assert chain_hashes(as_token_ids(ids), "n", BLOCK, whole[:known]).tolist() == whole.tolist()


def test_known_hashes_are_not_computed_anew() -> None:
    hashes = chain_hashes(np.arange(8), "n", BLOCK, np.array([42], dtype=np.uint64))
    assert hashes[0] == 42
    assert hashes[1] != chain_hashes(np.arange(8), "n", BLOCK)[1], "the next one follows from the known one"


class _Item:
    pass


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.frozensets(st.integers(0, 3))), max_size=30))
def test_the_index_is_a_map_of_sets(steps: list[tuple[bool, int, frozenset[int]]]) -> None:
    items = [_Item() for _ in range(4)]
    index: PrefixIndex[_Item] = PrefixIndex()
    model: dict[int, set[_Item]] = {value: set() for value in range(4)}
    for adding, which, values in steps:
        hashes = np.array(sorted(values), dtype=np.uint64)
        if adding:
            index.add(hashes, items[which])
        else:
            index.remove(hashes, items[which])
        for value in values:
            (model[value].add if adding else model[value].discard)(items[which])
        for value, expected in model.items():
            assert set(index.at(value)) == expected
