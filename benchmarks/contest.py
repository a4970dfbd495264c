"""The contest: every pool parks the same slot and takes it back, turn about, and every take is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import Progress

import mmkv
from benchmarks.contenders import Contender, MmkvPool, RamPool
from benchmarks.results import median, reason_of, spread
from benchmarks.rig import Rig, console
from benchmarks.rooms import PageableRoom
from benchmarks.savers import SAVERS
from benchmarks.work import new_ids
from mmkv.medium import available_ram

__all__ = ["CONTENDERS", "TITLES", "Contest", "Timing", "run_contest", "summary", "table_of"]

TITLES = {
    "ram": "RAM only, page-locked",
    "mmkv": "mmkv",
    "mmkv_checked": "mmkv, every take checked",
    "mmkv_unchecked": "mmkv without checksums",
    "ram_pageable": "RAM only, pageable, as the bug report's engine does it",
    "mmkv_direct": "mmkv through kvikio, in RAM",
    "mmkv_disk": "mmkv through kvikio, on a disk, cold",
    "safetensors": "safetensors, in RAM",
    "torch": "torch.save and torch.load(mmap=True), in RAM",
    "fastsafetensors": "fastsafetensors, in RAM",
}
# Conversations' worth of memory that each takes in RAM; `ram` is the rig's own.
_VERIFY: dict[str, Literal["always", "first", "never"]] = {"mmkv_checked": "always", "mmkv_unchecked": "never"}
# By the store that suits, and not through kvikio whatever lies there.
_BY_CHOICE = ("mmkv", "mmkv_checked", "mmkv_unchecked")
_MEMORY = {
    "ram": 0.0, "mmkv": 2.5, "mmkv_checked": 2.5, "mmkv_unchecked": 2.5, "ram_pageable": 1.0, "mmkv_direct": 2.5,
    "mmkv_disk": 0.0,
}  # fmt: skip
_SAVERS_MEMORY = 2.0
CONTENDERS = tuple(TITLES)
# The first two decide; the others are slow, and take part in so many rounds.
_SLOW_ROUNDS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one park and the take that followed."""

    park: float
    take: float
    first_layer: float | None


class Contest:
    """The contenders that are still in it, and what each has done."""

    def __init__(self, rig: Rig, disk: Path) -> None:
        self.rig = rig
        self.disk = disk
        self.timings: dict[str, list[Timing]] = {}
        self.paths: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self._in: dict[str, Contender] = {}

    def title(self, name: str) -> str:
        """A contender's name for people."""
        return "RAM only" if name == "ram" and not self.rig.memory.on_device else TITLES[name]

    def build(self, names: Sequence[str]) -> None:
        """Make contenders, one after the other; who cannot be made is out."""
        for name in names:
            try:
                self._in[name] = self._make(name)
            except Exception as error:
                self._out(name, error)

    def _make(self, name: str) -> Contender:
        rig = self.rig
        if name == "ram":
            path = "page-locked" if rig.memory.on_device else "numpy"
            return RamPool(name, path, rig.room, rig.rows, rig.tokens)
        if name == "ram_pageable":
            return RamPool(name, "pageable", PageableRoom(rig.memory), rig.rows, rig.tokens)
        if name in SAVERS:
            return SAVERS[name](rig.directory / name, rig.memory, rig.rows, rig.tokens)
        if name not in _BY_CHOICE and not rig.memory.on_device:
            raise RuntimeError("kvikio moves device arrays: choose --device cuda:0")
        store: Literal["auto", "direct"] = "auto" if name in _BY_CHOICE else "direct"
        path_of = {"mmkv_disk": self.disk}.get(name, rig.directory) / name
        # On the host the pool is full after the warm-up, so that every block has been written once.
        capacity = rig.capacity if rig.memory.on_device else self._tight_capacity()
        verify = _VERIFY.get(name, "first")
        pool = mmkv.Pool.open(path_of, rig.layout, capacity=capacity, store=store, verify=verify)
        ours = MmkvPool(name, pool, rig.slot, rig.tokens, cold=name == "mmkv_disk")
        try:
            ours.warm_up(2 if name in _BY_CHOICE and rig.memory.on_device else 1 if rig.memory.on_device else 3)
        except BaseException:
            pool.close()
            raise
        return ours

    def _tight_capacity(self) -> int:
        return int(2.5 * self.rig.tokens * (self.rig.layout.token_bytes + 8)) + (64 << 20)

    def _out(self, name: str, error: Exception) -> None:
        self.reasons[name] = reason_of(error)
        console.print(f"[red]{self.title(name)}:[/red] {self.reasons[name]}", markup=True)
        contender = self._in.pop(name, None)
        if contender is not None:
            self._close(contender)

    def _close(self, contender: Contender) -> None:
        # The room belongs to the rig.
        if contender.name != "ram":
            contender.close()

    def rounds(self, count: int, advance: Callable[[], None]) -> None:
        """So many turns of each contender, interleaved; the order turns round each time."""
        for turn in range(count):
            if self.rig.bus is not None:
                self.rig.bus.measure()
            self.rig.noise.forget("slot")
            self.rig.noise.write("slot", self.rig.rows, 0, self.rig.tokens)
            contenders = list(self._in.values())
            for contender in contenders if turn % 2 == 0 else reversed(contenders):
                if turn < _SLOW_ROUNDS or contender.name in ("ram", *_BY_CHOICE):
                    try:
                        self.timings.setdefault(contender.name, []).append(self._turn(contender, f"turn-{turn}"))
                    except Exception as error:
                        self._out(contender.name, error)
                        self.rig.noise.write("slot", self.rig.rows, 0, self.rig.tokens)
                advance()

    def _turn(self, contender: Contender, conversation: str) -> Timing:
        """Park the slot under new ids, clear it, take it back, check it, and drop what was parked."""
        rig, ids = self.rig, new_ids(self.rig.tokens)
        rig.memory.synchronize()
        started = time.perf_counter()
        contender.park(conversation, ids)
        park = time.perf_counter() - started
        contender.settle()
        rig.wipe()
        started = time.perf_counter()
        first_layer = contender.take(conversation)
        take = time.perf_counter() - started
        rig.check("slot", contender.name)
        contender.drop(conversation)
        self.paths[contender.name] = contender.path
        return Timing(park, take, first_layer)

    def close(self) -> None:
        """Let everybody go."""
        for contender in self._in.values():
            self._close(contender)
        self._in.clear()


