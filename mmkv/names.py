"""Ids, texts and paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["as_path", "as_text", "conversation_id"]

_MAX_TEXT = 512


def conversation_id(value: object) -> str:
    """The id of a conversation: 1 to 512 characters.

    Raises
    ------
    TypeError, ValueError
        It is none.
    """
    return as_text(value, "a conversation's id", least=1)


def as_text(value: object, what: str, *, least: int) -> str:
    """A string of `least` to 512 characters.

    Raises
    ------
    TypeError, ValueError
        It is none; the text names `what`.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {value!r}")
    if not least <= len(value) <= _MAX_TEXT:
        shown = value if len(value) <= 40 else value[:40] + "..."
        raise ValueError(f"{what} has {least} to {_MAX_TEXT} characters, not {len(value)}: {shown!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {value!r} is no valid Unicode: {error.reason}") from error
    return value


def as_path(value: object, what: str) -> Path:
    """An absolute path.

    Raises
    ------
    TypeError, ValueError
        It is none; the text names `what`.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{what} must be text or a path, not {value!r}")
    if "\0" in path:
        raise ValueError(f"{what} has a null character: {path!r}")
    return Path(os.path.abspath(path))
