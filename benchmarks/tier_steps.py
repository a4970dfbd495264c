"""A pool of three times its hot tier: conversations grow and are taken at random, every take compared byte by byte.

Tells what came from where, and how much memory the process took beside its slots.

    python benchmarks/tier_steps.py --steps 500
    python benchmarks/tier_steps.py --dir /mnt/disk --conversations 30
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.work import default_directory, default_disk, temporary_directory
from mmkv.medium import medium_of
from tests.computed import Ids, assert_holds, compute, ids_of, make_slot

LAYOUT = mmkv.Layout(
    [mmkv.Layer({"k": mmkv.Plane("uint8", (256,)), "v": mmkv.Plane("uint8", (256,))})] * 4, model="tiers"
)
TURN_TOKENS = 700

console = Console()


@dataclass
class Walk:
    """What random steps on two tiers found.

    Attributes
    ----------
    takes, parks : int
        How many.
    slot_bytes : int
        Bytes of the slots, and of what takes were compared with.
    grown_bytes : int
        By how much the process grew beside that, at its largest, and beside the hot files: their pages count as the
        process's own, as far as it maps them.
    stats : PoolStats
        The pool's figures at the end.
    """

    takes: int
    parks: int
    slot_bytes: int
    grown_bytes: int
    stats: mmkv.PoolStats


def walk(path: Path, hot: Path, *, conversations: int, tokens: int, steps: int, seed: int) -> Walk:
    """Park conversations of about three times the hot tier, and take and grow them at random.

    Raises
    ------
    AssertionError
        A byte differs.
    """
    rng = random.Random(seed)
    total = conversations * tokens * LAYOUT.token_bytes
    ids: dict[str, Ids] = {}
    slot = make_slot(LAYOUT, tokens + 2 * TURN_TOKENS)
    # The pages of the slot, and those that computing and comparing takes, are not the pool's.
    compute(slot, ids_of((seed, slot.arrays[0]["k"].shape[0])))
    assert_holds(slot, ids_of((seed, slot.arrays[0]["k"].shape[0])))
    before = _peak_bytes()
    takes = parks = 0
    with mmkv.Pool.open(
        path, LAYOUT, capacity=2 * total, hot=hot, hot_capacity=total // 3, min_free_ram=0, rewarm=True
    ) as pool:
        for number in range(conversations):
            name = f"chat {number}"
            ids[name] = ids_of((number, rng.randint(tokens // 2, tokens)))
            pool.park(name, compute(slot, ids[name]), ids[name]).result()
            parks += 1
        for _ in range(steps):
            name = rng.choice(sorted(ids))
            for _, _, _, array in _rows(slot):
                array[...] = 0xAA
            if rng.random() < 0.2:
                pool.prefetch(rng.choice(sorted(ids)))
            pool.take(name, slot).result()
            assert_holds(slot, ids[name], fill=0xAA)
            takes += 1
            if rng.random() < 0.3 and len(ids[name]) <= tokens:
                ids[name] = np.concatenate([ids[name], ids_of((1000 + takes, rng.randint(1, TURN_TOKENS)))])
                pool.park(name, compute(slot, ids[name]), ids[name]).result()
                parks += 1
        stats = pool.stats()
    slot_bytes = slot.arrays[0]["k"].shape[0] * LAYOUT.token_bytes
    return Walk(takes, parks, slot_bytes, _peak_bytes() - before - stats.tiers[0].allocated, stats)


def _rows(slot: mmkv.Slot) -> list[tuple[int, str, object, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
    return [
        (layer, name, None, array.view(np.uint8))
        for layer, planes in enumerate(slot.arrays)
        for name, array in planes.items()
    ]


def _peak_bytes() -> int:
    """The most memory that this process ever had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def show(found: Walk, seconds: float, where: str) -> None:
    """Print what was found."""
    stats = found.stats
    hot = stats.tiers[0]
    table = Table(show_header=False, title=f"{found.takes} takes and {found.parks} parks, {where}")
    for name, value in (
        ("seconds", f"{seconds:.1f}"),
        ("bytes taken", f"{stats.bytes_taken / 1e9:.2f} GB, none differed"),
        ("brought from the path", f"{stats.bytes_promoted / 1e9:.2f} GB in {stats.promotions} times"),
        ("written to the path", f"{stats.bytes_spilled / 1e9:.2f} GB"),
        ("let go from the hot tier", f"{stats.hot_evictions} blocks"),
        ("hot tier", f"{hot.allocated / 2**20:.0f} of {hot.capacity / 2**20:.0f} MiB"),
        ("memory beside slots and hot files", f"{found.grown_bytes / 2**20:.1f} MiB at most"),
    ):
        table.add_row(name, value)
    console.print(table)


def main(
    steps: Annotated[int, typer.Option(min=1, help="How many takes.")] = 300,
    conversations: Annotated[int, typer.Option(min=2, help="How many conversations.")] = 30,
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of a conversation, at most.")] = 6000,
    seed: Annotated[int, typer.Option(help="What the steps follow from.")] = 1,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the pool is made; a disk.")] = None,
) -> None:
    """Random takes from a pool of three times its hot tier, every one compared byte by byte."""
    base = directory or default_disk()
    with temporary_directory(base) as made, temporary_directory(default_directory()) as ram:
        started = time.monotonic()
        found = walk(made / "pool", ram / "hot", conversations=conversations, tokens=tokens, steps=steps, seed=seed)
        show(found, time.monotonic() - started, medium_of(base).fs_type)


if __name__ == "__main__":
    typer.run(main)
