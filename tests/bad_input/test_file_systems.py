"""File systems and limits: full, read-only, too small."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmkv
from mmkv.catalog import Catalog
from tests.bad_input.whole import CAPACITY, IDS, assert_whole
from tests.computed import (
    UNIFORM,
    Ids,
    assert_parked,
    ids_of,
    park,
)
from tests.mirror import check_pool


def test_too_few_open_files_for_all_layers(tmp_path: Path) -> None:
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        import mmkv
        layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})] * 80, "80 layers")
        try:
            mmkv.Pool.open(sys.argv[1], layout, capacity="16MiB")
        except mmkv.MmkvError as error:
            print(type(error).__name__, error)
        small = mmkv.Layout(layout.layers[:20], "20 layers")
        with mmkv.Pool.open(sys.argv[1] + "-small", small, capacity="16MiB") as pool:
            slot = mmkv.Slot.allocate(small, 10)
            pool.park("chat", slot, range(10)).result(10)
            print(len(pool))
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "pool"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    ).stdout.splitlines()  # fmt: skip
    assert "MmkvError" in shown[0]
    assert "too many open files" in shown[0]
    assert "ulimit -n" in shown[0]
    assert shown[1] == "1", "what the failed open took is given back"
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))})] * 80, "80 layers")
    with mmkv.Pool.open(tmp_path / "pool", layout, capacity="16MiB") as pool:
        park(pool, "chat", IDS)
        assert_parked(pool, "chat", IDS)


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "mmkv-test", where], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_file_system(small_fs: Path) -> None:
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        parked: dict[str, Ids] = {}

        def park_for_ever() -> None:
            for seed in itertools.count():
                ids = ids_of((seed, 1000))
                park(pool, f"chat {seed}", ids)
                parked[f"chat {seed}"] = ids
                pool.pin(f"chat {seed}")

        with pytest.raises(mmkv.PoolFull, match=r"nothing can be dropped.*no room on the file system.*free some space"):
            park_for_ever()
        assert len(parked) > 3
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        check_pool(pool, [])
        pool.drop("chat 0")
        park(pool, "again", ids_of((200, 1000)))
        parked.pop("chat 0")
    with mmkv.Pool.open(small_fs / "pool") as pool:
        for name, ids in parked.items():
            assert_parked(pool, name, ids)
        check_pool(pool, [])


def test_a_file_system_that_others_fill(small_fs: Path) -> None:
    ids = ids_of((1, 1000))
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", ids)
        fill(small_fs / "filler")
        assert_parked(pool, "chat", ids)
        with pytest.raises(mmkv.PoolFull):
            park(pool, "large", ids_of((2, 20000)))
        assert_parked(pool, "chat", ids)
    (small_fs / "filler").unlink()
    with mmkv.Pool.open(small_fs / "pool") as pool:
        assert_parked(pool, "chat", ids)
        check_pool(pool, [])


def test_a_full_file_system_does_not_keep_requests_from_being_carried_out(small_fs: Path) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (256,))})], "large blocks")
    with mmkv.Pool.open(small_fs / "pool", layout, capacity="4MiB") as pool:
        segment = pool._space.geometry.segment_bytes
        for seed in range(8):
            park(pool, f"chat {seed}", ids_of((seed, 500)))
        pool._keep_spare()
        with (small_fs / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, os.statvfs(small_fs).f_bavail * 4096 - segment + 4096)
        # From now on every round of housekeeping finds no room for a spare segment.
        while pool._space.blocks.free:
            park(pool, f"chat {len(pool)}", ids_of((len(pool), 500)))
        catalog = Catalog(small_fs / "pool" / "catalog.sqlite3")
        catalog.add_request("drop", "chat 2")
        catalog.close()
        deadline = time.monotonic() + 1
        while "chat 2" in pool:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_no_room_to_create_a_pool(small_fs: Path) -> None:
    fill(small_fs / "filler")
    with pytest.raises(mmkv.PoolFull):
        mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB")
    (small_fs / "filler").unlink()
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", IDS)
        assert_parked(pool, "chat", IDS)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue


def test_a_read_only_file_system(small_fs: Path) -> None:
    with mmkv.Pool.open(small_fs / "pool", UNIFORM, capacity="64MiB") as pool:
        park(pool, "chat", IDS)
    subprocess.run(["mount", "-o", "remount,ro", small_fs], check=True)
    with pytest.raises(mmkv.MmkvError, match="Read-only file system"):
        mmkv.Pool.open(small_fs / "pool")
    with pytest.raises(mmkv.MmkvError, match="cannot be made: Read-only file system"):
        mmkv.Pool.open(small_fs / "new", UNIFORM, capacity="64MiB")
    with mmkv.Pool.open(small_fs / "pool", readonly=True) as pool:
        assert pool.conversations() == ["chat"]
        with pool.match(IDS) as match:
            assert match.tokens == 1000
    subprocess.run(["mount", "-o", "remount,rw", small_fs], check=True)
    assert_whole(small_fs / "pool")


def test_too_little_free_ram_is_pool_full(ram_path: Path) -> None:
    if not ram_path.is_relative_to("/dev/shm"):
        pytest.skip("no tmpfs")
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity=CAPACITY, min_free_ram="64TiB") as pool:
        with pytest.raises(mmkv.PoolFull, match=r"RAM is short: .* are available, .* must stay free"):
            park(pool, "chat", IDS)
        assert pool.stats().allocated == 0


def test_a_file_size_limit_is_pool_full(pool_dir: Path) -> None:
    code = """
        import resource, sys
        from tests.computed import *
        pool = mmkv.Pool.open(sys.argv[1], UNIFORM, capacity="64MiB")
        park(pool, "chat", ids_of((1, 1000)))
        pool.pin("chat")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            for seed in range(2, 60):
                park(pool, str(seed), ids_of((seed, 5000)))
                pool.pin(str(seed))
        except mmkv.PoolFull as error:
            print("full")
        assert_parked(pool, "chat", ids_of((1, 1000)))
        print("fine")
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), pool_dir],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    ).stdout.split()  # fmt: skip
    assert shown == ["full", "fine"]
