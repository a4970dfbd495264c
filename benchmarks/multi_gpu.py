"""A slot whose layers lie on several GPUs, splits that change between park and take, and ranks with a pool each.

All GPUs of the machine take part, be it one; `--device` names others. What all of them can do together is measured in
the same run: each GPU copies its own layers to and from page-locked memory, all at once. Every take is checked byte by
byte. With a single device the host is the other half of a split.

    python benchmarks/multi_gpu.py --dir /mnt/kv --json several.json
    python benchmarks/multi_gpu.py --device cuda:0 --device cuda:1 --dir /mnt/kv
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.asking import fail_if_parts_did
from benchmarks.contenders import wait_until_locked
from benchmarks.machine import provenance
from benchmarks.memory import DeviceMemory, Memory, PlaneRows, memory_of, rows_of
from benchmarks.results import Output, Unmeasurable, median, reason_of, said
from benchmarks.rig import POOL_CONVERSATIONS, console
from benchmarks.rooms import LockedRoom
from benchmarks.work import Ids, Noise, default_directory, layout_of, new_ids, temporary_directory
from mmkv import device as cuda

RANKS = 2
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@dataclass
class Part:
    """The layers of a slot that lie in one memory."""

    memory: Memory
    rows: list[PlaneRows]
    noise: Noise
    room: LockedRoom | None = None

    @property
    def bytes_a_token(self) -> int:
        """Bytes of a token in these layers."""
        return sum(plane.row_bytes for plane in self.rows)


@dataclass
class Spread:
    """A slot and where its layers lie."""

    slot: mmkv.Slot
    parts: list[Part]
    tokens: int

    def write(self, name: str) -> None:
        """Let the slot hold a conversation's bytes."""
        for part in self.parts:
            with on(part.memory):
                part.noise.write(name, part.rows, 0, self.tokens)

    def wipe(self) -> None:
        """Clear the slot, so that nothing but a take brings its bytes back."""
        for part in self.parts:
            with on(part.memory):
                for plane in part.rows:
                    part.memory.flat(plane.array)[:] = 0
                part.memory.synchronize()

    def is_of(self, name: str) -> bool:
        """Whether the slot holds a conversation's bytes."""
        try:
            for part in self.parts:
                with on(part.memory):
                    part.noise.require(name, part.rows, self.tokens, "mmkv")
        except RuntimeError as error:
            console.print(f"[red]{error}[/red]", markup=True)
            return False
        return True

    def synchronize(self) -> None:
        """Wait for all devices."""
        for part in self.parts:
            part.memory.synchronize()


def on(memory: Memory) -> Any:
    """The device of a memory is the current one within."""
    return cuda.current(memory.ordinal) if isinstance(memory, DeviceMemory) else nullcontext()


def spread(
    layout: mmkv.Layout, memories: Sequence[Memory], where: Sequence[int], tokens: int, noises: Sequence[Noise]
) -> Spread:
    """A slot whose layer `n` lies in `memories[where[n]]`."""
    arrays: list[dict[str, Any]] = []
    for layer, index in zip(layout.layers, where, strict=True):
        with on(memories[index]):
            arrays.append(
                {name: memories[index].allocate((tokens, *plane.shape)) for name, plane in layer.planes.items()}
            )
    rows = rows_of(arrays)
    parts = [
        Part(memory, [plane for plane in rows if where[plane.layer] == index], noises[index])
        for index, memory in enumerate(memories)
        if index in where
    ]
    return Spread(mmkv.Slot(layout, arrays), parts, tokens)


