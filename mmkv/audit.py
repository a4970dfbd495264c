"""Reading back all that is parked, and comparing it with its checksums: offline, or beside the pool's owner."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from mmkv.audit_plan import PIECE_BYTES, Known, Piece, known_of, locate, pieces_of, tiers_of
from mmkv.buffer import allocate_host
from mmkv.catalog import Catalog
from mmkv.checksum import crc32c
from mmkv.directory import Description, OwnerLock, catalog_file, prepare, read_description
from mmkv.errors import PoolLocked
from mmkv.medium import medium_of
from mmkv.sizes import round_up
from mmkv.space import Kind
from mmkv.unit_table import Bad, put_bad
from mmkv.units import Columns

__all__ = ["Audit", "Corrupt", "audit_pool"]

_LOOKS = 5
_LEAST_DISK_THREADS = 16
# Kind, number, column, tier.
_Place: TypeAlias = tuple[Kind, int, int, str]


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A unit whose bytes are not those that were parked.

    Attributes
    ----------
    conversations : tuple of str
        Who holds it.
    kind, number : str and int
        The block, or the record of a checkpoint.
    layer, plane : int and str
        The unit; the layer of the ids is -1.
    tokens : tuple of int
        The tokens `[first, end)` that it covers in the first of the conversations.
    tier : str
        In which tier: `path` or `hot`.
    """

    conversations: tuple[str, ...]
    kind: Kind
    number: int
    layer: int
    plane: str
    tokens: tuple[int, int]
    tier: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found.

    Attributes
    ----------
    conversations : int
        How many were looked at.
    bytes, seconds : int and float
        What was read, and how long that took.
    unverified : int
        Blocks and checkpoints that have no checksums.
    quarantined : int
        Those that were in quarantine before.
    lost : int
        Those whose bytes were only in a hot tier that is gone.
    corrupt : tuple of Corrupt
        What differs.
    """

    conversations: int
    bytes: int
    seconds: float
    unverified: int
    quarantined: int
    lost: int
    corrupt: tuple[Corrupt, ...]

    @property
    def gbps(self) -> float:
        """Bytes over seconds, in 10**9 bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


def audit_pool(
    path: Path,
    names: Collection[str] | None = None,
    *,
    elsewhere: Path | None = None,
    threads: int | None = None,
    quarantine: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Audit:
    """Read back what is parked and compare it with its checksums; in a hot tier, too.

    Locks nothing, and what the owner changed meanwhile is looked at again.

    Parameters
    ----------
    path : Path
        The pool's directory.
    names : collection of str, optional
        The conversations; by default all.
    elsewhere : Path, optional
        Where its catalog lies, if not there.
    threads : int, optional
        How many read at once; by default the number of cores, on a disk 16 at least.
    quarantine : bool
        Whether what differs is put into quarantine; then no process may own the pool.
    progress : callable
        Told now and then how many bytes were read, of how many.

    Raises
    ------
    ConversationNotFound
        There is none of one of the ids.
    PoolLocked
        Something owns the pool, and there is to be a quarantine.
    MmkvError, ValueError
        There is no pool, or a file cannot be read.
    """
    prepare(path, create=False)
    description = read_description(path)
    lock = _alone(path) if quarantine else None
    catalog = None
    try:
        catalog = Catalog(catalog_file(path, description, elsewhere), readonly=not quarantine)
        catalog.require_of(path, description.uuid)
        audit = _Auditor(path, description, catalog, names).run(threads, progress)
        if quarantine:
            now = time.time()
            put_bad(catalog, [Bad(one.kind, one.number, one.layer, one.plane, now) for one in audit.corrupt])
    finally:
        if catalog is not None:
            catalog.close()
        if lock is not None:
            lock.release()
    return audit


class _Auditor:
    def __init__(self, path: Path, description: Description, catalog: Catalog, names: Collection[str] | None) -> None:
        self._path, self._description, self._catalog, self._names = path, description, catalog, names
        self._columns = Columns(description.layout)
        self._granule = description.layout.granule
        self._tiers = tiers_of(path, description, catalog)

    def run(self, threads: int | None, progress: Callable[[int, int], None]) -> Audit:
        known = self._known(self._names)
        try:
            pieces = list(pieces_of(known, self._tiers, self._columns))
            started = time.perf_counter()
            differing = _Readers(self, known, pieces, progress).run(self._threads(threads))
            seconds = time.perf_counter() - started
            corrupt = tuple(self._look_again(sorted(differing)))
        finally:
            for tier in self._tiers.values():
                tier.close()
        return Audit(
            len({row.name for row, _ in known.versions}),
            sum(piece.bytes for piece in pieces),
            seconds,
            sum(known.unknown.values()),
            len(known.bad & known.holders.keys()),
            0 if "hot" in self._tiers else len(known.dirty & known.holders.keys()),
            corrupt,
        )

    def _known(self, names: Collection[str] | None) -> Known:
        return known_of(self._catalog, self._columns, self._description.geometry.block_tokens, names)

    def _threads(self, threads: int | None) -> int:
        cores = os.cpu_count() or 2
        return threads or (cores if medium_of(self._path).in_ram else max(cores, _LEAST_DISK_THREADS))

    def compare(self, known: Known, piece: Piece, buffer: memoryview) -> Iterator[_Place]:
        """Read a piece, and give the units of it that differ."""
        view = buffer[: piece.bytes]
        piece.tier.file(piece.file).read(view, piece.offset)
        units, starts = known.units[piece.kind], range(0, piece.bytes, piece.stride)
        tokens = units.tokens[piece.rows].tolist()
        for column, start in zip(piece.columns, piece.starts, strict=True):
            sizes = [self._covered(piece.kind, column, covered) for covered in tokens]
            found = [crc32c(view[at + start : at + start + size]) for at, size in zip(starts, sizes, strict=True)]
            for index in np.flatnonzero(units.values[piece.rows, column] != found).tolist():
                yield piece.kind, int(units.numbers[piece.rows[index]]), column, piece.tier.name

    def _covered(self, kind: Kind, column: int, tokens: int) -> int:
        """How many bytes of a unit the checksum of so many tokens covers."""
        unit = self._columns.of(kind)[column]
        whole_pages = kind == "blocks" and unit.layer >= 0
        return unit.bytes * (round_up(tokens, self._granule) if whole_pages else tokens)

    def _look_again(self, differing: Collection[_Place]) -> list[Corrupt]:
        """Those that differ still, and that the owner did not change meanwhile."""
        corrupt: list[Corrupt] = []
        for _ in range(_LOOKS):
            if not differing:
                break
            before = self._known(None)
            still = [place for place in differing if self._differs(before, *place)]
            after = self._known(None)
            same = {place for place in still if _is_same(before, after, *place)}
            corrupt += [self._corrupt(after, *place) for place in still if place in same]
            differing = [place for place in still if place not in same]
        return corrupt

    def _differs(self, known: Known, kind: Kind, number: int, column: int, tier: str) -> bool:
        """Whether a unit, as the catalog knows it, is not what is read now."""
        units, at = known.units[kind], known.place(kind, number, tier)
        row = int(np.searchsorted(units.numbers, number))
        if at is None or row == len(units.numbers) or units.numbers[row] != number:
            return False
        file, offset = locate(self._tiers[tier], self._columns, kind, column, at)
        view = allocate_host((self._covered(kind, column, int(units.tokens[row])),), "uint8").data
        self._tiers[tier].file(file).read(view, offset)
        return crc32c(view) != int(units.values[row, column])

    def _corrupt(self, known: Known, kind: Kind, number: int, column: int, tier: str) -> Corrupt:
        holders = set(known.holders[kind, number])
        held = [(row, version) for row, version in known.versions if version.id in holders]
        unit = self._columns.of(kind)[column]
        version = held[0][1]
        tokens = (0, next((point.tokens for point in version.checkpoints if point.record == number), version.tokens))
        if kind == "blocks":
            first, block_tokens = 0, self._description.geometry.block_tokens
            for start, count in version.extents:
                if start <= number < start + count:
                    first = (first + number - start) * block_tokens
                    break
                first += count
            tokens = (first, min(first + block_tokens, version.tokens))
        names = tuple(sorted({row.name for row, _ in held}))
        return Corrupt(names, kind, number, unit.layer, unit.name, tokens, tier)


class _Readers:
    """Threads that share the pieces."""

    def __init__(
        self, auditor: _Auditor, known: Known, pieces: list[Piece], progress: Callable[[int, int], None]
    ) -> None:
        self._auditor, self._known = auditor, known
        self._waiting = iter(pieces)
        self._all = sum(piece.bytes for piece in pieces)
        self._largest = max((piece.bytes for piece in pieces), default=PIECE_BYTES)
        self._progress = progress
        self._done = 0
        self._differing: list[_Place] = []
        self._errors: list[Exception] = []
        self._lock = threading.Lock()
        # Opened here: no two threads may.
        for piece in pieces:
            piece.tier.file(piece.file)

    def run(self, threads: int) -> list[_Place]:
        """Read everything; gives what differs."""
        running = [threading.Thread(target=self._read, name="mmkv-audit", daemon=True) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            while thread.is_alive():
                thread.join(0.1)
                self._progress(self._done, self._all)
        if self._errors:
            raise self._errors[0]
        self._progress(self._done, self._all)
        return self._differing

    def _read(self) -> None:
        buffer = allocate_host((max(self._largest, 1),), "uint8").data
        while not self._errors:
            with self._lock:
                piece = next(self._waiting, None)
            if piece is None:
                return
            try:
                found = list(self._auditor.compare(self._known, piece, buffer))
            except Exception as error:
                with self._lock:
                    self._errors.append(error)
                return
            with self._lock:
                self._done += piece.bytes
                self._differing += found


def _is_same(before: Known, after: Known, kind: Kind, number: int, _column: int, tier: str) -> bool:
    """Whether a number held the same all the time."""
    # Numbers of versions are never used again; a place in the hot tier may have changed hands.
    holders = set(before.holders.get((kind, number), ())) & set(after.holders.get((kind, number), ()))
    return bool(holders) and before.place(kind, number, tier) == after.place(kind, number, tier)


def _alone(path: Path) -> OwnerLock:
    try:
        return OwnerLock(path)
    except PoolLocked as error:
        raise PoolLocked(
            f"process {error.pid} owns the pool at {path}, and itself puts into quarantine what it takes: end it first",
            error.pid,
        ) from None
