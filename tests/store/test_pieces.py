"""How a transfer is cut into pieces, and the system calls that move a piece whose parts lie scattered."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.buffer import buffer_of
from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.store import Copy, LayerCopies, PoolFile, vectors
from mmkv.store.pieces import Piece, read_batches, write_batches
from mmkv.store.vectors import read_scattered, write_gathered

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PoolFile]:
    file = PoolFile(tmp_path / "0000.kv", SIZE, create=True)
    file.allocate(0)
    yield file
    file.close()


def copy_of(file: PoolFile, array: np.ndarray[Any, Any], runs: list[tuple[int, int, int]]) -> Copy:
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    return Copy("k", file, buffer_of(array), *(np.ascontiguousarray(column) for column in columns))


def cuts(copy: Copy, piece_bytes: int) -> list[tuple[int, int, list[int]]]:
    """File offset, size and buffer offsets of each piece."""
    found = []
    for batch in read_batches([LayerCopies(0, (copy,))], piece_bytes):
        for piece in batch:
            scatter = piece.scatter
            offsets = [piece.buffer_offset] if scatter is None else scatter.buffer_offsets.tolist()
            assert scatter is None or sum(scatter.sizes.tolist()) == piece.size
            found.append((piece.file_offset, piece.size, offsets))
    return found


def test_runs_that_are_neighbours_in_the_file_make_one_piece(file: PoolFile) -> None:
    copy = copy_of(file, np.zeros(SIZE, np.uint8), [(200, 0, 100), (100, 500, 100), (600, 900, 50), (300, 700, 10)])
    assert cuts(copy, 4096) == [(100, 210, [500, 0, 700]), (600, 50, [900])]


def test_runs_that_are_neighbours_in_both_are_not_scattered(file: PoolFile) -> None:
    copy = copy_of(file, np.zeros(SIZE, np.uint8), [(100, 100, 100), (0, 0, 100), (200, 200, 100)])
    assert cuts(copy, 4096) == [(0, 300, [0])]


def test_long_runs_stay_apart(file: PoolFile) -> None:
    copy = copy_of(file, np.zeros(SIZE, np.uint8), [(0, 5000, 2000), (2000, 0, 3000), (5000, 9000, 10_000)])
    assert cuts(copy, 4096) == [(0, 2000, [5000]), (2000, 3000, [0]), (5000, 4096, [9000]), (9096, 4096, [13_096]),
                                (13_192, 1808, [17_192])]  # fmt: skip


def test_pieces_are_not_larger_than_asked_for(file: PoolFile) -> None:
    rng = np.random.default_rng(0)
    runs = [(300 * number, 300 * place, 300) for number, place in enumerate(rng.permutation(3000).tolist())]
    copy = copy_of(file, np.zeros(SIZE, np.uint8), [runs[i] for i in rng.permutation(3000)])
    found = cuts(copy, 4096)
    assert [offset for offset, _, _ in found] == list(range(0, 900_000, 13 * 300))
    assert all(size <= 4096 for _, size, _ in found)


def test_no_piece_has_more_parts_than_a_system_call_takes(file: PoolFile) -> None:
    runs = [(2 * number, 2 * (2999 - number), 2) for number in range(3000)]
    copy = copy_of(file, np.zeros(SIZE, np.uint8), runs)
    assert [len(offsets) for _, _, offsets in cuts(copy, 1 << 20)] == [1024, 1024, 952]


def test_a_copy_without_runs_has_no_piece(file: PoolFile) -> None:
    copy = copy_of(file, np.zeros(10, np.uint8), [])
    assert list(write_batches([LayerCopies(0, (copy,))], 100)) == []


def scattered(file: PoolFile, array: np.ndarray[Any, Any]) -> Piece:
    places = np.random.default_rng(1).permutation(200).tolist()
    copy = copy_of(file, array, [(1000 + 50 * number, 64 * place, 50) for number, place in enumerate(places)])
    ((piece,),) = read_batches([LayerCopies(0, (copy,))], 1 << 20)
    assert piece.scatter is not None
    return piece


@pytest.mark.parametrize("most", [1, 49, 50, 51, 777, 10_000])
def test_a_call_that_moves_a_part_is_taken_up_again(file: PoolFile, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    rng = np.random.default_rng(2)
    array = rng.integers(0, 256, 64 * 200, dtype=np.uint8)
    piece = scattered(file, array)
    assert piece.scatter is not None
    interrupted = iter([True, False] * 20_000)

    class Short:
        """A C library that moves few bytes a call, and is interrupted now and then."""

        def __init__(self, name: str) -> None:
            self._call = getattr(libc, name)

        def __call__(self, fd: int, places: int, count: int, offset: int) -> int:
            if next(interrupted):
                ctypes.set_errno(errno.EINTR)
                return -1
            vector = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(places)).reshape(-1, 2).copy()
            ends = np.cumsum(vector[:, 1])
            keep = int(np.searchsorted(ends, most))
            vector = vector[: keep + 1]
            vector[-1, 1] -= max(0, int(vector[:, 1].sum()) - most)
            return int(self._call(fd, vector.ctypes.data, len(vector), offset))

    libc = vectors._libc
    monkeypatch.setattr(vectors, "_libc", type("Libc", (), {"preadv": Short("preadv"), "pwritev": Short("pwritev")}))
    write_gathered(piece, piece.scatter)
    buffer = np.zeros(SIZE, np.uint8)
    file.read(memoryview(buffer), 0)
    before = array.copy()
    expected = np.concatenate([before[offset : offset + 50] for offset in piece.scatter.buffer_offsets])
    assert (buffer[1000 : 1000 + 50 * 200] == expected).all()
    array[:] = 0
    read_scattered(piece, piece.scatter)
    for offset in piece.scatter.buffer_offsets:
        assert (array[offset : offset + 50] == before[offset : offset + 50]).all()
        assert not array[offset + 50 : offset + 64].any()


def test_a_file_that_ends_is_truncated(file: PoolFile) -> None:
    piece = scattered(file, np.zeros(64 * 200, np.uint8))
    assert piece.scatter is not None
    file.path.write_bytes(bytes(5000))
    with pytest.raises(PoolCorrupt, match="truncated"):
        read_scattered(piece, piece.scatter)


@pytest.mark.parametrize(
    ("code", "error", "text"), [(errno.ENOSPC, PoolFull, "no room"), (errno.EIO, MmkvError, "Input/output error")]
)
def test_errors_of_the_system_are_told(
    file: PoolFile, monkeypatch: pytest.MonkeyPatch, code: int, error: type[MmkvError], text: str
) -> None:
    def fail(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(vectors, "_libc", type("Libc", (), {"preadv": fail, "pwritev": fail}))
    piece = scattered(file, np.zeros(64 * 200, np.uint8))
    assert piece.scatter is not None
    with pytest.raises(error, match=text):
        write_gathered(piece, piece.scatter)
    with pytest.raises(MmkvError, match="cannot read"):
        read_scattered(piece, piece.scatter)


def test_a_closed_file_is_an_error(file: PoolFile) -> None:
    piece = scattered(file, np.zeros(64 * 200, np.uint8))
    assert piece.scatter is not None
    file.close()
    with pytest.raises(MmkvError, match="Bad file descriptor"):
        read_scattered(piece, piece.scatter)


def test_the_lanes_work_at_one_layer_until_it_is_there(file: PoolFile) -> None:
    # Three planes, each in runs that a segment's end cuts short.
    array = np.zeros(SIZE, np.uint8)
    runs = [(96 << 10, 0), (48 << 10, 200 << 10), (8 << 10, 300 << 10)]
    copies = tuple(copy_of(file, array, [(at, at, size), (at + (100 << 10), at, size)]) for size, at in runs)
    batches = list(read_batches([LayerCopies(0, copies), LayerCopies(1, copies)], 1 << 20))
    assert [{piece.layer for piece in batch} for batch in batches] == [{0}, {0}, {1}, {1}]
    assert all(sum(piece.size for piece in batch) <= 256 << 10 for batch in batches)


def test_the_first_layer_has_smaller_pieces_on_a_disk(file: PoolFile) -> None:
    copy = copy_of(file, np.zeros(SIZE, np.uint8), [(0, 0, 400 << 10)])
    layers = [LayerCopies(layer, (copy,)) for layer in range(2)]
    sizes = [
        [piece.size >> 10 for piece in batch] for batch in read_batches(layers, 1 << 20, first_layer_bytes=1 << 18)
    ]
    assert sizes == [[256], [144], [400]]
