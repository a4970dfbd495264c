"""Park and take one conversation with mmkv and with a pool that is only RAM, interleaved in one run.

The RAM pool is the fastest thing that forgets: a dictionary of arrays that were allocated beforehand, copied with NumPy
(for device arrays: page-locked memory, copied with CuPy on one stream). Both pools park the same slot and take it back,
turn about; every take is checked against checksums of what was parked. Each park has new ids, and goes into memory that
has been used before on both sides.

    python benchmarks/pool_vs_ram.py --json figures.json
    python benchmarks/pool_vs_ram.py --device cuda:0 --dir /dev/shm --tokens 131072
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
import xxhash
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mmkv
from mmkv.buffer import allocate_host
from mmkv.medium import available_ram, medium_of

Arrays = Sequence[Mapping[str, Any]]

console = Console()


def layout_of(layers: int, row_bytes: int) -> mmkv.Layout:
    """A layout with so many bytes a token and layer: keys, packed values and scales, as 512, 256 and 48 of 816."""
    scale = row_bytes // 17
    v = (row_bytes - scale) // 3
    sizes = {"k": row_bytes - scale - v, "v": v, "scale": scale}
    planes = {name: mmkv.Plane("uint8", (size,)) for name, size in sizes.items() if size}
    return mmkv.Layout([mmkv.Layer(planes)] * layers, model="pool_vs_ram")


class Memory(Protocol):
    """The kind of memory that slots lie in: how to fill, check and copy it."""

    def allocate_slot(self, layout: mmkv.Layout, tokens: int) -> mmkv.Slot:
        """A slot in this memory."""

    def allocate_parked(self, shape: tuple[int, ...]) -> Any:
        """Host memory that the RAM pool parks an array in."""

    def write(self, array: Any, host: np.ndarray[Any, Any]) -> None:
        """Set an array's bytes."""

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """An array's bytes in host memory."""

    def copy_out(self, arrays: Arrays, parked: Arrays) -> None:
        """Copy a slot to host memory, and wait until it is there."""

    def copy_in(self, parked: Arrays, arrays: Arrays) -> None:
        """Copy host memory to a slot, and wait until it is there."""


class HostMemory:
    """NumPy arrays."""

    def allocate_slot(self, layout: mmkv.Layout, tokens: int) -> mmkv.Slot:
        return mmkv.Slot.allocate(layout, tokens)

    def allocate_parked(self, shape: tuple[int, ...]) -> Any:
        # Aligned as the slot's arrays are, so that neither side has the faster memory.
        return allocate_host(shape, "uint8")

    def write(self, array: Any, host: np.ndarray[Any, Any]) -> None:
        array[:] = host

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def copy_out(self, arrays: Arrays, parked: Arrays) -> None:
        for layer, parked_layer in zip(arrays, parked, strict=True):
            for name, array in layer.items():
                np.copyto(parked_layer[name], array)

    def copy_in(self, parked: Arrays, arrays: Arrays) -> None:
        self.copy_out(parked, arrays)


class DeviceMemory:
    """CuPy arrays on one device, and page-locked host memory."""

    def __init__(self, device: str) -> None:
        import cupy

        self._cupy = cupy
        self._device = device
        cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def allocate_slot(self, layout: mmkv.Layout, tokens: int) -> mmkv.Slot:
        return mmkv.Slot.allocate(layout, tokens, self._device)

    def allocate_parked(self, shape: tuple[int, ...]) -> Any:
        size = int(np.prod(shape))
        memory = self._cupy.cuda.alloc_pinned_memory(size)
        array = np.frombuffer(memory, dtype=np.uint8, count=size).reshape(shape)
        array[:] = 0
        return array

    def write(self, array: Any, host: np.ndarray[Any, Any]) -> None:
        array.set(host)
        self._cupy.cuda.get_current_stream().synchronize()

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array.get())

    def copy_out(self, arrays: Arrays, parked: Arrays) -> None:
        for layer, parked_layer in zip(arrays, parked, strict=True):
            for name, array in layer.items():
                array.get(stream=self._stream, out=parked_layer[name], blocking=False)
        self._stream.synchronize()

    def copy_in(self, parked: Arrays, arrays: Arrays) -> None:
        for layer, parked_layer in zip(arrays, parked, strict=True):
            for name, array in layer.items():
                array.set(parked_layer[name], stream=self._stream)
        self._stream.synchronize()


class Contender(Protocol):
    """A pool in the benchmark."""

    name: str

    def park(self, conversation: str, token_ids: np.ndarray[Any, Any]) -> None:
        """Park the slot, and wait until it is parked."""

    def take(self, conversation: str) -> float:
        """Take the conversation back, and wait until it is there; gives the seconds until the first layer was."""

    def drop(self, conversation: str) -> None:
        """Forget the conversation."""


