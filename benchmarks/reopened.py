"""A new process opens a pool and takes a conversation at once: `python -m benchmarks.reopened`, for `figures`.

Prints one line of JSON: how long it took from `take` to the last byte.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import mmkv
from benchmarks.memory import allocate_slot, memory_of, rows_of
from benchmarks.work import digest


def main(path: Path, device: str, conversation: str, tokens: int, checksum: str) -> None:
    """Open, take, compare with a checksum, and print the times."""
    memory = memory_of(device)
    with mmkv.Pool.open(path, readonly=True) as pool:
        layout = pool.layout
    slot = allocate_slot(memory, layout, tokens)
    memory.synchronize()
    opening = time.perf_counter()
    with mmkv.Pool.open(path) as pool:
        started = time.perf_counter()
        take = pool.take(conversation, slot)
        take.wait(0)
        first = time.perf_counter() - started
        receipt = take.result()
        seconds = time.perf_counter() - started
        if digest(memory, rows_of(slot.arrays), tokens) != checksum:
            raise SystemExit("the new process took other bytes than were parked")
    times = {"open_ms": 1e3 * (started - opening), "first_layer_ms": 1e3 * first, "seconds": seconds}
    print(json.dumps({**times, "path": receipt.path}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
