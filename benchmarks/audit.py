"""Read back a parked pool with `mmkv-inspect verify` and, turn about, its files without looking at them.

python benchmarks/audit.py
python benchmarks/audit.py --size 1GB --dir /mnt/disk
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.results import Output, median
from benchmarks.rig import console
from benchmarks.work import default_directory, layout_of, new_ids, temporary_directory
from mmkv.audit import audit_pool
from mmkv.audit_plan import PIECE_BYTES
from mmkv.buffer import allocate_host
from mmkv.medium import available_ram, medium_of
from mmkv.sizes import parse_bytes
from mmkv.store.files import PoolFile

_TOKENS = 4096


def fill(pool: mmkv.Pool, size: int) -> None:
    """Park conversations of random bytes until there are so many."""
    slot = mmkv.Slot.allocate(pool.layout, _TOKENS)
    random = np.random.default_rng()
    for layer in slot.arrays:
        for array in layer.values():
            array[...] = random.integers(0, 256, array.shape, dtype=np.uint8)
    for number in range(-(-size // (_TOKENS * pool.layout.token_bytes))):
        pool.park(f"chat-{number}", slot, new_ids(_TOKENS)).result()


def plain_read(path: Path, threads: int) -> float:
    """The speed of reading the layer files of a pool as they are, in bytes a second."""
    on_disk = not medium_of(path).in_ram
    files = [PoolFile(file, 4096, readonly=True, unbuffered=on_disk) for file in sorted(path.glob("layers/*.kv"))]
    pieces = iter([(file, at) for file in files for at in range(0, file.size, PIECE_BYTES)])
    lock = threading.Lock()

    def read() -> None:
        buffer = allocate_host((PIECE_BYTES,), "uint8").data
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            file, at = piece
            file.read(buffer[: min(PIECE_BYTES, file.size - at)], at)

    running = [threading.Thread(target=read) for _ in range(threads)]
    size, started = sum(file.size for file in files), time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seconds = time.perf_counter() - started
    for file in files:
        file.close()
    return size / seconds


def main(
    size: Annotated[str, typer.Option(help="How much is parked.")] = "4GB",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="How many read at once; of a disk, give 16.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="How often each way.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Read back a parked pool with `mmkv-inspect verify` and, turn about, its files without looking at them."""
    wanted = parse_bytes(size, "--size")
    parent = default_directory() if directory is None else directory
    if medium_of(parent).in_ram and available_ram() < 1.2 * wanted:
        raise typer.BadParameter(f"--size {size} needs {1.2 * wanted / 1e9:.1f} GB of RAM there")
    output = Output(json_file, add=False)
    with temporary_directory(parent) as made:
        layout = layout_of(48, 816)
        with mmkv.Pool.open(made / "pool", layout, capacity=int(1.1 * wanted) + (64 << 20), min_free_ram=0) as pool:
            fill(pool, wanted)
        checked, plain = [], []
        for _ in range(repeats):
            found = audit_pool(made / "pool", threads=threads)
            if found.corrupt or found.unverified:
                raise RuntimeError(f"a whole pool is found to be broken: {found}")
            checked.append(found.bytes / found.seconds)
            plain.append(plain_read(made / "pool", threads))
        ours, others = median(checked) / 1e9, median(plain) / 1e9
        console.print(
            f"verify: {ours:.2f} GB/s of {found.bytes / 1e9:.2f} GB on {medium_of(parent).fs_type}; a plain read of "
            f"the files: {others:.2f} GB/s; ratio {ours / others:.2f}, {threads} threads"
        )
        output.update({"bytes": found.bytes, "verify_gbps": ours, "read_gbps": others, "threads": threads})


if __name__ == "__main__":
    typer.run(main)
