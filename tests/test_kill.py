"""SIGKILL at random moments of a park: the former bytes or the new ones, and no space leaked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmkv
from tests.computed import UNIFORM, assert_parked, ids_of, park
from tests.killed import Kills
from tests.mirror import check_pool

MOMENTS = int(os.environ.get("MMKV_KILLS", "6"))


def test_a_kill_leaves_the_former_bytes_or_the_new_ones(pool_dir: Path) -> None:
    kills = Kills(pool_dir, seed=1)
    for _ in range(MOMENTS):
        kills.kill()
    assert kills.former + kills.new + kills.idle == MOMENTS


CREATION = """
import os, sys
from tests.computed import *

left = int(sys.argv[2])
calls = 0

def count(frame, event, function):
    global calls
    if event == "c_call" and "mmkv" in frame.f_code.co_filename:
        calls += 1
        if calls == left:
            os.kill(os.getpid(), 9)

sys.setprofile(count)
pool = mmkv.Pool.open(sys.argv[1], UNIFORM, capacity="1MiB")
sys.setprofile(None)
print(calls)
pool.close()
"""


def test_a_creation_that_was_killed_at_any_moment_is_finished_by_the_next_open(pool_dir: Path) -> None:
    def create(killed_at: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", CREATION, pool_dir, str(killed_at)],
            cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, check=False,
        ).stdout  # fmt: skip

    calls = int(create(0))
    for moment in range(1, MOMENTS + 1):
        shutil.rmtree(pool_dir)
        assert create(calls * moment // (MOMENTS + 1)) == ""
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
