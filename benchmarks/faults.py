"""Every operation, while a system call fails: what it said, whether everything is whole, whether the next one works.

python benchmarks/faults.py
python benchmarks/faults.py --tiers --markdown faults.md
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.work import default_directory, default_disk, temporary_directory
from mmkv.store import files
from tests.broken import BrokenConnection, Fault, raising
from tests.computed import HYBRID, assert_parked, computed, ids_of, make_slot, park
from tests.mirror import check_pool

KEPT, OTHER = ids_of((1, 1300)), ids_of((3, 900))
GROWN = np.concatenate([KEPT, ids_of((2, 700))])
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 220)


@dataclass
class Setting:
    """A pool with two conversations, and room for more."""

    pool: mmkv.Pool
    options: dict[str, Any]
    scratch: Path

    def reopen(self) -> None:
        """Close the pool and open it again."""
        self.pool.close()
        self.pool = opened(self.options)


def opened(options: dict[str, Any]) -> mmkv.Pool:
    """The pool of a setting."""
    return mmkv.Pool.open(layout=HYBRID, capacity="8MiB", min_free_ram=0, threads=2, **options)


def take(setting: Setting, **options: Any) -> None:
    """Take a conversation and compare it."""
    setting.pool.take("other", make_slot(HYBRID, 1000), **options).result(60)


def swap(setting: Setting) -> None:
    """Swap one that the pool has not for one that it has."""
    ids = ids_of((9, 800))
    slot = computed(HYBRID, np.concatenate([ids, ids_of((9, 700))]))
    for transfer in setting.pool.swap(slot, leaving="left", leaving_ids=ids_of((9, 800)), arriving="other"):
        transfer.result(60)


OPERATIONS: dict[str, Callable[[Setting], Any]] = {
    "park, new": lambda s: park(s.pool, "new", ids_of((5, 3000))),
    "park, grown": lambda s: park(s.pool, "kept", GROWN),
    "park, durable": lambda s: park(s.pool, "kept", GROWN, durable=True),
    "take": take,
    "take, checked": lambda s: take(s, verify="always"),
    "swap": swap,
    "match": lambda s: s.pool.match(KEPT).close(),
    "fork": lambda s: s.pool.fork("kept", "fork"),
    "drop": lambda s: s.pool.drop("other"),
    "pin": lambda s: s.pool.pin("other"),
    "flush": lambda s: s.pool.flush(),
    "prefetch": lambda s: s.pool.prefetch("other").result(60),
    "resize": lambda s: s.pool.resize("16MiB"),
    "close, open": lambda s: s.reopen(),
}


@contextmanager
def failing(where: Any, name: str, fail: Callable[..., Any]) -> Iterator[Callable[[], int]]:
    """The first call of a function fails; gives how often it was called."""
    fault = Fault(getattr(where, name), 0, fail)

    def call(*arguments: Any, **options: Any) -> Any:
        # A function, since some are called as methods.
        return fault(*arguments, **options)

    with mock.patch.object(where, name, call):
        yield lambda: fault.calls


@contextmanager
def catalog_full(setting: Setting) -> Iterator[Callable[[], int]]:
    """No transaction of the catalog can be committed."""
    catalog = setting.pool._catalog
    real = catalog._db
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    full = BrokenConnection(real, "COMMIT", error)
    catalog._db = full  # type: ignore[assignment]
    try:
        yield lambda: full.failures
    finally:
        catalog._db = real


def _half(fd: int, views: list[memoryview], *rest: Any) -> int:
    return os_pwritev(fd, [memoryview(views[0]).cast("B")[: max(1, len(views[0]) // 2)]], *rest)


def _part(fd: int, views: list[memoryview], *rest: Any) -> int:
    return os_preadv(fd, [memoryview(views[0]).cast("B")[: max(1, len(views[0]) // 2)]], *rest)


os_pwritev, os_preadv = os.pwritev, os.preadv


def _no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


FAULTS: dict[str, Callable[[Setting], Any]] = {
    "read: EIO": lambda _: failing(os, "preadv", raising(errno.EIO)),
    "read: EINVAL": lambda _: failing(os, "preadv", raising(errno.EINVAL)),
    "read: a part": lambda _: failing(os, "preadv", _part),
    "read: nothing": lambda _: failing(os, "preadv", lambda *_: 0),
    "write: EIO": lambda _: failing(os, "pwritev", raising(errno.EIO)),
    "write: ENOSPC": lambda _: failing(os, "pwritev", raising(errno.ENOSPC)),
    "write: EINVAL": lambda _: failing(os, "pwritev", raising(errno.EINVAL)),
    "write: a part": lambda _: failing(os, "pwritev", _half),
    "fallocate: ENOSPC": lambda _: failing(files, "_fallocate", lambda *_: errno.ENOSPC),
    "fdatasync: EIO": lambda _: failing(os, "fdatasync", raising(errno.EIO)),
    "open: EMFILE": lambda _: failing(os, "open", raising(errno.EMFILE)),
    "no thread": lambda _: failing(threading.Thread, "start", _no_thread),
    "commit: full": catalog_full,
}


def outcome(operation: str, fault: str, made: Path, ram: Path | None) -> tuple[str, bool]:
    """What an operation said, and whether everything was whole and went on afterwards."""
    options: dict[str, Any] = {"path": made / "pool"}
    if ram is not None:
        options |= {"hot": ram / "hot", "hot_capacity": "3MiB"}
    setting = Setting(opened(options), options, made)
    try:
        park(setting.pool, "kept", KEPT)
        park(setting.pool, "other", OTHER)
        if fault.startswith("fallocate"):
            # Else they make room for what is new, as the least recently used.
            setting.pool.pin("kept")
            setting.pool.pin("other")
        said = "done"
        with FAULTS[fault](setting) as calls:
            try:
                OPERATIONS[operation](setting)
            except mmkv.MmkvError as error:
                said = type(error).__name__
            called = calls()
        whole = _is_whole(setting, operation, fault, said)
    finally:
        try:
            setting.pool.close()
        except mmkv.MmkvError as error:
            # After a sync that failed no later one says anything true, and closing tells so.
            if "earlier" not in str(error):
                raise
    return ("-" if not called and said == "done" else said), whole


def _is_whole(setting: Setting, operation: str, fault: str, said: str) -> bool:
    if setting.pool._closed:
        # Neither closed nor opened as it should: the next opening finds everything.
        setting.pool = opened(setting.options)
    pool = setting.pool
    grown = operation in ("park, grown", "park, durable") and said == "done"
    assert_parked(pool, "kept", GROWN if grown else KEPT)
    if operation != "drop" or said != "done":
        assert_parked(pool, "other", OTHER)
    if "fdatasync" not in fault:
        # What the background writes is held twice meanwhile.
        pool.flush()
        check_pool(pool, [])
        park(pool, "next", ids_of((4, 1000)))
        assert_parked(pool, "next", ids_of((4, 1000)))
        pool.flush()
        check_pool(pool, [])
    return True


def main(
    tiers: Annotated[bool, typer.Option("--tiers", help="With a hot tier.")] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table to this file.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pools; a disk if left out.", show_default=False)
    ] = None,
) -> None:
    """Let each operation meet each fault, and see that everything is whole afterwards."""
    rows: dict[str, list[str]] = {}
    broken: list[str] = []
    pairs = [(operation, fault) for operation in OPERATIONS for fault in FAULTS]
    for operation, fault in track(pairs, "faults", console=console, transient=True):
        with temporary_directory(directory or default_disk()) as made, temporary_directory(default_directory()) as ram:
            try:
                said, _ = outcome(operation, fault, made, ram if tiers else None)
            except (AssertionError, OSError, mmkv.MmkvError, RuntimeError) as error:
                said = "BROKEN"
                broken.append(f"{operation}, {fault}: {type(error).__name__}: {error}")
        rows.setdefault(operation, []).append(said)
    table = Table("", *FAULTS)
    for operation, cells in rows.items():
        table.add_row(operation, *cells)
    console.print(table)
    if markdown is not None:
        lines = [f"| | {' | '.join(FAULTS)} |", f"| --- |{' --- |' * len(FAULTS)}"]
        lines += [f"| {operation} | {' | '.join(cells)} |" for operation, cells in rows.items()]
        markdown.write_text("\n".join(lines) + "\n")
    for line in broken:
        console.print(f"[red]{line}[/red]", markup=True)
    console.print(f"faults: {len(pairs)} pairs, {len(broken)} left something broken")
    raise typer.Exit(int(bool(broken)))


if __name__ == "__main__":
    typer.run(main)
