"""A reader beside the owner, a forked child, and what a closed pool leaves."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmkv
from tests.computed import (
    park,
)
from tests.tiered import (
    BLOCK_BYTES,
    open_tiers,
)
from tests.tiers.left import GROWN, KEPT, assert_as_left, leave

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")


def test_a_reader_beside_the_owner(pool: mmkv.Pool, base: Path) -> None:
    park(pool, "chat", KEPT)
    with mmkv.Pool.open(base, readonly=True) as reader:
        assert reader.conversations() == ["chat"]
        assert (reader.info("chat").hot_bytes, reader.info("chat").dirty_bytes) == (3 * BLOCK_BYTES, 3 * BLOCK_BYTES)
        with reader.match(GROWN) as match:
            assert match.tokens == len(KEPT)
        pool.flush()
        assert reader.info("chat").dirty_bytes == 0
        park(pool, "chat", GROWN)
        with reader.match(GROWN) as match:
            assert match.tokens == len(GROWN)


FORKED = """
import gc, os, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import mmkv
from pathlib import Path
from tests.computed import *
from tests.tiered import open_tiers
pool = open_tiers(Path(sys.argv[1]), Path(sys.argv[2]), hot_capacity="64MiB")
park(pool, "chat", ids_of((1, 1500)))
places = sorted((buffer.address, buffer.bytes) for buffer in pool._hot.between._maps.values())
child = os.fork()
if child == 0:
    try:
        pool.take("chat", make_slot(UNIFORM, 1500))
    except mmkv.PoolClosed:
        pass
    # What the child maps now may lie where the hot files are in the parent.
    arrays = [np.ones(size // 4, dtype=np.uint8) for _, size in places for _ in range(4)]
    pool.__dict__.clear()
    del pool
    gc.collect()
    total = sum(int(array.sum()) for array in arrays)
    print("child", total == sum(len(array) for array in arrays), flush=True)
    os._exit(0)
print("status", os.waitpid(child, 0)[1], flush=True)
park(pool, "chat", ids_of((1, 2500)))
pool.flush()
assert_parked(pool, "chat", ids_of((1, 2500)))
pool.close()
with open_tiers(Path(sys.argv[1]), Path(sys.argv[2])) as pool:
    assert_parked(pool, "chat", ids_of((1, 2500)))
print("fine", flush=True)
"""


def test_a_forked_child_has_no_pool_and_does_its_parent_no_harm(base: Path, hot: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, base, hot],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["child True", "status 0", "fine"], done.stderr


def test_threads_and_descriptors_are_given_back(base: Path, hot: Path, no_threads_left: None) -> None:
    def descriptors() -> set[str]:
        gc.collect()
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {name for name in found if name.startswith((str(base), str(hot)))}

    for _ in range(3):
        with open_tiers(base, hot, writes=True) as pool:
            leave(pool)
            assert_as_left(pool)
        assert not descriptors()
    with Path("/proc/self/maps").open() as maps:
        assert str(hot) not in maps.read()
