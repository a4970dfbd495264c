"""Sizes and counts as people give them."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex, cast

__all__ = ["as_count", "parse_bytes", "round_up"]

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_bytes(size: int | str, what: str = "size") -> int:
    """Bytes of `"384GiB"`, `"1.5 TB"` or a plain number; `K`, `M`, `G`, `T` alone are powers of 1024.

    Raises
    ------
    ValueError, TypeError
        It is not a positive size; the text names `what`.

    Examples
    --------
    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{what} must be bytes or a text such as '384GiB', not {size!r}")
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{what} must be bytes or a text such as '384GiB', not {size!r}")
        whole, _, fraction = match[1].partition(".")
        value = int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
    if not 0 < value < 1 << 62:
        raise ValueError(f"{what} must be a positive number of bytes, not {size!r}")
    return value


def as_count(value: object, what: str, *, least: int) -> int:
    """An integer of at least `least`, of any integer type but bool.

    Raises
    ------
    TypeError, ValueError
        It is none; the text names `what`.
    """
    if isinstance(value, bool):
        raise TypeError(f"{what} must be an integer, not {value!r}")
    try:
        count = operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {value!r}") from None
    if count < least:
        raise ValueError(f"{what} must be at least {least}, not {count}")
    return count


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple
