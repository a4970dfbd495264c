"""What a benchmark found: figures with their targets, and the JSON file that keeps them."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["TARGETS", "Output", "Target", "Unmeasurable", "median", "reason_of", "said", "spread"]

# Of a smaller conversation, what a call costs beside its copies counts for more than it is meant to.
_LEAST_BYTES = 128 << 20


class Unmeasurable(Exception):
    """A figure that this machine, or so small a size, does not have: nothing failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is to reach.

    Attributes
    ----------
    what : str
        The figure in words.
    bound : str
        `at least`, `at most`, or `reported` where there is no target.
    value : float or None
        The target.
    unit : str
        What follows a value: nothing for a ratio, `x` for a factor, `ms`.
    """

    what: str
    bound: Literal["at least", "at most", "reported"]
    value: float | None = None
    unit: str = ""

    @property
    def counts_errors(self) -> bool:
        """Whether anything but 0 is a failure, at any size."""
        return self.value == 0

    def met(self, value: float, size: float = math.inf) -> bool | None:
        """Whether a value reaches the target; `None` where there is none for conversations of `size` bytes."""
        if self.value is None or (size < _LEAST_BYTES and not self.counts_errors):
            return None
        return value >= self.value if self.bound == "at least" else value <= self.value


# In the order in which people read them.
TARGETS = {
    "take": Target("take of a whole conversation / RAM only", "at least", 0.98),
    "park": Target("park of a whole conversation / RAM only", "at least", 0.98),
    "checked_take": Target("take, checked / without checksums", "at least", 0.97),
    "checked_park": Target("park, with checksums / without", "at least", 0.97),
    "checked_take_ram": Target("take of host arrays, checked / RAM only", "at least", 0.6),
    "checked_park_ram": Target("park of host arrays, with checksums / RAM only", "at least", 0.6),
    "extents_take": Target("take from 64 extents / RAM only", "at least", 0.90),
    "extents_park": Target("park into 64 extents / RAM only", "at least", 0.90),
    "heads_take": Target("take, each of 8 heads a plane / RAM only", "at least", 0.90),
    "heads_park": Target("park, each of 8 heads a plane / RAM only", "at least", 0.90),
    "first_layer": Target("first layer ready / its bytes at the bus's speed", "at most", 1.5, "x"),
    "submit_ms": Target("host time to submit a take of all layers", "at most", 2.0, "ms"),
    "park_new_ms": Target("parking 383 new tokens", "at most", 5.0, "ms"),
    "swap": Target("swap, both conversations' bytes / one-way speed", "at least", 1.7),
    "paged_take": Target("take into pages in random order / one-way speed", "at least", 0.90),
    "paged_park": Target("park from pages in random order / one-way speed", "at least", 0.90),
    "reopened_take": Target("first take of a new process / one-way speed", "at least", 0.5),
    "decode": Target("a decode loop beside a take / alone", "reported"),
    "decode_paged": Target("a decode loop beside a take into pages / alone", "reported"),
    "tax_report": Target("turn tax: the report's way / mmkv", "at least", 20.0, "x"),
    "tax_everything": Target("turn tax: page-locked RAM moving everything / mmkv", "at least", 2.0, "x"),
    "tax_new": Target("turn tax: page-locked RAM moving what is new / mmkv", "reported", None, "x"),
    "tax_swap": Target("turn tax: park and take / swap", "reported", None, "x"),
    "tiers_wrong": Target("30 conversations, a third of them hot: takes with a wrong byte", "at most", 0),
    "tiers_memory": Target("memory that the process took for them, files left out", "reported", None, "MB"),
    "cold_take": Target("take from the disk / a plain O_DIRECT read", "at least", 0.9),
    "cold_first_layer": Target("take from the disk: first layer / the whole", "at most", 1 / 12),
    "hot_take": Target("take from the hot tier / from the disk", "reported", None, "x"),
    "prefetched_take": Target("take of what was prefetched / from the disk", "reported", None, "x"),
    "spill": Target("the writer, synced / a plain O_DIRECT write, synced", "at least", 0.9),
    "park_beside_spill": Target("park while the writer writes / without", "at least", 0.9),
    "take_beside_spill": Target("hot take while the writer writes / without", "at least", 0.9),
    "reboot_lost": Target("conversations lost with the hot files, after a flush", "at most", 0),
    "first_token_streamed": Target(
        "first token, by layer / the larger of computing it and moving its bytes", "at most", 1.15
    ),
    "first_token_again": Target("first token, reading everything again / by layer", "at least", 10.0, "x"),
    "first_token_blocking": Target("first token, taken before computing / by layer", "reported", None, "x"),
    "kvikio_take": Target("kvikio on tmpfs, take / page-locked RAM", "at least", 0.6),
    "kvikio_park": Target("kvikio on tmpfs, park / page-locked RAM", "at least", 0.6),
    "several_take": Target("layers on all GPUs: take / all GPUs' page-locked speed", "at least", 0.95),
    "several_park": Target("layers on all GPUs: park / all GPUs' page-locked speed", "at least", 0.95),
    "several_swap": Target("layers on all GPUs: swap / all GPUs' page-locked speed", "reported"),
    "several_first_layer": Target("layers on all GPUs: first layer of the last GPU / the whole take", "reported"),
    "several_splits_wrong": Target("parked from one split, taken onto another: other bytes", "at most", 0),
    "several_ranks": Target("two ranks at once, both together / one alone", "reported", None, "x"),
    "several_ranks_wrong": Target("two ranks at once: other bytes, or each other's conversations", "at most", 0),
    "several_numa": Target("take, files on the GPU's NUMA node / on another", "reported", None, "x"),
}


def said(name: str, value: float, met: bool | None, details: Mapping[str, Any] | None = None) -> str:
    """A figure in one line of Rich's markup, its target if it is judged by it, and what it is made of."""
    target = TARGETS[name]
    mark = {True: " [green]met[/green]", False: " [yellow]not met[/yellow]", None: ""}[met]
    wanted = "" if met is None else f" ({target.bound} {target.value:g}{target.unit})"
    text = ", ".join(f"{key} {_shown(detail)}" for key, detail in (details or {}).items())
    return f"{target.what}: {value:.3g}{target.unit}{wanted}{mark}" + (f"  [dim]{text}[/dim]" if text else "")


def _shown(detail: object) -> str:
    if isinstance(detail, list):
        return "/".join(map(_shown, detail))
    return f"{detail:.3g}" if isinstance(detail, float) else str(detail)


class Output:
    """The result of a run, written to its file after every step, so that a run that is cut short leaves what it had.

    Parameters
    ----------
    path : Path or None
        The file; without one nothing is written.
    add : bool
        Whether what the file holds is added to instead of replaced.

    Attributes
    ----------
    failures : list of str
        The parts of this run that failed, and why.
    """

    def __init__(self, path: Path | None, *, add: bool = False) -> None:
        self._path = path
        self._noted: set[str] = set()
        self.data: dict[str, Any] = {}
        self.failures: list[str] = []
        if add and path is not None and path.exists():
            self.data = json.loads(path.read_text())

    def update(self, values: dict[str, Any]) -> None:
        """Set keys at the top, dictionaries by merging, and write the file."""
        for key, value in values.items():
            held = self.data.get(key)
            if isinstance(held, dict) and isinstance(value, dict):
                held.update(value)
            else:
                self.data[key] = value
        self.write()

    def figure(self, name: str, value: float, **details: Any) -> bool | None:
        """Note a figure beside its target. Returns whether that is met, as `Target.met` does for this run's work."""
        target = TARGETS[name]
        met = target.met(value, self.data.get("work", {}).get("bytes", math.inf))
        self._note(name, value, met, details)
        if target.counts_errors and not met:
            self.failures.append(f"{target.what}: {value:g}")
        return met

    def failed(self, what: str, error: Exception, figures: Iterable[str] = ()) -> list[str]:
        """Note that a part of the run failed, or is unmeasurable: its figures that were not measured, which it returns.

        The former is one of `failures`.
        """
        reason = reason_of(error)
        missing = [name for name in figures if name not in self._noted]
        for name in missing:
            self._note(name, None, None, {"reason": reason})
        if not isinstance(error, Unmeasurable):
            self.failures.append(f"{what}: {reason}")
        return missing

    def _note(self, name: str, value: float | None, met: bool | None, details: Mapping[str, Any]) -> None:
        self._noted.add(name)
        target = TARGETS[name]
        found = {"value": value, "target": target.value, "bound": target.bound, "met": met}
        self.update({"figures": {name: {**found, "unit": target.unit, "what": target.what, **details}}})

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.data, indent=2) + "\n")
        partial.replace(self._path)


def median(values: Sequence[float]) -> float:
    """The median, as a float."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> list[float]:
    """The least and the greatest."""
    return [float(min(values)), float(max(values))]


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]
