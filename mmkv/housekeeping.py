"""A thread that looks after a pool a few times a second: deadlines, requests, what the catalog should know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Housekeeping"]

_log = logging.getLogger("mmkv")


class Housekeeping:
    """Calls `tick` every `interval` seconds on a daemon thread until stopped."""

    def __init__(self, tick: Callable[[], None], interval: float) -> None:
        self._tick = tick
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmkv-housekeeping", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failing = False
        while not self._stopping.wait(self._interval):
            try:
                self._tick()
                failing = False
            except Exception:
                # No call owns this: tell once, and go on; the same error meets the next call that needs the catalog.
                if not failing:
                    _log.exception("housekeeping of a pool failed")
                failing = True

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
