"""A stand-in for a store whose hardware hangs, or fails at a chosen layer, as long as a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mmkv.store.contract import Gate, LayerCopies, Progress
from mmkv.store.posix import PosixStore


class HangingStore(PosixStore):
    """Moves nothing before `let_go`, and fails at `fail_at` in the direction `fails`."""

    hangs = False
    fails: str | None = None
    fail_at = 0

    def __init__(self, threads: int, *, disk: bool = False) -> None:
        super().__init__(threads, disk=disk)
        self.freed = threading.Event()
        self.waiting = 0

    def read(
        self, layers: Sequence[LayerCopies], progress: Progress, after: Any = (), gate: Gate | None = None
    ) -> None:
        """Read, when it is let go."""
        self._start("read", lambda p: PosixStore.read(self, layers, p, after, gate), progress)

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Any = ()) -> None:
        """Write, when it is let go."""
        self._start("write", lambda p: PosixStore.write(self, layers, p, after), progress)

    def _start(self, direction: str, move: Any, progress: Progress) -> None:
        if direction == self.fails:
            progress = _Failing(progress, self.fail_at)
        if not self.hangs:
            move(progress)
            return
        self.waiting += 1
        freed = self.freed

        def later() -> None:
            freed.wait(60)
            move(progress)

        threading.Thread(target=later, daemon=True).start()

    def hang(self) -> None:
        """Let what comes from now on wait."""
        self.hangs, self.freed = True, threading.Event()

    def let_go(self) -> None:
        """Let what hangs go on, and hang no more."""
        self.hangs = False
        self.freed.set()


class _Failing:
    """Progress that turns the landing of one layer into a failure."""

    def __init__(self, progress: Any, layer: int) -> None:
        self._progress = progress
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)

    def landed(self, layer: int) -> None:
        """Fail at the chosen layer."""
        if layer == self._layer:
            self._progress.failed(OSError(5, f"layer {layer} is broken"))
        else:
            self._progress.landed(layer)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools that are opened from now on move host arrays by a `HangingStore`."""
    monkeypatch.setattr("mmkv.movers.PosixStore", HangingStore)
