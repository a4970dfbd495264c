"""Figures of one pool: how soon the first layer is ready, what a turn costs, swaps, and a pool that was reopened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mmkv
from benchmarks.decode import DecodeLoop
from benchmarks.memory import DeviceMemory
from benchmarks.results import median, spread
from benchmarks.rig import Rig
from benchmarks.work import digest, new_ids

__all__ = ["TURN_TOKENS", "WHOLE_FIGURES", "measure_whole"]

TURN_TOKENS = 383
# What --only selects, and the figures of each.
WHOLE_FIGURES = {
    "streaming": ("first_layer", "submit_ms"),
    "delta": ("park_new_ms",),
    "swap": ("swap",),
    "decode": ("decode",),
    "reopened": ("reopened_take",),
}
_CHILD_SECONDS = 120.0


def measure_whole(rig: Rig, chosen: Collection[str]) -> None:
    """Measure the chosen figures on one pool that holds two conversations."""
    wanted = [name for name in WHOLE_FIGURES if name in chosen]
    names = [figure for name in wanted for figure in WHOLE_FIGURES[name]]
    if not wanted:
        return
    with rig.group(*names), rig.pool("whole", rig.layout) as pool:
        rig.noise.write("in", rig.rows, 0, rig.tokens)
        checksum = digest(rig.memory, rig.rows, rig.tokens) if "reopened" in wanted else ""
        rig.park(pool, "in", rig.slot, new_ids(rig.tokens))
        pool.pin("in")
        measures = {"streaming": _streaming, "delta": _delta, "swap": _swap, "decode": _decode}
        for name in wanted:
            if name in measures:
                with rig.group(*WHOLE_FIGURES[name]):
                    measures[name](rig, pool)
        if "reopened" in wanted:
            pool.close()
            with rig.group(*WHOLE_FIGURES["reopened"]):
                _reopened(rig, pool.path, checksum)


def _streaming(rig: Rig, pool: mmkv.Pool) -> None:
    """The first layer, as a consumer's stream sees it and as the host does, and the host's time to submit."""
    memory = rig.memory
    if not isinstance(memory, DeviceMemory):
        raise RuntimeError("a consumer's stream needs a device")
    stream = memory.compute_stream
    ready, on_host, submits = [], [], []
    for _ in range(2 * rig.repeats):
        rig.ram()
        rig.wipe()
        start = memory.mark(stream)
        started = time.perf_counter()
        take = pool.take("in", rig.slot, stream=stream)
        submits.append(time.perf_counter() - started)
        take.wait(0, stream=stream)
        end = memory.mark(stream)
        take.result()
        ready.append(memory.seconds_between(start, end))
        rig.check("in")
        rig.wipe()
        started = time.perf_counter()
        take = pool.take("in", rig.slot, stream=stream)
        take.wait(0)
        on_host.append(time.perf_counter() - started)
        take.result()
    least = rig.layout.layers[0].token_bytes * rig.tokens / rig.take_speed
    copies = len(rig.rows)
    rig.figure(
        "first_layer", median(ready) / least, ms=1e3 * median(ready), host_ms=1e3 * median(on_host),
        bus_ms=1e3 * least, spread_ms=[1e3 * value for value in spread(ready)],
    )  # fmt: skip
    rig.figure(
        "submit_ms", 1e3 * median(submits), copies=copies, spread_ms=[1e3 * value for value in spread(submits)]
    )  # fmt: skip


def _delta(rig: Rig, pool: mmkv.Pool) -> None:
    """Parking a turn's new tokens of a long conversation."""
    turns = rig.repeats + 1
    ids = new_ids(rig.tokens + turns * TURN_TOKENS)
    rig.noise.write("grown", rig.rows, 0, len(ids))
    rig.park(pool, "grown", rig.slot, ids[: rig.tokens])
    times, written, path = [], [], ""
    for turn in range(1, turns + 1):
        tokens = rig.tokens + turn * TURN_TOKENS
        rig.memory.synchronize()
        started = time.perf_counter()
        receipt = pool.park("grown", rig.slot, ids[:tokens]).result()
        times.append(1e3 * (time.perf_counter() - started))
        written.append(receipt.tokens_written)
        path = receipt.path
    rig.wipe()
    pool.take("grown", rig.slot).result()
    rig.noise.require("grown", rig.rows, len(ids), "mmkv")
    pool.drop("grown")
    rig.figure(
        "park_new_ms", median(times), tokens=rig.tokens, new_tokens=TURN_TOKENS, tokens_written=max(written),
        spread_ms=spread(times), path=path,
    )  # fmt: skip


def _swap(rig: Rig, pool: mmkv.Pool) -> None:
    """One conversation out while another comes in; of the first the pool has nothing."""
    times, path = [], ""
    for turn in range(rig.repeats + 1):
        rig.ram()
        rig.noise.forget("out")
        rig.noise.write("out", rig.rows, 0, rig.tokens)
        ids = new_ids(rig.tokens)
        rig.memory.synchronize()
        started = time.perf_counter()
        park, take = pool.swap(rig.slot, leaving="out", leaving_ids=ids, arriving="in")
        parked, taken = park.result(), take.result()
        seconds = time.perf_counter() - started
        if parked.tokens_written != rig.tokens:
            raise RuntimeError(f"only {parked.tokens_written} tokens of the outgoing conversation moved")
        rig.check("in")
        pool.take("out", rig.slot).result()
        rig.check("out")
        pool.drop("out")
        path = "+".join(sorted({parked.path, taken.path}))
        # The first one meets blocks that were never written.
        if turn:
            times.append(seconds)
    speed = 2 * rig.bytes / median(times)
    rig.figure(
        "swap", speed / rig.one_way_speed, gbps=speed / 1e9, one_way_gbps=rig.one_way_speed / 1e9,
        ms=1e3 * median(times), seconds=spread(times), path=path,
    )  # fmt: skip


def _decode(rig: Rig, pool: mmkv.Pool) -> None:
    """What a running take costs an engine that decodes at the same time."""
    if not isinstance(rig.memory, DeviceMemory):
        raise RuntimeError("a decode loop needs a device")
    loop = DecodeLoop(rig.memory)
    found = loop.beside(rig.repeats, rig.bytes, lambda: pool.take("in", rig.slot))
    rig.check("in")
    rig.figure("decode", found.pop("ratio"), **found)


def _reopened(rig: Rig, path: Path, checksum: str) -> None:
    """The first take of new processes, directly after they opened the pool."""
    command = [
        sys.executable, "-m", "benchmarks.reopened", str(path), rig.memory.device, "in", str(rig.tokens), checksum
    ]  # fmt: skip
    found: list[dict[str, Any]] = []
    for _ in range(rig.repeats):
        rig.ram()
        child = subprocess.run(
            command, cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, check=False,
            timeout=_CHILD_SECONDS,
        )  # fmt: skip
        if child.returncode:
            raise RuntimeError(f"the new process failed: {child.stderr.strip()[-300:]}")
        found.append(json.loads(child.stdout.splitlines()[-1]))
    rig.rates(
        "reopened_take", [run["seconds"] for run in found], rig.take_speed, rig.bytes,
        path="+".join(sorted({part for run in found for part in run["path"].split("+")})),
        first_layer_ms=median([run["first_layer_ms"] for run in found]),
        open_ms=median([run["open_ms"] for run in found]),
    )  # fmt: skip
