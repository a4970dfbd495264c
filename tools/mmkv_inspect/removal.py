"""Dropping conversations: by a request to the pool's owner, or as the owner where there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from mmkv.catalog import Catalog
from mmkv.directory import owner_pid
from mmkv.errors import ConversationNotFound, PoolLocked
from mmkv_inspect.reading import check_directory

__all__ = ["Outcome", "remove"]

_LOOK_SECONDS = 0.05


class Outcome(StrEnum):
    """What became of a conversation that was to go."""

    DROPPED = "dropped"
    GONE = "gone"
    REFUSED = "refused"
    WAITING = "waiting"


def remove(path: Path, elsewhere: Path | None, ids: Sequence[str], patience: float) -> dict[str, Outcome]:
    """Drop conversations, beside a running engine by asking it.

    Parameters
    ----------
    path : Path
        The pool's directory.
    elsewhere : Path or None
        Where its catalog lies, if not there.
    ids : sequence of str
        The conversations.
    patience : float
        How many seconds to wait for the owner at most. Requests that it has not carried out by then stay.

    Returns
    -------
    dict of str to Outcome
        `GONE` for those that another one dropped first, `REFUSED` for those that are still there although the owner
        took the request, `WAITING` for those whose request the owner has not taken yet.
    """
    deadline = time.monotonic() + patience
    outcomes: dict[str, Outcome] = {}
    left = list(dict.fromkeys(ids))
    while left:
        if owner_pid(path) is None:
            try:
                return outcomes | _drop_as_owner(path, elsewhere, left)
            except PoolLocked:
                # Somebody opened it in between.
                pass
        asked = _ask_owner(path, elsewhere, left, deadline)
        outcomes |= asked
        left = [name for name in left if asked[name] is Outcome.WAITING and time.monotonic() < deadline]
    return outcomes


def _drop_as_owner(path: Path, elsewhere: Path | None, ids: Sequence[str]) -> dict[str, Outcome]:
    # The whole library, which commands that only read do without.
    from mmkv.pool import Pool

    outcomes = {}
    # No byte of a conversation moves, so nothing here may look for a GPU.
    with Pool.open(path, catalog=elsewhere, store="posix", threads=1) as pool:
        for name in ids:
            try:
                pool.drop(name)
                outcomes[name] = Outcome.DROPPED
            except ConversationNotFound:
                outcomes[name] = Outcome.GONE
    return outcomes


def _ask_owner(path: Path, elsewhere: Path | None, ids: Sequence[str], deadline: float) -> dict[str, Outcome]:
    """Ask, and wait until all is done, the deadline is over, or the owner has ended: then nothing stays asked."""
    _, file = check_directory(path, elsewhere)
    catalog = Catalog(file)
    try:
        asked = {catalog.add_request("drop", name): name for name in ids}
        while True:
            waiting = {request.id for request in catalog.requests()} & asked.keys()
            owned = owner_pid(path) is not None
            if not waiting or not owned or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_SECONDS)
        if not owned:
            catalog.remove_requests(waiting)
        present = {row.name for row in catalog.load(hashes=False)}
    finally:
        catalog.close()
    return {name: _outcome(number in waiting, name in present) for number, name in asked.items()}


def _outcome(waiting: bool, present: bool) -> Outcome:
    if not present:
        return Outcome.DROPPED
    return Outcome.WAITING if waiting else Outcome.REFUSED
