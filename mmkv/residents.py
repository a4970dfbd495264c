"""Which numbers of the path lie in the hot tier as well, where there, and which of them not yet at the path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmkv.blocks import BlockAllocator, number_extents
from mmkv.geometry import Extent

__all__ = ["Residents"]

_Numbers = npt.NDArray[np.int64]


class Residents:
    """The residents of one kind, blocks or records. The pool's lock guards it.

    A resident has one reference of its hot number. A hot number may stand for two of the path, while rows that were
    appended to it belong to a newer version only.

    Parameters
    ----------
    path, hot : BlockAllocator
        The numbers of the path and of the hot tier.
    """

    def __init__(self, path: BlockAllocator, hot: BlockAllocator) -> None:
        self._path = path
        self._hot = hot
        self._place: _Numbers = np.full(0, -1, dtype=np.int64)
        self._dirty: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        # What lost its last reference at the path is of no use here.
        path.freed.append(self.forget_run)

    def places(self, numbers: _Numbers) -> _Numbers:
        """The hot number of each of `numbers`; -1 where it is not resident."""
        self._cover()
        places: _Numbers = self._place[numbers]
        return places

    def is_dirty(self, numbers: _Numbers) -> npt.NDArray[np.bool_]:
        """Whether the path lacks the bytes of each of `numbers`."""
        self._cover()
        return self._dirty[numbers]

    def admit(self, numbers: _Numbers, hot: _Numbers, *, dirty: bool) -> None:
        """Take in residents, whose hot numbers have a reference each that becomes the residents'."""
        self._cover()
        self._place[numbers] = hot
        self._dirty[numbers] = dirty

    def dirty_at(self, numbers: _Numbers, hot: _Numbers) -> _Numbers:
        """Those of `numbers` that are still at `hot`, and that the path lacks."""
        self._cover()
        same: _Numbers = numbers[(self._place[numbers] == hot) & self._dirty[numbers]]
        return same

    def mark_clean(self, numbers: _Numbers) -> None:
        """The path has the bytes of `numbers`."""
        self._dirty[numbers] = False

    def forget(self, numbers: _Numbers) -> None:
        """Let residents go; hot numbers that nobody else holds become free."""
        hot = self._place[numbers]
        self._place[numbers] = -1
        self._dirty[numbers] = False
        self._hot.release(number_extents(hot))

    def forget_run(self, run: Extent) -> None:
        """Let those of a run of numbers go that are resident."""
        if run.first < len(self._place):
            places = self._place[run.first : run.first + run.blocks]
            self.forget(run.first + np.flatnonzero(places >= 0))

    def evictable(self) -> _Numbers:
        """The residents that could go at no cost: the path has their bytes, and nobody else holds their hot numbers."""
        clean = np.flatnonzero((self._place >= 0) & ~self._dirty)
        places = self._place[clean]
        counts = self._hot.counts
        alone: _Numbers = clean[np.bincount(places, minlength=len(counts))[places] == counts[places]]
        return alone

    @property
    def count(self) -> int:
        """How many residents there are."""
        return int(np.count_nonzero(self._place >= 0))

    @property
    def dirty_count(self) -> int:
        """How many of them the path lacks."""
        return int(np.count_nonzero(self._dirty))

    def all_of(self, *, dirty: bool) -> tuple[_Numbers, _Numbers]:
        """The numbers of all residents that are dirty, or clean, and their hot numbers."""
        numbers = np.flatnonzero((self._place >= 0) & (self._dirty == dirty))
        return numbers, self._place[numbers]

    def _cover(self) -> None:
        missing = len(self._path.counts) - len(self._place)
        if missing > 0:
            self._place = np.concatenate([self._place, np.full(missing, -1, dtype=np.int64)])
            self._dirty = np.concatenate([self._dirty, np.zeros(missing, dtype=bool)])
