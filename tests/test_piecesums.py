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
