"""Values as people write and read them: sizes, ages, times, and text that cannot reach the terminal's controls."""

from __future__ import annotations

import re
import sys
from datetime import datetime

__all__ = ["age_text", "complain", "count_text", "parse_age", "size_text", "time_text", "visible"]

_MAX_MESSAGE = 2000
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE_STEPS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def visible(text: str) -> str:
    r"""The text with all that a terminal would not print as a character of its own written as an escape.

    Control characters, with them ANSI sequences and line breaks, and characters that turn the direction of writing or
    take no room come out as `\x1b`, `\n`, `\u202e`.

    Examples
    --------
    >>> print(visible("a\x1b[31mb"))
    a\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def count_text(count: int, one: str, many: str | None = None) -> str:
    """A number of things, by what one of them is called, and several if not with an `s`.

    Examples
    --------
    >>> count_text(1, "block"), count_text(2000, "miss", "misses")
    ('1 block', '2,000 misses')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size_text(size: int) -> str:
    """A number of bytes in the largest binary unit that leaves a whole part.

    Examples
    --------
    >>> size_text(19_584_000_000)
    '18.2 GiB'
    """
    if size < 1024:
        return f"{size} B"
    power, value = 0, size / 1024
    # What would be rounded to 1024.0 goes to the next unit.
    while value >= 1023.95 and power + 1 < len(_BINARY):
        power, value = power + 1, value / 1024
    return f"{value:.1f} {_BINARY[power]}"


def age_text(seconds: float) -> str:
    """A span of time in its largest unit, and the next one where the first is below ten.

    Examples
    --------
    >>> age_text(93_784), age_text(42)
    ('1d2h', '42s')
    """
    left = max(0, int(seconds))
    for at, (unit, length) in enumerate(_AGE_STEPS):
        whole, rest = divmod(left, length)
        if not whole:
            continue
        if whole < 10 and at + 1 < len(_AGE_STEPS):
            next_unit, next_length = _AGE_STEPS[at + 1]
            if rest >= next_length:
                return f"{whole}{unit}{rest // next_length}{next_unit}"
        return f"{whole}{unit}"
    return "0s"


def time_text(when: float, now: float) -> str:
    """A moment in local time, and how long ago it was."""
    moment = datetime.fromtimestamp(when).astimezone()
    return f"{moment.isoformat(sep=' ', timespec='seconds')} ({age_text(now - when)} ago)"


def parse_age(text: str) -> float:
    """The seconds that a text such as `7d`, `1d12h` or `90s` means.

    Raises
    ------
    ValueError
        The text is no span of time.
    """
    compact = text.strip().lower()
    if not re.fullmatch(r"(?:\d{1,9}(?:\.\d{1,9})?[smhdw])+", compact, re.ASCII):
        raise ValueError(f"{text!r} is no span of time: write it like 7d, 12h, 30m, 45s or 1d12h")
    return sum(float(number) * _AGE_SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([smhdw])", compact))


def complain(message: str) -> None:
    """Say on the standard error, in one line, what went wrong."""
    text = visible(message)
    print(f"mmkv-inspect: {text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + '...'}", file=sys.stderr)
