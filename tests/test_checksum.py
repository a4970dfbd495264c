from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv import checksum
from mmkv.castagnoli import ONE, columns, look_up, multiply, power, shift, tables
from mmkv.checksum import Parts, combine, crc32c, host_checksums, leading_checksums

# RFC 3720, B.4, and the check value of the catalogue of CRCs.
KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}
words = st.integers(0, 2**32 - 1)
DATA = np.random.default_rng(7).integers(0, 256, 1 << 16, dtype=np.uint8)


@pytest.fixture(params=["library", "numpy"])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(checksum, "_library", None)
    elif checksum._library is None:
        pytest.skip("the package crc32c is missing")


def bit_by_bit(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("data", KNOWN, ids=len)
def test_known_values(data: bytes) -> None:
    assert crc32c(data) == KNOWN[data]


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 33, 1000])
def test_the_definition(size: int) -> None:
    for start in range(5):
        data = DATA[start : start + size]
        assert crc32c(data) == bit_by_bit(data.tobytes())


@pytest.mark.usefixtures("_implementation")
def test_goes_on_where_another_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_SLICE", 4096)
    whole = crc32c(DATA)
    assert crc32c(memoryview(DATA)[777:], crc32c(DATA[:777])) == whole
    assert crc32c(b"", whole) == whole


def test_says_that_it_is_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(checksum, "_library", None)
    checksum._say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "mmkv"):
        crc32c(b"1")
        crc32c(b"2")
    assert len(caplog.messages) == 1


@given(words, words, words)
def test_products(left: int, middle: int, right: int) -> None:
    assert multiply(left, right) == multiply(right, left)
    assert multiply(left, multiply(middle, right)) == multiply(multiply(left, middle), right)
    assert multiply(left ^ middle, right) == multiply(left, right) ^ multiply(middle, right)
    assert multiply(left, ONE) == left
    assert look_up(tables(left), np.uint32(right)) == multiply(left, right)


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_powers(first: int, second: int) -> None:
    assert multiply(power(first), power(second)) == power(first + second)


@given(words, words, st.integers(3, 32))
def test_tables_of_any_digits(factor: int, value: int, digits: int) -> None:
    found = tables(factor, digits)
    total = 0
    for digit, entries in enumerate(found):
        start, end = 32 * digit // digits, 32 * (digit + 1) // digits
        total ^= int(entries[value >> start & (1 << end - start) - 1])
    assert total == multiply(factor, value)
    assert columns(factor)[value % 32] == multiply(factor, 1 << value % 32)


@given(st.lists(st.tuples(words, st.integers(0, 2**45)), max_size=5))
def test_shifts(pairs: list[tuple[int, int]]) -> None:
    shifted = shift([value for value, _ in pairs], [size for _, size in pairs])
    assert shifted.tolist() == [multiply(value, power(8 * size)) for value, size in pairs]


@given(st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), min_size=1, max_size=5))
def test_combined(pairs: list[tuple[bytes, bytes]]) -> None:
    firsts, seconds = ([crc32c(pair[side]) for pair in pairs] for side in (0, 1))
    joined = combine(firsts, seconds, [len(second) for _, second in pairs])
    assert joined.tolist() == [crc32c(first + second) for first, second in pairs]


@given(
    columns=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 40), max_size=9),
    seed=st.integers(0, 2**16),
)
def test_leading_units_together(columns: int, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = [[rng.bytes(size) for _ in range(columns)] for size in sizes]
    values = np.array([[crc32c(data) for data in row] for row in units], dtype=np.uint32).reshape(-1, columns)
    leading = leading_checksums(values, np.array(sizes, dtype=np.int64))
    for count in range(len(sizes) + 1):
        together = [crc32c(b"".join(row[column] for row in units[:count])) for column in range(columns)]
        assert leading[count].tolist() == together


def test_combined_with_one_size_for_all() -> None:
    firsts = np.array([crc32c(DATA[at : at + 100]) for at in range(6)], np.uint32).reshape(2, 3)
    second = crc32c(DATA[:4096])
    joined = combine(firsts, second, 4096)
    assert joined.shape == (2, 3)
    assert joined[1, 2] == crc32c(DATA[5:105].tobytes() + DATA[:4096].tobytes())


runs = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=8)


@settings(deadline=None)
@given(runs, st.sampled_from([1, 48, 512, 4096]), st.integers(0, 4095), st.integers(1, 4))
def test_units_of_runs(places: list[tuple[int, int]], unit_bytes: int, begun: int, threads: int) -> None:
    begun %= unit_bytes
    starts = np.array([start for start, _ in places], np.int64)
    parts = Parts.cut(DATA.ctypes.data + starts, [size for _, size in places], unit_bytes, begun=begun)
    rows = b"".join(DATA[start : start + size].tobytes() for start, size in places)
    padded = bytes(begun) + rows
    units = [padded[at : at + unit_bytes] for at in range(0, len(padded), unit_bytes)] if rows else []
    if units:
        units[0] = units[0][begun:]
    assert parts.count == len(units)
    assert parts.unit_sizes.tolist() == [len(unit) for unit in units]
    assert host_checksums(parts, threads=threads).tolist() == [crc32c(unit) for unit in units]


def test_what_lies_behind_a_part() -> None:
    parts = Parts(np.array([5, 6, 7, 8]), np.array([10, 20, 30, 40]), np.array([0, 0, 2, 2]), 4)
    assert parts.behind.tolist() == [20, 0, 40, 0]
    assert parts.unit_sizes.tolist() == [30, 0, 70, 0]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_unit_grows(threads: int) -> None:
    old = host_checksums(Parts.cut([DATA.ctypes.data], [5000], 4096), threads=threads)
    new = Parts.cut([DATA.ctypes.data + 5000], [6000], 4096, begun=5000 % 4096)
    grown = host_checksums(new, [old[1], *[0] * (new.count - 1)], threads=threads)
    whole = host_checksums(Parts.cut([DATA.ctypes.data], [11000], 4096))
    assert [old[0], *grown] == whole.tolist()


def test_finds_what_moved() -> None:
    data = DATA[:4096].copy()
    known = crc32c(data)
    for bit in range(0, 8 * len(data), 101):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != known
        data[bit // 8] ^= 1 << bit % 8
    for size in (1, 4, 48, 512):
        swapped = data.copy()
        swapped[:size], swapped[size : 2 * size] = data[size : 2 * size], data[:size]
        assert crc32c(swapped) != known
