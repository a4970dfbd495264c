"""Calls and connections that fail when a test wants them to."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import Any


class Fault:
    """Lets the n-th call of a function fail, and counts the calls."""

    def __init__(self, real: Callable[..., Any], at: int | None, fail: Callable[..., Any]) -> None:
        self.real, self.at, self.fail = real, at, fail
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls - 1 == self.at:
            return self.fail(*arguments, **options)
        return self.real(*arguments, **options)


def raising(code: int) -> Callable[..., Any]:
    """A call that the system refuses."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


class BrokenConnection:
    """An SQLite connection whose n-th statement of some kind fails."""

    def __init__(self, real: sqlite3.Connection, statement: str, error: sqlite3.Error) -> None:
        self._real, self._statement, self._error = real, statement, error
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """Fail, or execute."""
        if statement.startswith(self._statement):
            self.failures += 1
            raise self._error
        return self._real.execute(statement, *arguments)

    def executemany(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """Fail, or execute."""
        if statement.startswith(self._statement):
            self.failures += 1
            raise self._error
        return self._real.executemany(statement, *arguments)
