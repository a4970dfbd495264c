"""SIGKILL at random moments of a park: the former bytes or the new ones, and no space leaked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmkv
from tests.computed import HYBRID, UNIFORM, assert_parked, ids_of, park
from tests.killed import Kills
from tests.mirror import check_pool

MOMENTS = int(os.environ.get("MMKV_KILLS", "4"))


def test_a_kill_leaves_the_former_bytes_or_the_new_ones(pool_dir: Path) -> None:
    kills = Kills(pool_dir, seed=1)
    for _ in range(MOMENTS):
        kills.kill()
    assert kills.former + kills.new + kills.idle == MOMENTS


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_a_kill_of_a_pool_with_two_tiers_leaves_the_former_bytes_or_the_new_ones(
    tmp_path: Path, ram_path: Path
) -> None:
    kills = Kills(tmp_path / "pool", seed=1, hot=ram_path / "hot")
    for _ in range(2 * MOMENTS):
        kills.kill()
    assert kills.former + kills.new + kills.idle == 2 * MOMENTS


COUNTING = """
import os, sys, threading
from tests.computed import *

left = int(sys.argv[2])
calls = 0

def count(frame, event, function):
    global calls
    if event == "c_call" and "mmkv" in frame.f_code.co_filename:
        calls += 1
        if calls == left:
            os.kill(os.getpid(), 9)

def counted(do):
    threading.setprofile(count)
    sys.setprofile(count)
    do()
    sys.setprofile(None)
    threading.setprofile(None)
    print(calls)
"""
CREATION = """
pools = []
counted(lambda: pools.append(mmkv.Pool.open(sys.argv[1], UNIFORM, capacity="1MiB")))
pools[0].close()
"""
# Growth in place and behind, an edited turn, eviction, a fork, a drop, a smaller capacity, a sync.
STEPS = """
pool = mmkv.Pool.open(sys.argv[1], HYBRID, min_free_ram=0)

def steps():
    park(pool, "pinned", ids_of((1, 5000))[:1800])
    park(pool, "edited", np.concatenate([ids_of((2, 5000))[:600], ids_of((3, 900))]))
    park(pool, "new", ids_of((4, 3000)), durable=True)
    pool.fork("pinned", "fork", 1000)
    park(pool, "fork", np.concatenate([ids_of((1, 5000))[:1000], ids_of((5, 700))]))
    pool.drop("dropped")
    pool.resize(pool.stats().capacity * 3 // 4)
    pool.flush()
    park(pool, "last", ids_of((6, 1500)))
    pool.close()

counted(steps)
"""
BEFORE = {
    "pinned": ids_of((1, 5000))[:1000],
    "edited": ids_of((2, 5000))[:1300],
    "dropped": ids_of((7, 900)),
    "old": ids_of((8, 1100)),
}
AFTER = {
    "pinned": ids_of((1, 5000))[:1800],
    "edited": np.concatenate([ids_of((2, 5000))[:600], ids_of((3, 900))]),
    "new": ids_of((4, 3000)),
    "fork": np.concatenate([ids_of((1, 5000))[:1000], ids_of((5, 700))]),
    "last": ids_of((6, 1500)),
}


def run(script: str, path: Path, killed_at: int) -> str:
    """What a script prints that is killed at its n-th call of something written in C."""
    return subprocess.run(
        [sys.executable, "-c", COUNTING + script, path, str(killed_at)],
        cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, check=False,
    ).stdout  # fmt: skip


def prepare(path: Path) -> None:
    """A pool of HYBRID with little room left."""
    shutil.rmtree(path, ignore_errors=True)
    with mmkv.Pool.open(path, HYBRID, capacity="1MiB", min_free_ram=0) as pool:
        for name, ids in BEFORE.items():
            park(pool, name, ids)
        pool.pin("pinned")
        geometry = pool._space.geometry
        pool.resize(16 * geometry.segment_bytes + 2 * geometry.state_segment_bytes)


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_every_conversation_as_it_was_or_became(pool_dir: Path) -> None:
    prepare(pool_dir)
    calls = int(run(STEPS, pool_dir, 0))
    for moment in range(1, 2 * MOMENTS + 1):
        prepare(pool_dir)
        assert run(STEPS, pool_dir, calls * moment // (2 * MOMENTS + 1)) == ""
        with mmkv.Pool.open(pool_dir) as pool:
            assert "pinned" in pool
            for name in pool.conversations():
                tokens = pool.info(name).tokens
                if name == "fork" and tokens == 1000:
                    assert_parked(pool, name, BEFORE["pinned"])
                    continue
                parked = next(ids[name] for ids in (BEFORE, AFTER) if name in ids and len(ids[name]) == tokens)
                assert_parked(pool, name, parked)
            check_pool(pool, [])


def test_a_creation_that_was_killed_at_any_moment_is_finished_by_the_next_open(pool_dir: Path) -> None:
    calls = int(run(CREATION, pool_dir, 0))
    for moment in range(1, MOMENTS + 1):
        shutil.rmtree(pool_dir)
        assert run(CREATION, pool_dir, calls * moment // (MOMENTS + 1)) == ""
        with mmkv.Pool.open(pool_dir, UNIFORM, capacity="1MiB") as pool:
            check_pool(pool, [])
            park(pool, "chat", ids_of((2, 600)))
            assert_parked(pool, "chat", ids_of((2, 600)))


@pytest.mark.parametrize("left", ["pool.json.123", "lock"])
def test_what_a_killed_creation_left_is_in_nobodys_way(pool_dir: Path, left: str) -> None:
    pool_dir.mkdir(mode=0o700)
    (pool_dir / left).write_text('{"format": 1, "uu')
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="1MiB") as pool:
        park(pool, "chat", ids_of((1, 600)))
        assert_parked(pool, "chat", ids_of((1, 600)))
