"""A pool that ends as a killed process ends it: nothing is brought anywhere, nothing is said, the locks are free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import mmkv
from mmkv.writer import Writer


def crash(pool: mmkv.Pool) -> None:
    """End a pool without closing it. What is under way is waited for: a test says what was down by then."""
    with pool._lock:
        pool._closed = "it crashed"
    pool._traffic.wait_until_quiet()
    if pool._housekeeping is not None:
        pool._housekeeping._stopping.set()
        pool._housekeeping._thread.join()
    pool._writer.stop()
    pool._traffic.wait_until_quiet()
    pool._movers.close()
    if pool._hot is not None and pool._hot_movers is not None:
        pool._hot_movers.close()
        pool._hot.close()
    pool._opened.close()


@contextmanager
def idle_writers() -> Iterator[None]:
    """Pools that are opened within have a writer that does nothing by itself, so that steps are the same each time."""
    with mock.patch.object(Writer, "_run"):
        yield
