"""What a check of a pool finds, and what can be done about it without guessing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["Finding", "Repair", "Severity", "Statement"]

Severity: TypeAlias = Literal["error", "warning", "note"]
Statement: TypeAlias = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Repair:
    """What would make a finding go away.

    Attributes
    ----------
    text : str
        What is done, as one reads it; empty where that is for the plan to say.
    statements : tuple
        Changes of the catalog.
    condemned : tuple of int
        Versions that must not be served.
    trim : bool
        Whether the files are cut to what the catalog lists.
    """

    text: str = ""
    statements: tuple[Statement, ...] = ()
    condemned: tuple[int, ...] = ()
    trim: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes
    ----------
    severity : str
        `error`: bytes are lost, or would be wrong; `warning`: space is lost, or the next opening has to put it right;
        `note`: what a pool in good order may have, too.
    code : str
        What kind of finding it is; never changes.
    text : str
        What was found, with the values.
    advice : str
        What to do.
    repair : Repair or None
        What would repair it; `None` where that would be a guess.
    """

    severity: Severity
    code: str
    text: str
    advice: str
    repair: Repair | None = field(default=None, compare=False)
