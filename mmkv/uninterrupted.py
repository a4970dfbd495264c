"""Steps that a signal must not cut in two, such as a commit: the catalog's part of it, and that of the memory."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["uninterrupted"]

_Result = TypeVar("_Result")


def uninterrupted(step: Callable[[], _Result]) -> _Result:
    """Do a step to its end, and give its result. What a signal's handler raises meanwhile is raised after it.

    Python runs handlers of signals on the main thread alone, between any two instructions: there, the step is done by
    another thread, which costs some 0.1 ms. The main thread must hold no lock that the step takes.
    """
    if threading.current_thread() is not threading.main_thread():
        return step()
    results: list[_Result] = []
    errors: list[BaseException] = []
    interrupts: list[BaseException] = []
    ended = threading.Event()
    # Whoever takes it first decides: the thread that the step is done, or an interrupt that it is not.
    claim = threading.Lock()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            results.append(step())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    try:
        # Not a `Thread`, whose start waits, and can be interrupted after it began.
        _thread.start_new_thread(run, ())
    except RuntimeError:
        # No thread is to be had: better with a risk than not at all.
        return step()
    except BaseException as interrupt:
        if claim.acquire(blocking=False):
            raise
        interrupts.append(interrupt)
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as interrupt:
            interrupts.append(interrupt)
    if interrupts:
        raise interrupts[0]
    if errors:
        raise errors[0]
    return results[0]
