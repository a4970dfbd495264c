"""Space: segments come and go in all files or in none, and ids are found again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mmkv
from mmkv.catalog import Catalog
from mmkv.geometry import Extent, choose_geometry
from mmkv.medium import medium_of
from mmkv.space import KINDS, Space
from mmkv.store import files
from tests.computed import HYBRID, ids_of

GEOMETRY = choose_geometry(HYBRID, 1 << 20)
BLOCK = GEOMETRY.block_tokens


@pytest.fixture
def space(pool_dir: Path) -> Iterator[Space]:
    pool_dir.mkdir()
    catalog = Catalog(pool_dir / "catalog.sqlite3", create=True)
    space = opened(pool_dir, catalog, create=True)
    yield space
    space.close()
    catalog.close()


def opened(path: Path, catalog: Catalog, *, create: bool = False, readonly: bool = False) -> Space:
    return Space(
        path, GEOMETRY, catalog, medium_of(path), capacity=1 << 20, min_free_ram=0, create=create, readonly=readonly
    )


def disk_bytes(space: Space) -> int:
    return sum(os.fstat(file.fd).st_blocks * 512 for kind in KINDS for file in space.files(kind))


def test_an_empty_space_takes_no_room(space: Space) -> None:
    assert space.allocated_bytes == space.used_bytes == disk_bytes(space) == 0
    assert (space.blocks.total, space.records.total) == (0, 0)


def test_a_segment_takes_its_room_in_every_file(space: Space) -> None:
    lock = threading.RLock()
    assert space.grow("blocks", lock) == 0
    assert space.grow("checkpoints", lock) == 0
    assert space.allocated_bytes == GEOMETRY.segment_bytes + GEOMETRY.state_segment_bytes == disk_bytes(space)
    assert space.blocks.free == GEOMETRY.segment_blocks
    assert space.records.free == GEOMETRY.segment_checkpoints
    assert space.grow("blocks", lock) == 1


def test_growth_ends_at_the_capacity(space: Space) -> None:
    lock = threading.RLock()
    while space.grow("blocks", lock) is not None:
        pass
    assert (1 << 20) - GEOMETRY.segment_bytes < space.allocated_bytes <= 1 << 20


def test_growth_that_one_file_has_no_room_for_leaves_none_longer(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    space.grow("blocks", threading.RLock())
    before = disk_bytes(space), space.blocks.free
    real = files._fallocate

    def full(fd: int, mode: int, offset: int, size: int) -> int:
        if mode == 0 and fd == space.files("blocks")[1].fd:
            return errno.ENOSPC
        return real(fd, mode, offset, size)

    monkeypatch.setattr(files, "_fallocate", full)
    with pytest.raises(mmkv.PoolFull, match="no room on the file system"):
        space.grow("blocks", threading.RLock())
    assert (disk_bytes(space), space.blocks.free) == before
    monkeypatch.undo()
    assert space.grow("blocks", threading.RLock()) == 1


def test_a_segment_that_is_given_back_frees_its_room(space: Space) -> None:
    for _ in range(3):
        space.grow("blocks", threading.RLock())
    space.give_back("blocks", 1)
    assert disk_bytes(space) == 2 * GEOMETRY.segment_bytes
    assert space.allocated_bytes == 2 * GEOMETRY.segment_bytes
    assert space.grow("blocks", threading.RLock()) == 1, "the gap is filled first"


def test_segments_are_there_again(space: Space, pool_dir: Path) -> None:
    for _ in range(3):
        space.grow("blocks", threading.RLock())
    space.give_back("blocks", 0)
    catalog = Catalog(pool_dir / "catalog.sqlite3")
    again = opened(pool_dir, catalog)
    assert again.blocks.segments == {1, 2}
    again.close()
    catalog.close()


def test_room_that_no_segment_has_is_given_back_at_open(space: Space) -> None:
    for _ in range(2):
        space.grow("blocks", threading.RLock())
    space.give_back("blocks", 0)
    for file in space.files("blocks"):
        file.allocate(0)
        file.allocate(5)
    space.trim()
    assert disk_bytes(space) == GEOMETRY.segment_bytes
    assert space.tokens.size == 2 * GEOMETRY.tokens_segment_bytes


def test_trimming_leaves_what_segments_hold(space: Space) -> None:
    for _ in range(2):
        space.grow("blocks", threading.RLock())
    ids = ids_of((1, 2 * BLOCK))
    extents = (Extent(0, 1), Extent(GEOMETRY.segment_blocks, 1))
    space.write_ids(extents, 0, ids)
    space.trim()
    assert (space.read_ids(extents, 0, len(ids)) == ids).all()


def test_ids_are_found_wherever_they_lie(space: Space) -> None:
    for _ in range(3):
        space.grow("blocks", threading.RLock())
    extents = (Extent(2, 1), Extent(0, 2))
    ids = ids_of((1, 3 * BLOCK - 5))
    space.write_ids(extents, 0, ids)
    assert (space.read_ids(extents, 0, len(ids)) == ids).all()
    assert (space.read_ids(extents, BLOCK - 1, BLOCK + 2) == ids[BLOCK - 1 : BLOCK + 2]).all()
    space.write_ids(extents, BLOCK, -ids)
    assert (space.read_ids(extents, 0, len(ids)) == np.concatenate([ids[:BLOCK], -ids[BLOCK:]])).all()


@pytest.mark.parametrize("common", [0, 1, 4095, 4096, 4097, 9000])
def test_a_common_prefix_ends_at_the_first_other_id(space: Space, common: int) -> None:
    for _ in range(10):
        space.grow("blocks", threading.RLock())
    ids = ids_of((1, 9000))
    extents = (Extent(0, GEOMETRY.blocks_for(9000)),)
    space.write_ids(extents, 0, ids)
    other = ids.copy()
    other[common : common + 1] += 1
    assert space.common_prefix(extents, 9000, other) == common
    assert space.common_prefix(extents, 9000, other[: common + 1]) == common
    assert space.common_prefix(extents, 9000, np.append(ids, 1)) == 9000
    assert space.common_prefix(extents, common, ids) == common


@pytest.mark.parametrize("change", ["cut", "gone", "replaced"])
def test_a_file_that_is_not_what_it_was_is_noticed(space: Space, change: str) -> None:
    space.grow("blocks", threading.RLock())
    space.require_whole()
    path = space.files("blocks")[1].path
    if change == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif change == "gone":
        path.unlink()
    else:
        (path.parent / "new").write_bytes(path.read_bytes())
        (path.parent / "new").rename(path)
    with pytest.raises(mmkv.PoolCorrupt, match=r"truncated|deleted or replaced"):
        space.require_whole()


def test_a_version_that_lists_what_is_not_there_is_refused(space: Space) -> None:
    space.grow("blocks", threading.RLock())
    space.require_in_range([Extent(0, 1)], [], 5)
    with pytest.raises(mmkv.PoolCorrupt, match="as its blocks"):
        space.require_in_range([Extent(0, 2)], [], 5)
    with pytest.raises(mmkv.PoolCorrupt, match="beyond"):
        space.require_in_range([Extent(GEOMETRY.segment_blocks, 1)], [], 5)
    with pytest.raises(mmkv.PoolCorrupt, match="beyond"):
        space.require_in_range([Extent(0, 1)], [Extent(0, 1)], 5)


def test_an_interrupted_call_is_taken_up_again(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    interruptions = iter([errno.EINTR, errno.EINTR])
    real = files._libc.fallocate

    class Interrupted:
        @staticmethod
        def fallocate(*arguments: int) -> int:
            code = next(interruptions, None)
            if code is None:
                return int(real(*arguments))
            files.ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(files, "_libc", Interrupted)
    assert space.grow("blocks", threading.RLock()) == 0
    assert disk_bytes(space) == GEOMETRY.segment_bytes


def test_where_fallocate_is_missing_zeros_take_the_room(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    space.grow("blocks", threading.RLock())
    assert space.tokens.size == GEOMETRY.tokens_segment_bytes
    assert disk_bytes(space) == GEOMETRY.segment_bytes
