"""What a pool's owner notes in the catalog for others: the capacity, itself, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mmkv.catalog import Catalog
from mmkv.errors import PoolCorrupt
from mmkv.info import PoolStats

__all__ = ["Owner", "capacity_of", "noted_of", "owner_of", "stats_of"]

_Record = TypeVar("_Record")

_MAX_INTEGER = 1 << 63
_MAX_TIME = 1e11


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a pool, or that owned it last.

    Attributes
    ----------
    alive : bool
        Whether a process holds the pool's lock now.
    pid : int or None
        Its process id, as its own host or container counts.
    host : str or None
        The host where it runs or ran.
    path : str or None
        The path that device arrays take in it.
    started : float or None
        When it opened the pool, in seconds since the epoch.
    """

    alive: bool
    pid: int | None
    host: str | None
    path: str | None
    started: float | None


def capacity_of(catalog: Catalog) -> int | None:
    """The limit of the files' bytes, or `None` before it was noted.

    Raises
    ------
    PoolCorrupt
        It is no number of bytes.
    """
    noted = catalog.get_property("capacity")
    capacity = _integer(noted)
    if capacity is None and noted is not None:
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: its capacity is {noted!r}")
    return capacity


def owner_of(catalog: Catalog, alive: int | None) -> Owner:
    """The owner; `alive` is the process that holds the lock, if one does.

    Raises
    ------
    PoolCorrupt
        What is noted is no note of an owner.
    """
    noted = catalog.get_property("owner", {})
    if not isinstance(noted, dict):
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: its owner is {noted!r}")
    pid = _integer(noted.get("pid"))
    if alive is not None and alive != pid:
        # A new owner that has not written its note yet.
        return Owner(alive=True, pid=alive, host=None, path=None, started=None)
    host, path = _text(noted.get("host")), _text(noted.get("path"))
    return Owner(alive=alive is not None, pid=pid, host=host, path=path, started=_time(noted.get("started")))


def stats_of(catalog: Catalog) -> PoolStats | None:
    """What the owner said last of itself; `None` where it makes no sense, for nothing depends on it."""
    try:
        return _record(PoolStats, catalog.get_property("stats"))
    except (TypeError, ValueError):
        return None


def noted_of(catalog: Catalog) -> float | None:
    """When the owner said it, in seconds since the epoch; `None` where that is not known."""
    noted = catalog.get_property("stats")
    return _time(noted.get("noted")) if isinstance(noted, dict) else None


def _record(kind: type[_Record], noted: Any) -> _Record:
    """A dataclass of what was noted of its fields."""
    if not isinstance(noted, dict):
        raise ValueError(f"{noted!r} is no {kind.__name__}")
    return kind(**{name: _stat(noted[name], hint) for name, hint in get_type_hints(kind).items() if name in noted})


def _stat(value: Any, hint: Any) -> Any:
    known: Any
    if get_origin(hint) is tuple:
        return tuple(_record(get_args(hint)[0], item) for item in value)
    if get_origin(hint) is Literal:
        known = value if value in get_args(hint) else None
    elif hint is str:
        known = _text(value)
    elif hint is int:
        known = _integer(value)
    elif hint is float:
        known = _time(value)
    else:
        known = value if isinstance(value, dict) and all(map(_is_integer, value.values())) else None
    if known is None:
        raise ValueError(f"{value!r} is no {hint}")
    return known


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_INTEGER else None


def _is_integer(value: Any) -> bool:
    return _integer(value) is not None


def _time(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value <= _MAX_TIME else None
