"""Random steps on a pool and on a dict of what it must hold, every take compared byte by byte.

Conversations are parked, grown, edited, forked, dropped, taken, matched and swapped, and the pool is resized and opened
anew, while it is too small for all of them. Afterwards, at an occupancy of 85 %, it tells in how many extents a
conversation lies.

    python benchmarks/random_steps.py --steps 10000
    python benchmarks/random_steps.py --dir /mnt/disk --hybrid --seed 7
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.work import default_directory, temporary_directory
from mmkv.medium import medium_of
from tests.computed import HYBRID, UNIFORM, Ids, ids_of
from tests.mirror import Mirror

OCCUPANCY = 0.85
CAPACITY = 16 << 20
CONVERSATIONS = 30
TURN_TOKENS = (50, 2000)
MOST_TOKENS = 40_000
# How often each step comes, in a thousand.
WEIGHTS = {
    "park": 60, "grow": 400, "edit": 60, "fork": 30, "drop": 20, "take": 250, "prefix": 60, "match": 60, "swap": 30,
    "resize": 20, "reopen": 5, "flush": 5,
}  # fmt: skip

console = Console()


class Steps:
    """Random steps on a mirror."""

    def __init__(self, mirror: Mirror, seed: int) -> None:
        self.mirror = mirror
        self.rng = random.Random(seed)
        self.made = 0
        self.done: Counter[str] = Counter()
        self._do: dict[str, Callable[[], None]] = {name: getattr(self, f"_{name}") for name in WEIGHTS}

    def step(self) -> None:
        """Do one step, and now and then check every count of the pool."""
        (name,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        if not self.mirror.model:
            name = "park"
        # An engine's turns are seconds apart, while housekeeping comes round five times a second.
        self.mirror.keep_house()
        self._do[name]()
        self.done[name] += 1
        if self.done.total() % 20 == 0:
            self.mirror.check()

    def occupy(self, share: float) -> float:
        """Grow or drop conversations until so much of the capacity is in use; the share that is."""
        self.mirror.resize(CAPACITY)
        while self._occupancy() < share:
            self.mirror.keep_house()
            self._grow() if len(self.mirror.model) >= CONVERSATIONS // 2 else self._park()
        while self._occupancy() > share + 0.01:
            self._drop()
        return self._occupancy()

    def _occupancy(self) -> float:
        stats = self.mirror.pool.stats()
        return stats.used / stats.capacity

    def _some(self) -> str:
        return self.rng.choice(sorted(self.mirror.model))

    def _turn(self) -> Ids:
        self.made += 1
        return ids_of((self.made, self.rng.randint(*TURN_TOKENS)))

    def _name(self) -> str:
        return f"chat {self.rng.randrange(CONVERSATIONS)}"

    def _park(self) -> None:
        # Every other one begins with one of a few system prompts.
        shared = [ids_of((1 << 32 | self.rng.randrange(3), 1500))] if self.rng.random() < 0.5 else []
        self.mirror.park(self._name(), np.concatenate([*shared, self._turn()]), boundary=True)

    def _grow(self) -> None:
        name = self._some()
        former = self.mirror.model[name].ids
        if len(former) > MOST_TOKENS:
            self.mirror.drop(name)
        else:
            self.mirror.park(name, np.concatenate([former, self._turn()]), boundary=self.rng.random() < 0.5)

    def _edit(self) -> None:
        name = self._some()
        former = self.mirror.model[name].ids
        self.mirror.park(name, np.concatenate([former[: self.rng.randrange(len(former))], self._turn()]))

    def _fork(self) -> None:
        source = self._some()
        length = len(self.mirror.model[source].ids)
        self.mirror.fork(source, self._name(), self.rng.choice([None, self.rng.randint(1, length)]))

    def _drop(self) -> None:
        self.mirror.drop(self._some())

    def _take(self) -> None:
        name = self._some()
        self.mirror.take(name, None, self.rng.choice([0, self.rng.randrange(len(self.mirror.model[name].ids))]))

    def _prefix(self) -> None:
        name = self._some()
        points = self.mirror.pool.info(name).checkpoints
        length = len(self.mirror.model[name].ids)
        self.mirror.take(name, self.rng.choice(points) if points else self.rng.randint(1, length))

    def _match(self) -> None:
        parked = self.mirror.model[self._some()]
        ids = np.concatenate([parked.ids[: self.rng.randint(1, len(parked.ids))], self._turn()])
        self.mirror.match(ids, parked.namespace)

    def _swap(self) -> None:
        arriving, leaving = self._some(), self._name()
        former = self.mirror.model.get(leaving)
        ids = self._turn() if former is None else np.concatenate([former.ids, self._turn()])
        self.mirror.swap(leaving, ids, arriving)

    def _resize(self) -> None:
        self.mirror.resize(int(CAPACITY * self.rng.choice([0.6, 0.8, 1.0, 1.0])))

    def _reopen(self) -> None:
        self.mirror.reopen()

    def _flush(self) -> None:
        self.mirror.flush()


def show(steps: Steps, seconds: float, occupancy: float, where: str) -> None:
    """Print what was done and found."""
    mirror, stats = steps.mirror, steps.mirror.pool.stats()
    extents = [mirror.pool.info(name).extents for name in mirror.model]
    blocks = [-(-len(parked.ids) // mirror.block_tokens) for parked in mirror.model.values()]
    table = Table(show_header=False, title=f"{steps.done.total()} random steps, {mirror.layout.model}, {where}")
    for name, value in (
        ("steps", ", ".join(f"{count} {name}" for name, count in sorted(steps.done.items()))),
        ("seconds", f"{seconds:.1f}"),
        ("bytes compared", f"{mirror.compared / 1e9:.2f} GB, none differed"),
        ("dropped to make room", str(mirror.evicted)),
        ("full", f"{mirror.full} times, with nothing lost"),
        ("occupancy", f"{occupancy:.1%} of {stats.capacity / 2**20:.0f} MiB"),
        ("conversations", f"{len(extents)}, of {np.mean(blocks):.1f} blocks in the mean"),
        ("extents a conversation", f"{np.mean(extents):.2f} in the mean, {max(extents)} at most"),
    ):
        table.add_row(name, value)
    console.print(table)


def main(
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 10_000,
    seed: Annotated[int, typer.Option(help="What the steps follow from.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the pool is made; a tmpfs if there is one.")
    ] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="A layout with states instead of a uniform one.")] = False,
) -> None:
    """Random steps on a pool and on a dict, every take compared byte by byte."""
    base = directory or default_directory()
    with (
        temporary_directory(base) as made,
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        ) as progress,
    ):
        mirror = Mirror(made / "pool", HYBRID if hybrid else UNIFORM, CAPACITY)
        task = progress.add_task("steps", total=steps)
        walk = Steps(mirror, seed)
        started = time.monotonic()
        for _ in range(steps):
            walk.step()
            progress.advance(task)
        mirror.check()
        seconds = time.monotonic() - started
        occupancy = walk.occupy(OCCUPANCY)
        mirror.check()
        progress.stop()
        show(walk, seconds, occupancy, medium_of(base).fs_type)
        mirror.close()


if __name__ == "__main__":
    typer.run(main)
