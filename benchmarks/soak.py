"""Everything at once and at random for a while, with faults and kills, every take compared byte by byte.

Several threads park, grow, edit, fork, take, swap, drop, evict, pin and prefetch; reads and writes fail now and then or
move a part; the process is killed again and again and goes on with what is there.

    python benchmarks/soak.py --seconds 600
    python benchmarks/soak.py --seconds 120 --dir /mnt/nvme --hot /dev/shm --device cuda:0
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.work import default_directory, temporary_directory
from mmkv.medium import medium_of
from tests.soaking import THREADS, Soak

console = Console(highlight=False, soft_wrap=True)
# How long a child lives before it is killed, or ends.
_SHORTEST, _LONGEST = 3.0, 12.0
_KILLED = 0.5


def main(
    seconds: Annotated[float, typer.Option(min=1, help="How long to go on.")] = 600.0,
    seed: Annotated[int, typer.Option(help="What the steps follow from.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    hot: Annotated[
        Path | None, typer.Option("--hot", help="Where to make a hot tier, on a tmpfs.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the slots lie: cpu, or cuda:0.")] = "cpu",
) -> None:
    """Use a pool in every way at once, break it now and then, and count what was wrong."""
    base = directory or default_directory()
    rng = random.Random(seed)
    ram = nullcontext(None) if hot is None else temporary_directory(hot)
    with temporary_directory(base) as made, ram as in_ram, Progress(console=console, transient=True) as progress:
        soak = Soak(made / "pool", None if in_ram is None else in_ram / "hot", device, seed)
        task = progress.add_task("soaking", total=seconds)
        started = time.monotonic()
        while (left := seconds - (time.monotonic() - started)) > 0:
            soak.run(min(rng.uniform(_SHORTEST, _LONGEST), max(left, 1)), kill=rng.random() < _KILLED)
            progress.update(task, completed=time.monotonic() - started)
        elapsed = time.monotonic() - started
    where = f"{medium_of(base).fs_type}{'' if hot is None else ' behind a hot tier'}, slots on {device}"
    table = Table("what", "how often", title=f"{THREADS} threads, {where}; of the processes that were not killed")
    for what, count in sorted(soak.operations.items(), key=lambda found: -found[1]):
        table.add_row(what, f"{count:,}")
    console.print(table)
    for what in soak.wrong[:20]:
        console.print(f"[red]wrong:[/red] {what}")
    console.print(
        f"soak: {elapsed:.0f} s, {sum(soak.operations.values()):,} operations, {soak.bytes / 1e9:.2f} GB, "
        f"{soak.faults} faults and {soak.kills} kills survived, {len(soak.wrong)} wrong takes"
    )
    raise typer.Exit(int(bool(soak.wrong)))


if __name__ == "__main__":
    typer.run(main)