def run_contest(rig: Rig, disk: Path, names: Sequence[str], report: Callable[[Contest], None]) -> Contest:
    """All contenders together where memory allows, else RAM and mmkv first and the others one by one."""
    contest = Contest(rig, disk)
    need = sum(_MEMORY.get(name, _SAVERS_MEMORY) for name in names) * rig.bytes
    together = need < 0.8 * available_ram()
    first = [name for name in names if together or name in ("ram", *_BY_CHOICE)]
    groups = [first, *([name] for name in names if name not in first)]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=rig.repeats * len(names))
        try:
            for group in filter(None, groups):
                contest.build(group)
                allocated = _allocated(contest)
                contest.rounds(rig.repeats, lambda: progress.advance(task))
                if not rig.memory.on_device and _allocated(contest) not in (allocated, None):
                    raise RuntimeError("the pool grew while it was measured: blocks were not all used before")
                contest.close()
                report(contest)
        finally:
            contest.close()
    return contest


def _allocated(contest: Contest) -> int | None:
    ours = contest._in.get("mmkv")
    return ours.pool.stats().allocated if isinstance(ours, MmkvPool) else None


def rates(timings: Sequence[Timing], path: str, size: int) -> dict[str, Any]:
    """One contender's medians, as they are written to the JSON file."""
    parks, takes = [timing.park for timing in timings], [timing.take for timing in timings]
    found: dict[str, Any] = {"take_gbps": size / median(takes) / 1e9, "park_gbps": size / median(parks) / 1e9}
    firsts = [timing.first_layer for timing in timings if timing.first_layer is not None]
    if firsts:
        found["first_layer_ms"] = 1e3 * median(firsts)
    found["path"] = path
    found["take_range_gbps"] = [size / seconds / 1e9 for seconds in reversed(spread(takes))]
    found["park_range_gbps"] = [size / seconds / 1e9 for seconds in reversed(spread(parks))]
    found["rounds"] = len(timings)
    return found


def table_of(contest: Contest, size: int) -> dict[str, dict[str, Any]]:
    """Every contender's medians, or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        if contest.timings.get(name):
            found[name] = {"title": contest.title(name), **rates(contest.timings[name], contest.paths[name], size)}
        if name in contest.reasons:
            found[name] = {**found.get(name, {"title": contest.title(name)}), "reason": contest.reasons[name]}
    return found


def summary(contenders: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The two that matter, and their ratio."""
    both = {name: contenders.get(name, {}) for name in ("ram", "mmkv")}
    keys = {"ram": ("take_gbps", "park_gbps"), "mmkv": ("take_gbps", "park_gbps", "first_layer_ms", "path")}
    found: dict[str, Any] = {
        name: {key: both[name][key] for key in wanted} for name, wanted in keys.items() if "take_gbps" in both[name]
    }
    if len(found) == 2:
        found["ratio"] = {
            kind: found["mmkv"][f"{kind}_gbps"] / found["ram"][f"{kind}_gbps"] for kind in ("take", "park")
        }
    return found