class RamPool:
    """A dictionary of arrays that were allocated beforehand."""

    name = "ram"

    def __init__(self, memory: Memory, slot: mmkv.Slot, conversations: int) -> None:
        self._memory = memory
        self._arrays = slot.arrays
        self._free: list[Arrays] = [
            [{name: memory.allocate_parked(array.shape) for name, array in layer.items()} for layer in slot.arrays]
            for _ in range(conversations)
        ]
        self._parked: dict[str, Arrays] = {}

    def park(self, conversation: str, token_ids: np.ndarray[Any, Any]) -> None:  # noqa: ARG002
        self._parked[conversation] = self._free.pop()
        self._memory.copy_out(self._arrays, self._parked[conversation])

    def take(self, conversation: str) -> float:
        started = time.perf_counter()
        parked = self._parked[conversation]
        self._memory.copy_in(parked[:1], self._arrays[:1])
        first = time.perf_counter() - started
        self._memory.copy_in(parked[1:], self._arrays[1:])
        return first

    def drop(self, conversation: str) -> None:
        self._free.append(self._parked.pop(conversation))


class MmkvPool:
    """The same slot, parked with mmkv."""

    name = "mmkv"

    def __init__(self, pool: mmkv.Pool, slot: mmkv.Slot) -> None:
        self.pool = pool
        self.paths: set[str] = set()
        self._slot = slot

    def park(self, conversation: str, token_ids: np.ndarray[Any, Any]) -> None:
        receipt = self.pool.park(conversation, self._slot, token_ids).result()
        if receipt.tokens_written != len(token_ids):
            raise typer.Exit(_fail(f"only {receipt.tokens_written} tokens of new ids moved: {receipt}"))
        self.paths.add(receipt.path)

    def take(self, conversation: str) -> float:
        started = time.perf_counter()
        take = self.pool.take(conversation, self._slot)
        take.wait(0)
        first = time.perf_counter() - started
        self.paths.add(take.result().path)
        return first

    def drop(self, conversation: str) -> None:
        self.pool.drop(conversation)


@dataclass(frozen=True)
class Timing:
    """Seconds of one park and the take that followed."""

    park: float
    take: float
    first_layer: float


class Bench:
    """The slot, its bytes, and the order of events."""

    def __init__(self, memory: Memory, slot: mmkv.Slot, layout: mmkv.Layout, tokens: int) -> None:
        self._memory = memory
        self._slot = slot
        self._tokens = tokens
        self.bytes = layout.token_bytes * tokens
        self._random = np.random.default_rng(0)

    def fill(self) -> None:
        """Give the slot new bytes."""
        for layer in self._slot.arrays:
            for array in layer.values():
                host = np.frombuffer(self._random.bytes(array.nbytes), dtype=np.uint8)
                self._memory.write(array, host.reshape(array.shape))

    def wipe(self) -> None:
        """Clear the slot, so that nothing but a take brings its bytes back."""
        for layer in self._slot.arrays:
            for array in layer.values():
                array[:] = 0

    def checksums(self) -> list[bytes]:
        """A checksum of each array of the slot."""
        return [
            xxhash.xxh3_128_digest(self._memory.read(array).reshape(-1).data)
            for layer in self._slot.arrays
            for array in layer.values()
        ]

    def new_ids(self) -> np.ndarray[Any, Any]:
        """Ids that no pool has seen."""
        return self._random.integers(0, 1 << 62, self._tokens, dtype=np.int64)

    def turn(self, contender: Contender, conversation: str) -> Timing:
        """Park the slot under new ids, clear it, take it back, check it, and drop what was parked."""
        ids, before = self.new_ids(), self.checksums()
        started = time.perf_counter()
        contender.park(conversation, ids)
        park = time.perf_counter() - started
        self.wipe()
        started = time.perf_counter()
        first_layer = contender.take(conversation)
        take = time.perf_counter() - started
        if self.checksums() != before:
            raise typer.Exit(_fail(f"{contender.name} gave other bytes than were parked"))
        contender.drop(conversation)
        return Timing(park, take, first_layer)


def _fail(message: str) -> int:
    Console(stderr=True).print(f"[red]error:[/red] {message}", highlight=False)
    return 1


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """A directory that is removed at the end, with what is in it."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="mmkv-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def default_directory() -> Path:
    """A tmpfs where there is one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def require_memory(needed: int) -> None:
    """End the program if so much memory is not to be had."""
    available = available_ram()
    if needed > available:
        message = f"this needs about {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available"
        raise typer.Exit(_fail(f"{message}: choose fewer --tokens"))