@dataclass
class Bench:
    """What every figure needs."""

    memories: list[Memory]
    noises: list[Noise]
    layout: mmkv.Layout
    tokens: int
    repeats: int
    directory: Path
    output: Output

    @property
    def bytes(self) -> int:
        """Bytes of a conversation."""
        return self.layout.token_bytes * self.tokens

    def halves(self) -> list[int]:
        """Layers in equal shares, the first ones on the first memory."""
        layers = len(self.layout.layers)
        return [layer * len(self.memories) // layers for layer in range(layers)]

    def slot(self, where: Sequence[int]) -> Spread:
        """A slot over the memories; its bytes are those of the same name on every split."""
        return spread(self.layout, self.memories, where, self.tokens, self.noises)

    @contextmanager
    def pool(self, name: str) -> Iterator[mmkv.Pool]:
        """A pool with room for many conversations."""
        capacity = POOL_CONVERSATIONS * self.tokens * (self.layout.token_bytes + 8) + (64 << 20)
        with mmkv.Pool.open(self.directory / name, self.layout, capacity=capacity) as pool:
            yield pool

    def figure(self, name: str, value: float, **details: Any) -> None:
        """Note a figure, and say it."""
        console.print(said(name, value, self.output.figure(name, value, **details), details))


def seconds(work: Callable[[], object]) -> float:
    """The time that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def together(works: Sequence[Callable[[], object]]) -> float:
    """The time that calls take on a thread each, all at once."""
    start = threading.Barrier(len(works) + 1)
    errors: list[Exception] = []

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    start.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if errors:
        raise errors[0]
    return elapsed


def measure_all(bench: Bench) -> None:
    """Park, take and swap of a slot over all memories, beside what those can do together."""
    slot, other = bench.slot(bench.halves()), bench.slot(bench.halves())
    for part in slot.parts:
        with on(part.memory):
            part.room = LockedRoom(part.memory, part.rows, bench.tokens)
    rooms = [(part, part.room) for part in slot.parts if part.room is not None]
    times: dict[str, list[float]] = {name: [] for name in ("ram_take", "ram_park", "take", "park", "swap", "last")}
    layers = len(bench.layout.layers)
    lasts = [next(layer for layer, index in enumerate(bench.halves()) if index == n) for n in range(len(slot.parts))]
    path = ""
    try:
        with bench.pool("all") as pool:
            for turn in range(bench.repeats + 1):
                name, ids = f"turn-{turn}", new_ids(bench.tokens)
                slot.write(name)
                times["ram_park"].append(together([_out(part, room, bench.tokens) for part, room in rooms]))
                times["park"].append(seconds(lambda: pool.park(name, slot.slot, ids).result()))  # noqa: B023
                wait_until_locked(pool)
                slot.wipe()
                started = time.perf_counter()
                take = pool.take(name, slot.slot)
                firsts = []
                for layer in lasts:
                    take.wait(layer)
                    firsts.append(time.perf_counter() - started)
                path = take.result().path
                times["take"].append(time.perf_counter() - started)
                times["last"].append(firsts[-1])
                if not slot.is_of(name):
                    raise RuntimeError(f"a take of {layers} layers on {len(slot.parts)} devices gave other bytes")
                times["ram_take"].append(together([_back(part, room, bench.tokens) for part, room in rooms]))
                times["swap"].append(_swap(bench, pool, slot, other, name, ids, turn))
                pool.drop(name)
    finally:
        for part, room in rooms:
            with on(part.memory):
                room.free()
    # The first turn warms up.
    middle = {name: median(found[1:]) for name, found in times.items()}
    for kind in ("take", "park"):
        speed, ram = bench.bytes / middle[kind], bench.bytes / middle[f"ram_{kind}"]
        each = [part.bytes_a_token * bench.tokens / middle[kind] / 1e9 for part in slot.parts]
        bench.figure(f"several_{kind}", speed / ram, gbps=speed / 1e9, ram_gbps=ram / 1e9, each_gbps=each, path=path)
    one_way = 2 * bench.bytes / (middle["ram_take"] + middle["ram_park"])
    swapped = 2 * bench.bytes / middle["swap"]
    bench.figure("several_swap", swapped / one_way, gbps=swapped / 1e9, one_way_gbps=one_way / 1e9)
    bench.figure("several_first_layer", middle["last"] / middle["take"], ms=1e3 * middle["last"])


def _out(part: Part, room: LockedRoom, tokens: int) -> Callable[[], None]:
    def run() -> None:
        with on(part.memory):
            room.out(part.rows, 0, tokens)

    return run


def _back(part: Part, room: LockedRoom, tokens: int) -> Callable[[], None]:
    def run() -> None:
        with on(part.memory):
            room.back(part.rows, 0, tokens)

    return run


def _swap(bench: Bench, pool: mmkv.Pool, slot: Spread, other: Spread, name: str, ids: Ids, turn: int) -> float:
    """Swap a conversation that the pool has nothing of with one that it has; both are checked."""
    leaving, leaving_ids = f"leaving-{turn}", new_ids(bench.tokens)
    other.write(leaving)
    other.synchronize()
    started = time.perf_counter()
    park, take = pool.swap(other.slot, leaving=leaving, leaving_ids=leaving_ids, arriving=name)
    park.result()
    take.result()
    elapsed = time.perf_counter() - started
    if not other.is_of(name):
        raise RuntimeError("a swap brought other bytes than were parked")
    pool.take(leaving, slot.slot).result()
    if not slot.is_of(leaving):
        raise RuntimeError("a swap parked other bytes than were in the slot")
    pool.drop(leaving)
    del ids
    return elapsed


def measure_splits(bench: Bench) -> None:
    """Park from one split and take onto others."""
    layers, many = len(bench.layout.layers), len(bench.memories)
    splits = {
        "halves": bench.halves(),
        "the other way round": [many - 1 - index for index in bench.halves()],
        "in turns": [layer % many for layer in range(layers)],
        "all on one": [0] * layers,
    }
    wrong, takes = 0, 0
    with bench.pool("splits") as pool:
        for parked, where in splits.items():
            source = bench.slot(where)
            source.write(parked)
            pool.park(parked, source.slot, new_ids(bench.tokens)).result()
        del source
        for onto, where in splits.items():
            target = bench.slot(where)
            for parked in splits:
                target.wipe()
                pool.take(parked, target.slot).result()
                takes += 1
                if not target.is_of(parked):
                    wrong += 1
                    console.print(f"[red]parked from {parked}, taken onto {onto}: other bytes[/red]", markup=True)
    bench.figure("several_splits_wrong", wrong, takes=takes, splits=len(splits))


_RANK = """
import json, sys, time
sys.path.insert(0, {root!r})
import mmkv
from benchmarks import multi_gpu
from benchmarks.contenders import wait_until_locked
from benchmarks.memory import memory_of
from benchmarks.work import Noise, layout_of, new_ids

device, path, layers, row_bytes, tokens, repeats = json.loads(sys.argv[1])
memory, layout = memory_of(device), layout_of(layers, row_bytes)
slot = multi_gpu.spread(layout, [memory], [0] * layers, tokens, [Noise(memory, tokens * row_bytes)])
ids, size = new_ids(tokens), layout.token_bytes * tokens
with mmkv.Pool.open(path, layout, capacity=4 * size + (64 << 20)) as pool:
    slot.write("own")
    pool.park("own", slot.slot, ids).result()
    wait_until_locked(pool)
    pool.take("own", slot.slot).result()
    print("ready", flush=True)
    sys.stdin.readline()
    moved, wrong, started = 0, 0, time.perf_counter()
    for turn in range(repeats):
        slot.wipe()
        moved += pool.take("own", slot.slot).result().bytes
        wrong += not slot.is_of("own")
        moved += pool.park(f"turn-{{turn}}", slot.slot, new_ids(tokens)).result().bytes
        pool.drop(f"turn-{{turn}}")
    elapsed = time.perf_counter() - started
    print(json.dumps([moved, elapsed, wrong, pool.conversations()]), flush=True)
"""


def _ranks(bench: Bench, devices: Sequence[str], row_bytes: int, turn: str) -> tuple[float, int]:
    """Bytes a second of ranks that park and take at once, in a process and a pool each; and how often it went wrong."""
    root = str(Path(__file__).resolve().parent.parent)
    layers = max(1, len(bench.layout.layers) // RANKS)
    work = [layers, row_bytes, bench.tokens, max(2, bench.repeats)]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _RANK.format(root=root),
                json.dumps([device, str(bench.directory / f"{turn}-{rank}"), *work]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]
    lines = []
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank ended with {rank.wait()} before it was ready")
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout is not None
            lines.append(rank.stdout.readline())
            if rank.wait(60):
                raise RuntimeError(f"a rank ended with {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    found = [json.loads(line) for line in lines]
    wrong = sum(one[2] + (one[3] != ["own"]) for one in found)
    return sum(moved / elapsed for moved, elapsed, _, _ in found), wrong


def measure_ranks(bench: Bench, row_bytes: int) -> None:
    """Two processes with a pool each, beside one alone."""
    names = [memory.device for memory in bench.memories if isinstance(memory, DeviceMemory)] or ["cpu"]
    devices = [names[rank % len(names)] for rank in range(RANKS)]
    alone, wrong_alone = _ranks(bench, devices[:1], row_bytes, "alone")
    both, wrong = _ranks(bench, devices, row_bytes, "both")
    bench.figure("several_ranks", both / alone, gbps=both / 1e9, alone_gbps=alone / 1e9, devices=devices)
    bench.figure("several_ranks_wrong", wrong + wrong_alone)


def measure_numa(bench: Bench) -> None:
    """Take from files whose memory lies on the first GPU's node, and on another."""
    nodes = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        raise Unmeasurable(f"this machine has {len(nodes)} NUMA node")
    home = _node_of(bench.memories[0])
    if home is None:
        raise Unmeasurable("the system does not say which NUMA node the GPU is at")
    away = next(node for node in nodes if node != home)
    speeds = {}
    slot = bench.slot([0] * len(bench.layout.layers))
    for node in (home, away):
        _bind(node)
        try:
            with bench.pool(f"node-{node}") as pool:
                slot.write("numa")
                pool.park("numa", slot.slot, new_ids(bench.tokens)).result()
                wait_until_locked(pool)
                times = [seconds(lambda: pool.take("numa", slot.slot).result()) for _ in range(bench.repeats + 1)]
        finally:
            _bind(None)
        speeds[node] = bench.bytes / median(times[1:])
    bench.figure("several_numa", speeds[home] / speeds[away], gbps=speeds[home] / 1e9, away_gbps=speeds[away] / 1e9)


def _node_of(memory: Memory) -> int | None:
    if not isinstance(memory, DeviceMemory):
        return None
    import cupy

    bus = cupy.cuda.runtime.deviceGetPCIBusId(memory.ordinal).lower()
    place = Path(f"/sys/bus/pci/devices/{bus}/numa_node")
    node = int(place.read_text()) if place.exists() else -1
    return None if node < 0 else node


def _bind(node: int | None) -> None:
    """Let this process's new pages, and the files' that it allocates, come from a node; from any with `None`."""
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(0 if node is None else 1 << node)
    arguments = (_MPOL_DEFAULT, None, 0) if node is None else (_MPOL_BIND, ctypes.byref(mask), 64)
    if libc.syscall(_SET_MEMPOLICY[os.uname().machine], *arguments):
        raise OSError(ctypes.get_errno(), f"the kernel does not bind memory to node {node}")


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a conversation; 8,192, with devices 131,072.", show_default=False),
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token in one layer.")] = 816,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pools; a tmpfs if left out.", show_default=False)
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Where layers lie: cpu, cuda:0 and so on; all GPUs if left out.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each thing is measured.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Park and take a conversation whose layers lie on several devices."""
    names = device or _devices()
    on_devices = [name for name in names if name != "cpu"]
    memories = [memory_of(name) for name in names]
    if len(memories) == 1:
        # The host is the other half of a split.
        memories.append(memory_of("cpu"))
    tokens = tokens or (131_072 if on_devices else 8_192)
    layout = layout_of(layers, row_bytes)
    output = Output(json_file)
    with temporary_directory(directory or default_directory()) as made:
        size = layout.token_bytes * tokens
        console.print(
            f"{tokens:,} tokens x {layers} layers x {row_bytes} bytes = {size / 1e9:.2f} GB on {', '.join(names)}, "
            f"{repeats} repeats"
        )
        work = {"layers": layers, "tokens": tokens, "row_bytes": row_bytes, "bytes": size, "devices": names}
        found = provenance(on_devices[0] if on_devices else "cpu", {"pool": made})
        output.update({**found, "work": {**work, "repeats": repeats}})
        noises = same_noises(memories, tokens * max(plane.token_bytes for plane in layout.layers[0].planes.values()))
        # The host's half is for splits: figures of speed are the devices'.
        bench = Bench(memories, noises, layout, tokens, repeats, made, output)
        fast = Bench(memories[: len(names)], noises[: len(names)], layout, tokens, repeats, made, output)
        measures: tuple[tuple[Callable[[], None], tuple[str, ...]], ...] = (
            (lambda: measure_all(fast), ("several_take", "several_park", "several_swap", "several_first_layer")),
            (lambda: measure_splits(bench), ("several_splits_wrong",)),
            (lambda: measure_ranks(fast, row_bytes), ("several_ranks", "several_ranks_wrong")),
            (lambda: measure_numa(fast), ("several_numa",)),
        )
        for measure, figures in measures:
            try:
                measure()
            except Exception as error:
                Console(stderr=True).print(f"[yellow]{figures[0]}:[/yellow] {reason_of(error)}", highlight=False)
                output.failed(figures[0], error, figures)
            for memory in memories:
                if isinstance(memory, DeviceMemory):
                    memory.trim()
    fail_if_parts_did(output)


def same_noises(memories: Sequence[Memory], largest: int) -> list[Noise]:
    """Random bytes in each memory, the same in all: a layer's bytes do not depend on where it lies."""
    first = Noise(memories[0], largest)
    noises = [first]
    for memory in memories[1:]:
        with on(memory):
            noises.append(first.copied(memory))
    return noises


def _devices() -> list[str]:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        Console(stderr=True).print(f"no GPU ({reason_of(error)}): host memory takes part instead", highlight=False)
        return ["cpu"]
    return [f"cuda:{ordinal}" for ordinal in range(count)]


if __name__ == "__main__":
    typer.run(main)
