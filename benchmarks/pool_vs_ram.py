"""Park and take one conversation with mmkv and with pools that are only RAM, interleaved in one run.

The RAM pool is the fastest thing that forgets: memory that was allocated beforehand, copied with NumPy (for device
arrays: page-locked memory, asynchronous copies on one stream). All pools park the same slot and take it back, turn
about; every take is checked byte by byte. Each park has new ids, and goes into memory that has been used before. With a
device there are more contenders, and the figures that `docs/performance.md` shows.

    python benchmarks/pool_vs_ram.py --json figures.json
    python benchmarks/pool_vs_ram.py --device cuda:0 --json h200.json --plot h200.png
    python benchmarks/pool_vs_ram.py --device cuda:0 --only swap --only paged --json h200.json --add
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asking import fail
from benchmarks.contest import CONTENDERS, Contest, run_contest, summary, table_of
from benchmarks.figures import TURN_TOKENS, WHOLE_FIGURES, measure_whole
from benchmarks.machine import Bus, provenance
from benchmarks.memory import DeviceMemory, Memory, allocate_slot, memory_of, rows_of
from benchmarks.results import Output
from benchmarks.rig import Rig, console
from benchmarks.rooms import LockedRoom
from benchmarks.shapes import SHAPE_FIGURES, measure_shapes
from benchmarks.work import Noise, default_directory, default_disk, layout_of, temporary_directory
from mmkv.medium import available_ram, medium_of

FIGURES = (*WHOLE_FIGURES, *SHAPE_FIGURES)
CHOICES = (*CONTENDERS, *FIGURES)


def require_memory(needed: int, *, strict: bool) -> None:
    """End the program, or warn, if so much memory is not to be had."""
    available = available_ram()
    if needed > available:
        message = f"this needs about {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available"
        if strict:
            raise fail(f"{message}: choose fewer --tokens")
        console.print(f"[yellow]{message}[/yellow]", markup=True)


def chosen(only: Sequence[str], device: str) -> tuple[list[str], list[str]]:
    """The contenders and the figures to measure."""
    unknown = sorted(set(only) - set(CHOICES))
    if unknown:
        raise fail(f"--only {unknown[0]} is unknown: it is one of {', '.join(CHOICES)}")
    if not only:
        return (["ram", "mmkv"], []) if device == "cpu" else (list(CONTENDERS), list(FIGURES))
    contenders = [name for name in CONTENDERS if name in only]
    return contenders, [name for name in FIGURES if name in only]


@contextmanager
def make_rig(
    memory: Memory, layers: int, row_bytes: int, tokens: int, repeats: int, directory: Path, output: Output
) -> Iterator[Rig]:
    """The slot, what fills it, and RAM to be compared with."""
    layout = layout_of(layers, row_bytes)
    slot = allocate_slot(memory, layout, tokens + (repeats + 2) * TURN_TOKENS)
    rows = rows_of(slot.arrays)
    room = LockedRoom(memory, rows, tokens)
    bus = Bus(memory) if isinstance(memory, DeviceMemory) else None
    noise = Noise(memory, max(plane.entries * plane.row_bytes for plane in rows))
    try:
        yield Rig(memory, layout, slot, rows, tokens, repeats, directory, noise, room, bus, output)
    finally:
        if bus is not None:
            output.update({"bus": bus.figures()})
            bus.close()
        room.free()


def report(contest: Contest, output: Output) -> None:
    """Write down what the contest found so far."""
    rig = contest.rig
    table = table_of(contest, rig.bytes)
    found = summary(table)
    output.update({**found, "contenders": table})
    report_checks(rig, table)
    for kind in ("take", "park"):
        if "ratio" in found and rig.memory.on_device:
            ram, ours = found["ram"][f"{kind}_gbps"], found["mmkv"][f"{kind}_gbps"]
            rig.figure(kind, found["ratio"][kind], gbps=ours, ram_gbps=ram, path=found["mmkv"]["path"])


def report_checks(rig: Rig, table: dict[str, dict[str, Any]]) -> None:
    """What checksums cost: beside a pool without; on a host, whose memory they read once more, beside RAM."""
    beside, suffix = ("mmkv_unchecked", "") if rig.memory.on_device else ("ram", "_ram")
    for kind in ("take", "park"):
        ours, others = (table.get(name, {}).get(f"{kind}_gbps") for name in ("mmkv_checked", beside))
        if ours is not None and others is not None:
            rig.figure(f"checked_{kind}{suffix}", ours / others, gbps=ours, alone_gbps=others)


def show(data: dict[str, Any]) -> None:
    """Print the contenders' medians, and the range they come from."""
    table = Table("GB/s", "take", "park", "path", box=None, header_style="bold")

    def cell(found: dict[str, Any], kind: str) -> str:
        low, high = found[f"{kind}_range_gbps"]
        return f"{found[f'{kind}_gbps']:.2f} ({low:.2f} to {high:.2f})"

    for found in data.get("contenders", {}).values():
        if "take_gbps" in found:
            table.add_row(found["title"], cell(found, "take"), cell(found, "park"), found["path"])
        else:
            table.add_row(found["title"], "-", "-", found["reason"])
    if table.row_count:
        console.print(table)
    if "ratio" in data:
        ratio, ours = data["ratio"], data["mmkv"]
        console.print(
            f"mmkv / RAM only: take {ratio['take']:.2f}, park {ratio['park']:.2f}; first layer after "
            f"{ours['first_layer_ms']:.2f} ms, path {ours['path']}"
        )
    if "bus" in data:
        console.print("the bus: " + ", ".join(f"{name} {value:.1f}" for name, value in data["bus"].items()))


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the conversation; 28,672, with a device 131,072 if left out.", show_default=False
        ),
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token in one layer.")] = 816,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    disk: Annotated[
        Path | None, typer.Option("--disk-dir", help="Where to make the pool on a disk.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the slot lies: cpu, or cuda:0 and so on.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Parks and takes of each pool; of the slow ones at most 5.")] = 7,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Only these; any of {', '.join(CHOICES)}.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Add to what the file holds.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.", show_default=False)
    ] = None,
) -> None:
    """Park and take one conversation with mmkv and with pools that are only RAM, interleaved in one run."""
    contenders, figures = chosen(only or [], device)
    tokens = tokens or (28_672 if device == "cpu" else 131_072)
    size = layers * row_bytes * tokens
    parent = default_directory() if directory is None else directory
    output = Output(json_file, add=add)
    with temporary_directory(parent) as made, temporary_directory(disk or default_disk()) as on_disk:
        medium = medium_of(made)
        in_ram = (1 if device == "cpu" else 0) + 1 + (2.5 if medium.in_ram else 0)
        require_memory(int(in_ram * size) + (256 << 20), strict=device == "cpu")
        console.print(
            f"{tokens:,} tokens x {layers} layers x {row_bytes} bytes = {size / 1e9:.2f} GB, {medium.fs_type} at "
            f"{parent}, slot on {device}, {repeats} repeats"
        )
        memory = memory_of(device)
        work = {"layers": layers, "tokens": tokens, "row_bytes": row_bytes, "bytes": size, "device": device}
        provided = provenance(device, {"pool": made, "disk": on_disk})
        output.update({**provided, "work": {**work, "repeats": repeats}})
        with make_rig(memory, layers, row_bytes, tokens, repeats, made, output) as rig:
            reasons: dict[str, str] = {}
            if contenders:
                reasons = run_contest(rig, on_disk, contenders, lambda contest: report(contest, output)).reasons
            measure_whole(rig, figures)
            measure_shapes(rig, figures)
    show(output.data)
    if plot_file is not None:
        from benchmarks.plots import plot_pool_vs_ram

        plot_pool_vs_ram(output.data, plot_file)
    for name in ("ram", "mmkv"):
        if name in reasons:
            raise fail(f"{name}: {reasons[name]}")


if __name__ == "__main__":
    typer.run(main)
