from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmkv
from mmkv.castagnoli import shift, shift_one
from mmkv.checksum import crc32c
from mmkv.piecesums import PieceSums
from tests.computed import UNIFORM, ids_of, make_slot, park

ROWS, TOKENS = np.array([3, 8, 16]), np.array([5, 8, 2])
ROW_BYTES = np.array([7, 12])
COLUMNS = slice(0, 2)
rng = np.random.default_rng(3)


@given(value=st.integers(0, 2**32 - 1), size=st.integers(0, 2**24))
def test_one_value_is_shifted_as_many_are(value: int, size: int) -> None:
    assert shift_one(value, size) == int(shift(value, size))


class Filled:
    """Two arrays of rows with the sums of their pieces."""

    def __init__(self) -> None:
        self.arrays = [rng.integers(0, 256, (20, size), dtype=np.uint8) for size in ROW_BYTES.tolist()]
        self.sums = PieceSums([array.ctypes.data for array in self.arrays], ROW_BYTES, ROWS, TOKENS)

    def add(self, column: int, start: int, end: int) -> None:
        self.sums.add(self.arrays[column].ctypes.data + start, end - start)

    def expected(self) -> npt.NDArray[np.uint32]:
        return np.array(
            [
                [crc32c(array[row : row + count].tobytes()) for array in self.arrays]
                for row, count in zip(ROWS.tolist(), TOKENS.tolist(), strict=True)
            ],
            dtype=np.uint32,
        )


@given(data=st.data())
def test_pieces_of_any_size_in_any_order_add_up(data: st.DataObject) -> None:
    filled = Filled()
    pieces = []
    for column, array in enumerate(filled.arrays):
        cuts = data.draw(st.sets(st.integers(1, array.nbytes - 1), max_size=8))
        pieces += [(column, *piece) for piece in itertools.pairwise([0, *sorted(cuts), array.nbytes])]
    for piece in data.draw(st.permutations(pieces)):
        filled.add(*piece)
    values, whole = filled.sums.values(COLUMNS)
    assert whole.all()
    assert (values == filled.expected()).all()


def test_what_was_left_out_or_copied_twice_does_not_count_as_whole() -> None:
    filled = Filled()
    for column, array in enumerate(filled.arrays):
        filled.add(column, 0, array.nbytes)
    filled.add(1, 12 * 9, 12 * 10)
    _, whole = filled.sums.values(COLUMNS)
    assert whole.tolist() == [[True, True], [True, False], [True, True]]
    filled = Filled()
    filled.add(0, 0, 7 * 15)
    _, whole = filled.sums.values(COLUMNS)
    assert whole.tolist() == [[True, False], [False, False], [False, False]]


def test_memory_beside_the_arrays_does_not_count() -> None:
    filled = Filled()
    filled.sums.add(min(array.ctypes.data for array in filled.arrays) - 1, 1)
    assert not filled.sums.values(COLUMNS)[1].any()


class Known(Filled):
    """Two arrays of rows, units in a row over all of them, and sums that know what the units should have."""

    ROWS, TOKENS = np.array([0, 6, 11, 12]), np.array([6, 5, 1, 8])

    def __init__(self) -> None:
        super().__init__()
        self.known = self.computed()
        self.sums = PieceSums(
            [array.ctypes.data for array in self.arrays], ROW_BYTES, self.ROWS, self.TOKENS, self.known
        )

    def computed(self) -> npt.NDArray[np.uint32]:
        spans = zip(self.ROWS.tolist(), self.TOKENS.tolist(), strict=True)
        return np.array(
            [[crc32c(array[row : row + count].tobytes()) for array in self.arrays] for row, count in spans],
            dtype=np.uint32,
        )


@given(data=st.data())
def test_what_should_come_is_compared_by_the_piece_and_what_did_not_is_found_by_the_unit(data: st.DataObject) -> None:
    filled = Known()
    for column, array in enumerate(filled.arrays):
        for byte, bit in data.draw(st.sets(st.tuples(st.integers(0, array.nbytes - 1), st.integers(0, 7)), max_size=3)):
            array.reshape(-1)[byte] ^= 1 << bit
        cuts = data.draw(st.sets(st.integers(1, array.nbytes - 1), max_size=4))
        for start, end in data.draw(st.permutations([*itertools.pairwise([0, *sorted(cuts), array.nbytes])])):
            filled.add(column, start, end)
    values, whole = filled.sums.values(COLUMNS)
    assert whole.all()
    assert (values == filled.computed()).all()


def test_what_is_known_costs_one_checksum_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = Known()
    summed = []
    monkeypatch.setattr("mmkv.piecesums.crc32c", lambda data: summed.append(len(data)) or crc32c(data))
    filled.add(0, 0, 7 * 20)
    filled.add(1, 12 * 3, 12 * 20)
    # Of the second piece, the first unit is not whole.
    assert summed == [7 * 20, 12 * 14, 12 * 3]
    values, whole = filled.sums.values(COLUMNS)
    assert whole.tolist() == [[True, False], [True, True], [True, True], [True, True]]
    assert (values == filled.known)[whole].all()


def test_pieces_that_come_twice_do_not_count_as_whole_where_they_are_known() -> None:
    filled = Known()
    filled.add(0, 0, 7 * 20)
    filled.add(0, 7 * 6, 7 * 12)
    _, whole = filled.sums.values(slice(0, 1))
    assert whole[:, 0].tolist() == [True, False, False, True]


def test_units_with_bytes_of_no_unit_between_them_are_summed_one_by_one() -> None:
    filled = Filled()
    known = filled.expected()
    filled.sums = PieceSums([array.ctypes.data for array in filled.arrays], ROW_BYTES, ROWS, TOKENS, known)
    for column, array in enumerate(filled.arrays):
        array[:3] ^= 1
        filled.add(column, 0, array.nbytes)
    values, whole = filled.sums.values(COLUMNS)
    assert whole.tolist() == [[True, True]] * 3
    assert (values == known).all()


def test_takes_and_parks_of_host_slots_are_summed_in_pieces(pool_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wholes: list[bool] = []
    original = PieceSums.values

    def values(self: PieceSums, columns: slice) -> Any:
        found = original(self, columns)
        wholes.append(bool(found[1].all()))
        return found

    monkeypatch.setattr(PieceSums, "values", values)
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB", verify="always") as pool:
        ids = ids_of((1, 1000))
        park(pool, "a", ids)
        pool.take("a", make_slot(UNIFORM, 1000)).result(30)
    assert wholes == [True] * (2 * len(UNIFORM.layers))
