"""What the system refused, as an error that says what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator

from mmkv.errors import MmkvError, PoolFull

__all__ = ["is_short_of_files", "lacks_files", "refusal", "refusals", "started"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


def refusal(what: str, error: OSError) -> MmkvError:
    """The error for a system call that failed; `what` says what could not be done."""
    if is_short_of_files(error):
        return MmkvError(
            f"{what}: too many open files. A pool keeps one or two open for each layer: raise the limit (ulimit -n)"
        )
    if error.errno in _NO_ROOM:
        return PoolFull(f"{what}: {error.strerror}: free some space")
    return MmkvError(f"{what}: {error.strerror or error}")


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raise a system call's error as what `refusal` makes of it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MmkvError):
            raise
        raise refusal(what, error) from error


def is_short_of_files(error: OSError) -> bool:
    """Whether no file could be opened, whatever it is: that says nothing about the file."""
    return error.errno in _NO_FILES


def started(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that was started.

    Raises
    ------
    MmkvError
        None is to be had.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MmkvError(f"the thread {name!r} cannot be started: {error}") from error
    return thread


def lacks_files(count: int) -> bool:
    """Whether the process, or the system, may not open so many files more, now."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return is_short_of_files(error)
    return False
