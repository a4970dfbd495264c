"""A process that parks without end and is killed in the middle of it, again and again, on one pool.

Step `i` parks version `i // 3` of conversation `i % 3`. What it parks is a function of `i`, so that after a kill it is
known what each conversation may be: what the last finished step made of it, or what the unfinished one would have.

With a hot tier, which holds not quite two of the conversations, each step also brings another one back into it, so that
the kill may come amid a park, a write to the path, an eviction or a promotion.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import mmkv
from mmkv.catalog import Catalog
from tests.computed import Ids, assert_parked, computed, ids_of
from tests.crashed import crash, idle_writers
from tests.mirror import check_pool

CONVERSATIONS = 3
CAPACITY = 256 << 20
HOT_CAPACITY = 24 << 20
LAYOUT = mmkv.Layout(
    [mmkv.Layer({"k": mmkv.Plane("uint8", (512,)), "v": mmkv.Plane("uint8", (512,))})] * 3
    + [mmkv.Layer({"k": mmkv.Plane("uint8", (512,))}, {"s": mmkv.State("float32", (64, 64))})],
    model="killed",
)
_ROOT = Path(__file__).parent.parent


def text(step: int) -> Ids:
    """The ids that a step parks: a turn more than the version before, and after five turns another course."""
    conversation, version = step % CONVERSATIONS, step // CONVERSATIONS
    course, turn = divmod(version, 5)
    return ids_of((conversation, 1300), (1000 * (conversation + 1) + course, 700 * turn + 100))


def opened(path: Path, hot: Path | None = None) -> mmkv.Pool:
    """The pool that all of it happens in."""
    hot_capacity = None if hot is None else HOT_CAPACITY
    return mmkv.Pool.open(path, LAYOUT, capacity=CAPACITY, min_free_ram=0, hot=hot, hot_capacity=hot_capacity)


def park_for_ever(path: Path, step: int, hot: Path | None = None) -> None:
    """Park step after step, and say so before and after each."""
    with opened(path, hot) as pool:
        while True:
            bring_back(pool, step)
            ids = text(step)
            slot = computed(LAYOUT, ids)
            print("begin", step, flush=True)
            pool.park(f"chat {step % CONVERSATIONS}", slot, ids, durable=step % 7 == 0).result(60)
            print("done", step, flush=True)
            step += 1


def bring_back(pool: mmkv.Pool, step: int) -> None:
    """Let conversations come into the hot tier for which others must go, and do not wait for all of it."""
    if pool._hot is None:
        return
    other = f"chat {(step + 1) % CONVERSATIONS}"
    if other in pool:
        pool.prefetch(other)
        pool.take(other, mmkv.Slot.allocate(LAYOUT, pool.info(other).tokens))
    if step % 5 == 0:
        pool.flush()


@dataclass
class Kills:
    """Kills one process after another, and looks at the pool after each.

    Attributes
    ----------
    former, new, idle : int
        How often the conversation that was being parked had its former bytes, its new ones, and how often the kill
        came between two parks.
    """

    path: Path
    seed: int
    hot: Path | None = None
    step: int = 0
    former: int = 0
    new: int = 0
    idle: int = 0
    done: dict[int, int] = field(default_factory=dict)
    _seconds: float = 0.1

    def kill(self) -> None:
        """Let a process park, kill it at a random moment, and check what it left."""
        rng = random.Random(self.seed * 1_000_003 + self.step)
        begun = self._run_and_kill(rng)
        self._check_catalog()
        with idle_writers():
            pool = opened(self.path, self.hot)
        found = {name: pool.info(name).tokens for name in pool.conversations()}
        if begun is not None:
            self._decide(begun, found)
        check_pool(pool, [])
        for conversation, step in self.done.items():
            assert_parked(pool, f"chat {conversation}", text(step))
        assert len(found) == len(self.done)
        check_pool(pool, [])
        if self.hot is None or rng.random() < 0.5:
            pool.close()
        else:
            # What the path lacks goes on lacking there.
            crash(pool)

    def _decide(self, begun: int, found: dict[str, int]) -> None:
        conversation = begun % CONVERSATIONS
        former = self.done.get(conversation)
        tokens = found.get(f"chat {conversation}")
        if tokens == len(text(begun)):
            self.new += 1
            self.done[conversation] = begun
        else:
            assert tokens == (None if former is None else len(text(former)))
            self.former += 1
        self.step = begun if tokens != len(text(begun)) else begun + 1

    def _run_and_kill(self, rng: random.Random) -> int | None:
        """The step that was begun and not known to be done."""
        hot = None if self.hot is None else f"Path({str(self.hot)!r})"
        code = f"from tests.killed import *; park_for_ever(Path({str(self.path)!r}), {self.step}, {hot})"
        steps = rng.randint(1, 4)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
            assert process.stdout is not None
            begun: int | None = None
            began = 0.0
            for line in process.stdout:
                word, number = line.split()
                if word == "begin":
                    begun, began = int(number), time.monotonic()
                    steps -= 1
                    if steps == 0:
                        time.sleep(rng.uniform(0, 1.2 * self._seconds))
                        break
                else:
                    self._note(int(number))
                    self._seconds = max(0.8 * self._seconds, time.monotonic() - began)
            process.kill()
            for line in process.stdout:
                if line.startswith("done") and line.endswith("\n"):
                    self._note(int(line.split()[1]))
                elif line.startswith("begin") and line.endswith("\n"):
                    begun = int(line.split()[1])
        assert begun is not None, f"the process ended by itself with {process.returncode}"
        if self.done.get(begun % CONVERSATIONS) == begun:
            self.idle += 1
            self.step = begun + 1
            return None
        return begun

    def _note(self, step: int) -> None:
        self.done[step % CONVERSATIONS] = step

    def _check_catalog(self) -> None:
        """Read the catalog as an inspector does, before an owner has been there."""
        catalog = Catalog(self.path / "catalog.sqlite3", readonly=True)
        try:
            assert {row.name for row in catalog.load(hashes=False)} >= {f"chat {c}" for c in self.done}
        finally:
            catalog.close()
