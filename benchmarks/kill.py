"""A process that parks without end is killed with SIGKILL at random moments; the pool is looked through after each.

python benchmarks/kill.py --kills 100
python benchmarks/kill.py --dir /mnt/disk
python benchmarks/kill.py --dir /mnt/disk --tiers --kills 200
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.work import default_directory, temporary_directory
from mmkv.medium import medium_of
from tests.killed import Kills

console = Console()


def main(
    moments: Annotated[int, typer.Option("--kills", "--moments", min=1, help="How many processes to kill.")] = 100,
    seed: Annotated[int, typer.Option(help="What the moments follow from.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the pool is made; a tmpfs if there is one.")
    ] = None,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="With a hot tier, in a tmpfs, that is smaller than the pool.")
    ] = False,
) -> None:
    """Kill a process that parks at random moments, and see that nothing is lost and no space leaked."""
    base = directory or default_directory()
    with temporary_directory(base) as made, temporary_directory(default_directory()) as ram:
        kills = Kills(made / "pool", seed, hot=ram / "hot" if tiers else None)
        started = time.monotonic()
        for _ in track(range(moments), "kills", console=console):
            kills.kill()
        seconds = time.monotonic() - started
    title = f"{moments} kills, {medium_of(base).fs_type}{', with a hot tier' if tiers else ''}"
    table = Table(show_header=False, title=title)
    for name, value in (
        ("in the middle of a park, the former bytes left", str(kills.former)),
        ("in the middle of a park, the new bytes left", str(kills.new)),
        ("between two parks", str(kills.idle)),
        ("other bytes, counts or file sizes", "0"),
        ("parks in all", str(kills.step)),
        ("seconds", f"{seconds:.1f}"),
    ):
        table.add_row(name, value)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