def measure(
    layout: mmkv.Layout, tokens: int, directory: Path, memory: Memory, repeats: int
) -> tuple[dict[str, list[Timing]], str]:
    """Both pools' timings of every turn, and the path that mmkv's bytes took."""
    slot = memory.allocate_slot(layout, tokens)
    bench = Bench(memory, slot, layout, tokens)
    capacity = int(2.5 * tokens * (layout.token_bytes + 8)) + (64 << 20)
    with (
        mmkv.Pool.open(directory / "pool", layout, capacity=capacity) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        ours, ram = MmkvPool(pool, slot), RamPool(memory, slot, conversations=1)
        task = progress.add_task("warming up", total=3 + 1 + 2 * repeats)
        # Fills the pool until it has to make room, so that every block has been written once.
        bench.fill()
        for turn in range(3):
            ours.park(f"warm-{turn}", bench.new_ids())
            progress.advance(task)
        for conversation in pool.conversations():
            pool.drop(conversation)
        bench.turn(ram, "warm")
        progress.advance(task)
        ours.paths.clear()
        allocated = pool.stats().allocated
        timings: dict[str, list[Timing]] = {"ram": [], "mmkv": []}
        progress.update(task, description="measuring")
        for repeat in range(repeats):
            bench.fill()
            contenders: list[Contender] = [ram, ours]
            for contender in contenders if repeat % 2 == 0 else reversed(contenders):
                timings[contender.name].append(bench.turn(contender, f"turn-{repeat}"))
                progress.advance(task)
        if pool.stats().allocated != allocated:
            raise typer.Exit(_fail("the pool grew while it was measured: blocks were not all used before"))
        return timings, "+".join(sorted(ours.paths))


def figures(timings: Mapping[str, Sequence[Timing]], path: str, size: int) -> dict[str, dict[str, Any]]:
    """The medians, as they are written to the JSON file."""

    def gbps(name: str, kind: str) -> float:
        seconds: float = statistics.median(getattr(timing, kind) for timing in timings[name])
        return size / seconds / 1e9

    ram = {"take_gbps": gbps("ram", "take"), "park_gbps": gbps("ram", "park")}
    ours: dict[str, Any] = {"take_gbps": gbps("mmkv", "take"), "park_gbps": gbps("mmkv", "park")}
    ours["first_layer_ms"] = 1e3 * statistics.median(timing.first_layer for timing in timings["mmkv"])
    ours["path"] = path
    ratio = {kind: ours[f"{kind}_gbps"] / ram[f"{kind}_gbps"] for kind in ("take", "park")}
    return {"ram": ram, "mmkv": ours, "ratio": ratio}


def show(result: Mapping[str, Mapping[str, Any]], timings: Mapping[str, Sequence[Timing]], size: int) -> None:
    """Print the medians, and the range they come from."""
    table = Table("GB/s", "RAM only", "mmkv", "mmkv / RAM", box=None, header_style="bold")

    def cell(name: str, kind: str) -> str:
        rates = sorted(size / getattr(timing, kind) / 1e9 for timing in timings[name])
        return f"{result[name][f'{kind}_gbps']:.2f} ({rates[0]:.2f} to {rates[-1]:.2f})"

    for kind in ("take", "park"):
        table.add_row(kind, cell("ram", kind), cell("mmkv", kind), f"{result['ratio'][kind]:.2f}")
    console.print(table)
    ours = result["mmkv"]
    console.print(f"first layer after {ours['first_layer_ms']:.2f} ms, path {ours['path']}", highlight=False)


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the conversation.")] = 28672,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token in one layer.")] = 816,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the slot lies: cpu, or cuda:0 and so on.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Parks and takes of each pool.")] = 7,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Park and take one conversation with mmkv and with a pool that is only RAM, interleaved in one run."""
    layout = layout_of(layers, row_bytes)
    size = layout.token_bytes * tokens
    parent = default_directory() if directory is None else directory
    with temporary_directory(parent) as made:
        medium = medium_of(made)
        in_ram = (1 if device == "cpu" else 0) + 1 + (2.5 if medium.in_ram else 0)
        require_memory(int(in_ram * size) + (256 << 20))
        console.print(
            f"{tokens:,} tokens x {layers} layers x {row_bytes} bytes = {size / 1e9:.2f} GB, {medium.fs_type} at "
            f"{parent}, slot on {device}, {repeats} repeats",
            highlight=False,
        )
        memory: Memory = HostMemory() if device == "cpu" else DeviceMemory(device)
        timings, path = measure(layout, tokens, made, memory, repeats)
    result = figures(timings, path, size)
    show(result, timings, size)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
