"""Reads and writes past the page cache, on a disk that takes them and on one that only seems to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.errors import MmkvError, PoolFull
from mmkv.store.files import PoolFile

SEGMENT = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PoolFile]:
    made = PoolFile(tmp_path / "file", SEGMENT, create=True, unbuffered=True)
    for segment in range(10):
        made.allocate(segment)
    yield made
    made.close()


def memory(size: int, misaligned: int) -> memoryview:
    array = np.zeros(size + 2 * 4096, dtype=np.uint8)
    start = -array.ctypes.data % 4096 + misaligned
    return array[start : start + size].data


def bytes_of(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


PLACES = [
    (size, offset, misaligned)
    for size in (1, 511, 4096, 4097, 12288, 100_000, (4 << 20) + 5, 9 << 20)
    for offset, misaligned in ((0, 0), (4096, 16), (300, 300), (300, 0), (8191, 4095), (0, 512))
]


@pytest.mark.parametrize(("size", "offset", "misaligned"), PLACES)
def test_every_size_and_place(file: PoolFile, size: int, offset: int, misaligned: int) -> None:
    os.pwrite(file.fd, b"\xaa" * (size + 9000), 0)
    view = memory(size, misaligned)
    view[:] = bytes_of(1, size)
    file.write(view, offset)
    around = os.pread(file.fd, size + 200, max(0, offset - 100))
    before = min(100, offset)
    assert around[:before] == b"\xaa" * before
    assert around[before : before + size] == bytes_of(1, size)
    assert set(around[before + size : before + size + 50]) <= {0xAA}
    target = memory(size, misaligned)
    file.read(target, offset)
    assert target == bytes_of(1, size)


def test_whole_pages_go_past_the_cache(file: PoolFile) -> None:
    view = memory(SEGMENT, 0)
    if file.buffered_reason is not None:
        pytest.skip(file.buffered_reason)
    assert file.write(view, 0)
    assert file.read(view, 0)
    assert file.buffered_reason is None


def test_in_ram_there_is_no_second_descriptor(ram_path: Path) -> None:
    made = PoolFile(ram_path / "file", SEGMENT, create=True)
    made.allocate(0)
    assert not made.write(memory(8192, 0), 0)
    assert made.buffered_reason is None
    made.close()


def failing(real: Callable[..., int], fd: int, code: int) -> Callable[..., int]:
    def call(used: int, *arguments: Any) -> int:
        if used != fd:
            raise OSError(code, os.strerror(code))
        return real(used, *arguments)

    return call


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_only_at_the_write(
    file: PoolFile, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, failing(getattr(os, name), file.fd, code))
    view = memory(50_000, 0)
    view[:] = bytes_of(2, 50_000)
    assert not file.write(view, 4096)
    assert os.strerror(code) in str(file.buffered_reason)
    target = memory(50_000, 0)
    assert not file.read(target, 4096)
    assert target == view
    monkeypatch.undo()
    # Once and for all.
    assert not file.write(view, 0)


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, MmkvError), (errno.ENOSPC, PoolFull)])
def test_what_the_medium_says_is_passed_on(
    file: PoolFile, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, file.fd, code))
    with pytest.raises(kind, match=os.strerror(code)):
        file.write(memory(8192, 0), 0)
    monkeypatch.undo()
    assert file.write(memory(8192, 0), 0)


def test_short_reads_and_writes_go_on_through_the_cache(file: PoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def shortened(real: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, buffers: list[memoryview], offset: int) -> int:
            moved = real(fd, buffers, offset)
            return min(moved, 5000)

        return move

    monkeypatch.setattr(os, "pwritev", shortened(real_write))
    monkeypatch.setattr(os, "preadv", shortened(real_read))
    view = memory(70_000, 0)
    view[:] = bytes_of(3, 70_000)
    file.write(view, 0)
    target = memory(70_000, 0)
    file.read(target, 0)
    assert target == view


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = PoolFile(tmp_path / "file", SEGMENT, create=True, unbuffered=True)
    made.allocate(0)
    made.write(memory(8192, 0), 0)
    made.close()
    made.close()
    assert set(os.listdir("/proc/self/fd")) == before
