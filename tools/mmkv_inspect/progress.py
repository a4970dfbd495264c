"""How far a long command is, on a terminal."""

from __future__ import annotations

import sys
import time

from mmkv_inspect.text import size_text

__all__ = ["Meter"]

_SECONDS = 0.2


class Meter:
    """One line on the standard error that is written over, where that is a terminal; a context manager.

    Parameters
    ----------
    what : str
        What is done to the bytes, such as `read`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last = 0.0
        self._width = 0

    def show(self, done: int, whole: int) -> None:
        """So many bytes are done, of so many."""
        now = time.monotonic()
        if not self._shown or (now - self._last < _SECONDS and done < whole):
            return
        self._last = now
        rate = done / max(now - self._started, 1e-9) / 1e9
        share = 100 * done // max(whole, 1)
        text = f"{self._what} {size_text(done)} of {size_text(whole)}, {share} %, {rate:.2f} GB/s"
        self._width = max(self._width, len(text))
        print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
