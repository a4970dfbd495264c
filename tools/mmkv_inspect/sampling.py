"""What a pool's owner does at this moment, as it notes it in the catalog about once a second, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mmkv.directory import owner_pid
from mmkv.info import PoolStats, TransferKind
from mmkv_inspect.notes import Owner, noted_of, owner_of, stats_of
from mmkv_inspect.reading import check_directory, open_catalog, require_same_pool

__all__ = ["Rates", "Sample", "State", "rates_between", "read_sample"]

# While transfers are under way the figures change, and are noted, every second.
_STALE_SECONDS = 5.0
_NOTED_EVERY = 1.0


class State(StrEnum):
    """What a sample is worth."""

    LIVE = "live"
    SILENT = "silent"
    STALE = "stale"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Sample:
    """What the owner noted last, read without looking at the conversations.

    Attributes
    ----------
    path : Path
        The pool's directory.
    model : str
        The model that it is of.
    owner : Owner
        Who owns it, or owned it last.
    stats : PoolStats or None
        The owner's figures.
    noted : float or None
        When it noted them, in seconds since the epoch.
    requests : int
        Requests that wait for it.
    now : float
        When all this was read.
    """

    path: Path
    model: str
    owner: Owner
    stats: PoolStats | None
    noted: float | None
    requests: int
    now: float

    @property
    def age(self) -> float | None:
        """Seconds since the owner noted the figures. Those of an owner that does nothing stay as they are."""
        return None if self.noted is None else max(0.0, self.now - self.noted)

    @property
    def state(self) -> State:
        """`GONE` without an owner, `SILENT` before it noted anything, `STALE` if it should have since."""
        if not self.owner.alive:
            return State.GONE
        if self.stats is None or self.noted is None or self.noted < (self.owner.started or 0):
            return State.SILENT
        overdue = self.now - self.noted > _STALE_SECONDS
        return State.STALE if self.stats.under_way and overdue else State.LIVE


def read_sample(path: Path, elsewhere: Path | None = None) -> Sample:
    """Read what the owner noted last; see `read_pool`. Costs some milliseconds, however much is parked.

    Raises
    ------
    MmkvError
        There is no pool, it may not be read, or what it says makes no sense.
    """
    description, file = check_directory(path, elsewhere)
    catalog = open_catalog(file)
    try:
        require_same_pool(path, description, catalog)
        pid = owner_pid(path)
        with catalog.snapshot():
            owner, stats, noted = owner_of(catalog, pid), stats_of(catalog), noted_of(catalog)
            requests = len(catalog.requests())
    finally:
        catalog.close()
    return Sample(path, description.layout.model, owner, stats, noted, requests, time.time())


@dataclass(frozen=True, slots=True)
class Rates:
    """What the owner did between two samples, a second; bytes are counted as they move, not when a transfer ends."""

    parks: float
    takes: float
    hits: float
    misses: float
    evictions: float
    expirations: float
    failures: float
    spills: float
    promotions: float
    bytes_parked: float
    bytes_taken: float
    bytes_spilled: float
    bytes_promoted: float


_MOVING: dict[str, TransferKind] = {
    "bytes_parked": "park",
    "bytes_taken": "take",
    "bytes_spilled": "spill",
    "bytes_promoted": "prefetch",
}


def rates_between(before: Sample, after: Sample) -> Rates | None:
    """The rates between two samples of one owner; `None` where they cannot tell."""
    same_owner = (before.owner.pid, before.owner.started) == (after.owner.pid, after.owner.started)
    if not same_owner or {before.state, after.state} != {State.LIVE}:
        return None
    assert before.stats is not None
    assert after.stats is not None
    # Nothing was noted while nothing changed: the earlier figures held until shortly before the later ones.
    assert before.noted is not None
    assert after.noted is not None
    seconds = after.noted - max(before.noted, before.now - _NOTED_EVERY)
    if seconds <= 0:
        return Rates(**dict.fromkeys(Rates.__slots__, 0.0))
    # What ends in quarantine is no longer under way and not booked yet: no rate is below zero.
    counts = {name: max(0, _count(after.stats, name) - _count(before.stats, name)) for name in Rates.__slots__}
    return Rates(**{name: count / seconds for name, count in counts.items()})


def _count(stats: PoolStats, name: str) -> int:
    count: int = getattr(stats, name)
    if name in _MOVING:
        count += sum(transfer.bytes for transfer in stats.under_way if transfer.kind == _MOVING[name])
    return count
