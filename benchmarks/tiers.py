"""Two tiers, a disk behind RAM: how near takes, parks and the background writer come to what the disk can do.

Every figure is a ratio of speeds that were measured side by side: a take of what only the disk has beside a plain
parallel O_DIRECT read of as many bytes, the writer beside such a write, transfers beside the writer and without it.
Every take is checked byte by byte. GPUDirect Storage takes part where the machine has it, and the paths say so.

    python benchmarks/tiers.py --dir /mnt/nvme --hot /dev/shm --json tiers.json --plot tiers.png
    python benchmarks/tiers.py --dir /mnt/nvme --hot /mnt/huge --device cuda:0 --tokens 131072 --json h200.json
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.asking import fail, fail_if_parts_did, require_plots
from benchmarks.contenders import wait_until_locked
from benchmarks.disk import PlainFiles
from benchmarks.machine import provenance
from benchmarks.memory import DeviceMemory, Memory, PlaneRows, allocate_slot, memory_of, rows_of
from benchmarks.results import Output, Unmeasurable, median, reason_of, said, spread
from benchmarks.rig import POOL_CONVERSATIONS, console
from benchmarks.rooms import LockedRoom
from benchmarks.work import Noise, default_directory, default_disk, layout_of, new_ids, temporary_directory, wipe
from mmkv.geometry import block_tokens
from mmkv.medium import medium_of
from mmkv.sizes import round_up

FIGURES = ("larger", "cold", "spill", "beside", "reboot", "kvikio")
_PLAIN_THREADS = (4, 8, 16)
_MANY = 30


@dataclass
class Bench:
    """A slot of one conversation, and where the pools go."""

    memory: Memory
    layout: mmkv.Layout
    slot: mmkv.Slot
    rows: list[PlaneRows]
    tokens: int
    repeats: int
    disk: Path
    hot: Path
    noise: Noise
    output: Output

    @property
    def bytes(self) -> int:
        """Bytes of the conversation."""
        return self.layout.token_bytes * self.tokens

    def figure(self, name: str, value: float, **details: Any) -> None:
        """Note a figure, and say it."""
        shown = {key: detail for key, detail in details.items() if not isinstance(detail, list)}
        console.print(said(name, value, self.output.figure(name, value, **details), shown))

    @contextmanager
    def pool(self, conversations: float, hot_conversations: float, size: int) -> Iterator[mmkv.Pool]:
        """A pool on the disk with a hot tier, both for so many conversations of `size` bytes; gone at the end."""
        path, hot = self.disk / "pool", self.hot / "hot"
        # A conversation takes whole blocks.
        size = round_up(size, block_tokens(self.layout) * self.layout.token_bytes)
        capacity, hot_capacity = int((conversations + 1) * size * 1.06), int(hot_conversations * size * 1.06)
        try:
            with mmkv.Pool.open(path, self.layout, capacity=capacity, hot=hot, hot_capacity=hot_capacity) as pool:
                yield pool
        finally:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(hot, ignore_errors=True)

    def park(self, pool: mmkv.Pool, name: str, tokens: int) -> float:
        """Park new bytes of so many tokens; the seconds until the park is committed."""
        self.noise.forget(name)
        self.noise.write(name, self.rows, 0, tokens)
        ids = new_ids(tokens)
        self.memory.synchronize()
        started = time.perf_counter()
        pool.park(name, self.slot, ids, share=False).result()
        return time.perf_counter() - started

    def take(self, pool: mmkv.Pool, name: str, tokens: int) -> tuple[float, list[float], str]:
        """Take a conversation, and check it; the seconds, when each layer was there, and the path."""
        wipe(self.memory, self.rows)
        self.memory.synchronize()
        started = time.perf_counter()
        take = pool.take(name, self.slot)
        layers = [time.perf_counter() - started for _ in take]
        receipt = take.result()
        seconds = time.perf_counter() - started
        self.noise.require(name, self.rows, tokens, "mmkv")
        return seconds, layers, receipt.path


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def larger_than_ram(bench: Bench) -> None:
    """Thirty conversations on a hot tier for ten of them, taken at random."""
    tokens = max(1, bench.tokens // 14)
    size = bench.layout.token_bytes * tokens
    chosen = random.Random(1)
    with bench.pool(_MANY, _MANY / 3, size) as pool:
        for number in track(range(_MANY), "parking", console=console, transient=True):
            bench.park(pool, f"chat-{number}", tokens)
        # So that all its pages are there.
        wipe(bench.memory, bench.rows)
        before, most, wrong, tiers = anonymous_bytes(), 0, 0, {"hot": 0, "path": 0}
        for _ in track(range(2 * _MANY), "taking", console=console, transient=True):
            name = f"chat-{chosen.randrange(_MANY)}"
            tiers["hot" if pool.info(name).hot_bytes >= size else "path"] += 1
            try:
                bench.take(pool, name, tokens)
            except RuntimeError:
                wrong += 1
            most = max(most, anonymous_bytes() - before)
        stats = pool.stats()
        figures = {"takes": 2 * _MANY, "from_hot": tiers["hot"], "from_path": tiers["path"]}
        bench.figure("tiers_wrong", wrong, **figures, lost=_MANY - len(pool), evicted=stats.hot_evictions)
        bench.figure("tiers_memory", most / 1e6, hot_mb=stats.tiers[0].capacity / 1e6)


def cold_takes(bench: Bench) -> None:
    """Takes of what only the disk has, in turn with plain reads. The hot tier has been full before."""
    # Of four, taken in turn, the one that comes next has left a tier for two.
    names = ["a", "b", "c", "d"]
    with bench.pool(len(names), 2.2, bench.bytes) as pool:
        for name in names:
            bench.park(pool, name, bench.tokens)
        pool.flush()
        for name in names:
            bench.take(pool, name, bench.tokens)
        plain = fastest_plain(bench, "read")
        reads, takes, firsts, warm, lines, paths = [], [], [], [], [], set()
        for _ in range(bench.repeats):
            for name in names:
                if pool.info(name).hot_bytes:
                    raise RuntimeError(f"{name!r} is still hot")
                reads.append(plain.read())
                seconds, layers, path = bench.take(pool, name, bench.tokens)
                takes.append(seconds)
                firsts.append(layers[0] / seconds)
                lines.append(layers)
                paths.add(path)
                warm.append(bench.take(pool, name, bench.tokens)[0])
        rate, plain_rate = bench.bytes / median(takes), plain.size / median(reads)
        found = {"gbps": rate / 1e9, "plain_gbps": plain_rate / 1e9, "path": " or ".join(sorted(paths))}
        bench.figure("cold_take", rate / plain_rate, **found, seconds=spread(takes))
        bench.figure("cold_first_layer", median(firsts), layers=len(bench.layout.layers))
        bench.figure("hot_take", bench.bytes / median(warm) / rate, gbps=bench.bytes / median(warm) / 1e9)
        bench.output.update({"cold_lines": sorted(lines, key=lambda line: line[-1])[len(lines) // 2]})
        prefetched(bench, pool, names, median(takes))
        plain.close()


def prefetched(bench: Bench, pool: mmkv.Pool, names: list[str], cold: float) -> None:
    """Takes of what was prefetched before."""
    takes, prefetches = [], []
    for name in names:
        started = time.perf_counter()
        pool.prefetch(name).result()
        prefetches.append(time.perf_counter() - started)
        takes.append(bench.take(pool, name, bench.tokens)[0])
    bench.figure("prefetched_take", cold / median(takes), prefetch_gbps=bench.bytes / median(prefetches) / 1e9)


def spills(bench: Bench) -> None:
    """From the commit of a park until it is synced on the disk, in turn with plain writes and their sync."""
    with bench.pool(3, 3, bench.bytes) as pool:
        for _ in range(2):
            bench.park(pool, "new", bench.tokens)
            pool.flush()
        plain = fastest_plain(bench, "write")
        writes, flushes = [], []
        for _ in range(bench.repeats):
            writes.append(plain.write())
            bench.park(pool, "new", bench.tokens)
            started = time.perf_counter()
            pool.flush()
            flushes.append(time.perf_counter() - started)
        rate, plain_rate = bench.bytes / median(flushes), plain.size / median(writes)
        bench.figure(
            "spill", rate / plain_rate, gbps=rate / 1e9, plain_gbps=plain_rate / 1e9, seconds=spread(flushes)
        )  # fmt: skip
        plain.close()


def beside_the_writer(bench: Bench) -> None:
    """Parks and hot takes while the writer is at work, in turn with such when there is nothing to write."""
    with bench.pool(5, 4.4, bench.bytes) as pool:
        for name in ("hot", "a", "b"):
            bench.park(pool, name, bench.tokens)
            pool.flush()
        bench.take(pool, "hot", bench.tokens)
        wait_until_locked(pool)
        parks: dict[bool, list[float]] = {False: [], True: []}
        takes: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(bench.repeats + 1):
            if turn == 1:
                # The files have grown by now as far as they will, and the maps of them are page-locked.
                parks, takes = {False: [], True: []}, {False: [], True: []}
            for busy in (False, True):
                if busy:
                    bench.park(pool, "b", bench.tokens)
                parks[busy].append(bench.park(pool, "a", bench.tokens))
                if not busy:
                    pool.flush()
                takes[busy].append(bench.take(pool, "hot", bench.tokens)[0])
                written = pool.stats().tiers[0].dirty
                if busy and not written:
                    raise Unmeasurable("the writer was done before the transfers were: choose more --tokens")
                pool.flush()
        for name, seconds in (("park", parks), ("take", takes)):
            alone, beside = median(seconds[False]), median(seconds[True])
            found = {"gbps": bench.bytes / beside / 1e9, "alone_gbps": bench.bytes / alone / 1e9}
            bench.figure(f"{name}_beside_spill", alone / beside, **found)


def reboots(bench: Bench) -> None:
    """The hot directory gone after a flush: what is lost, and how fast the rest is warm again."""
    tokens, count = max(1, bench.tokens // 8), 8
    size = bench.layout.token_bytes * tokens
    path, hot, capacity = bench.disk / "pool", bench.hot / "hot", int((count + 1) * size * 1.06)
    lost, seconds = 0, 0.0
    try:
        with mmkv.Pool.open(path, bench.layout, capacity=2 * capacity, hot=hot, hot_capacity=capacity) as pool:
            for number in range(count):
                bench.park(pool, f"chat-{number}", tokens)
            pool.flush()
        shutil.rmtree(hot)
        started = time.perf_counter()
        with mmkv.Pool.open(path, bench.layout, hot=hot, hot_capacity=capacity, rewarm=True) as pool:
            while pool.stats().bytes_promoted < count * size and time.perf_counter() - started < 60:
                time.sleep(0.005)
            seconds = time.perf_counter() - started
            for number in range(count):
                if f"chat-{number}" not in pool:
                    lost += 1
                else:
                    bench.take(pool, f"chat-{number}", tokens)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(hot, ignore_errors=True)
    bench.figure("reboot_lost", lost, conversations=count, rewarm_s=seconds, rewarm_gbps=count * size / seconds / 1e9)


def kvikio_in_ram(bench: Bench) -> None:
    """Kvikio's own path on files in RAM, beside page-locked memory."""
    if not isinstance(bench.memory, DeviceMemory):
        raise RuntimeError("kvikio moves the arrays of a device")
    path = bench.hot / "kvikio"
    room = LockedRoom(bench.memory, bench.rows, bench.tokens)
    takes, parks, ram_takes, ram_parks, paths = [], [], [], [], set()
    try:
        # A pool for many conversations, whose segments are as long as an engine's are.
        with mmkv.Pool.open(path, bench.layout, capacity=POOL_CONVERSATIONS * bench.bytes, store="direct") as pool:
            for turn in range(bench.repeats + 1):
                parked = bench.park(pool, "chat", bench.tokens)
                taken, _, by = bench.take(pool, "chat", bench.tokens)
                started = time.perf_counter()
                room.out(bench.rows, 0, bench.tokens)
                out = time.perf_counter() - started
                started = time.perf_counter()
                room.back(bench.rows, 0, bench.tokens)
                back = time.perf_counter() - started
                paths.add(by)
                if turn:
                    parks.append(parked)
                    takes.append(taken)
                    ram_parks.append(out)
                    ram_takes.append(back)
                pool.drop("chat")
        path_name = "+".join(sorted(paths))
        bench.figure(
            "kvikio_take", median(ram_takes) / median(takes), gbps=bench.bytes / median(takes) / 1e9, path=path_name
        )
        bench.figure("kvikio_park", median(ram_parks) / median(parks), gbps=bench.bytes / median(parks) / 1e9)
    finally:
        room.free()
        shutil.rmtree(path, ignore_errors=True)


def fastest_plain(bench: Bench, kind: str) -> PlainFiles:
    """Plain files with as many threads as suit the disk best."""
    size = round_up(bench.bytes, 1 << 20)
    best: tuple[float, PlainFiles] | None = None
    for threads in _PLAIN_THREADS:
        plain = PlainFiles(bench.disk / f"plain-{threads}", len(bench.layout.layers), size, threads)
        seconds = min(plain.read() if kind == "read" else plain.write() for _ in range(2))
        if best is None or seconds < best[0]:
            if best is not None:
                best[1].close()
            best = (seconds, plain)
        else:
            plain.close()
    assert best is not None
    return best[1]


MEASURES: dict[str, tuple[Callable[[Bench], None], tuple[str, ...]]] = {
    "larger": (larger_than_ram, ("tiers_wrong", "tiers_memory")),
    "cold": (cold_takes, ("cold_take", "cold_first_layer", "hot_take", "prefetched_take")),
    "spill": (spills, ("spill",)),
    "beside": (beside_the_writer, ("park_beside_spill", "take_beside_spill")),
    "reboot": (reboots, ("reboot_lost",)),
    "kvikio": (kvikio_in_ram, ("kvikio_take", "kvikio_park")),
}


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the conversation; 28,672, with a device 131,072.", show_default=False),
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token in one layer.")] = 816,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pools, on a disk.", show_default=False)
    ] = None,
    hot: Annotated[
        Path | None, typer.Option("--hot", help="Where to make the hot tiers, on a tmpfs.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the slot lies: cpu, or cuda:0 and so on.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="How often each thing is measured.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Only these; any of {', '.join(FIGURES)}.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Add to what the file holds.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.", show_default=False)
    ] = None,
) -> None:
    """Park and take with a disk behind RAM, beside what the disk can do by plain reads and writes."""
    chosen = only or [name for name in FIGURES if name != "kvikio" or device != "cpu"]
    unknown = sorted(set(chosen) - set(FIGURES))
    if unknown:
        raise fail(f"--only {unknown[0]} is unknown: it is one of {', '.join(FIGURES)}")
    require_plots(plot_file)
    tokens = tokens or (28_672 if device == "cpu" else 131_072)
    output = Output(json_file, add=add)
    with (
        temporary_directory(directory or default_disk()) as disk,
        temporary_directory(hot or default_directory()) as ram,
    ):
        media = {"pool": disk, "hot": ram}
        if medium_of(disk).in_ram or not medium_of(ram).in_ram:
            raise fail(f"--dir must lie on a disk and --hot in RAM, not on {medium_of(disk).fs_type} and "
                       f"{medium_of(ram).fs_type}")  # fmt: skip
        memory = memory_of(device)
        layout = layout_of(layers, row_bytes)
        slot = allocate_slot(memory, layout, tokens)
        rows = rows_of(slot.arrays)
        noise = Noise(memory, max(plane.entries * plane.row_bytes for plane in rows))
        size = layout.token_bytes * tokens
        console.print(
            f"{tokens:,} tokens x {layers} layers x {row_bytes} bytes = {size / 1e9:.2f} GB, {medium_of(disk).fs_type} "
            f"behind {medium_of(ram).fs_type}, slot on {device}, {repeats} repeats"
        )
        work = {"layers": layers, "tokens": tokens, "row_bytes": row_bytes, "bytes": size, "device": device}
        output.update({**provenance(device, media), "work": {**work, "repeats": repeats}})
        bench = Bench(memory, layout, slot, rows, tokens, repeats, disk, ram, noise, output)
        for name in FIGURES:
            if name not in chosen:
                continue
            measure, figures = MEASURES[name]
            try:
                measure(bench)
            except Exception as error:
                console.print(f"[red]{name}:[/red] {reason_of(error)}", markup=True)
                output.failed(name, error, figures)
    if plot_file is not None:
        from benchmarks.plots import plot_tiers

        plot_tiers(output.data, plot_file)
    fail_if_parts_did(output)


if __name__ == "__main__":
    typer.run(main)
