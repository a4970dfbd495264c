"""The space of a pool: its files, the segments they have, and the blocks and records in them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmkv.blocks import BlockAllocator
from mmkv.catalog import Catalog
from mmkv.errors import PoolCorrupt, PoolFull
from mmkv.geometry import ID_BYTES, Extent, Geometry
from mmkv.medium import Medium, available_ram
from mmkv.refused import refusals
from mmkv.store.files import PoolFile
from mmkv.wiping import zero_run

__all__ = ["KINDS", "Kind", "Reservation", "Space"]

Kind = Literal["blocks", "checkpoints"]
KINDS: tuple[Kind, ...] = ("blocks", "checkpoints")
_ALLOCATING_THREADS = 8
# Ids are compared in steps that double: most comparisons end early or go to the end.
_FIRST_IDS = 256
_MOST_IDS = 1 << 19
# Blocks of a tier, each of which takes some bytes of memory: 10 TB of the smallest blocks, 10 PB of usual ones.
_MOST_NUMBERS = 1 << 28


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks and a record with one reference each, to be committed or released."""

    extents: tuple[Extent, ...]
    records: tuple[Extent, ...]


class Space:
    """The files under a pool's directory and what is allocated in them.

    `blocks` and `records` are guarded by the pool's lock; growing takes a lock of its own for the slow part.

    Parameters
    ----------
    directory : Path
        The tier's directory.
    geometry : Geometry
        The sizes of everything.
    catalog : Catalog
        Keeps the list of allocated segments.
    medium : Medium
        What the directory lies on.
    capacity : int
        The most bytes that the files may take.
    min_free_ram : int
        Bytes of RAM that growing leaves free, where the medium is RAM.
    create, readonly : bool
        Whether to make the files where they are missing; whether only to read them.
    tier : int
        0 for the pool's own files, 1 for the hot ones, which have no ids.

    Raises
    ------
    PoolCorrupt
        A file is missing or too short for its segments.
    """

    def __init__(
        self,
        directory: Path,
        geometry: Geometry,
        catalog: Catalog,
        medium: Medium,
        *,
        capacity: int,
        min_free_ram: int,
        create: bool = False,
        readonly: bool = False,
        tier: int = 0,
    ) -> None:
        self.geometry = geometry
        self.tier = tier
        self.medium = medium
        self.capacity = capacity
        self.min_free_ram = min_free_ram
        self._catalog = catalog
        self._directory = directory
        self._growing = threading.Lock()
        self.wipes = False
        self.planes: list[PoolFile | None] = []
        self.states: list[PoolFile | None] = []
        self._opened: list[PoolFile] = []
        try:
            self._open_files(directory, create=create, readonly=readonly)
            self.reload_segments()
            self.require_whole()
        except BaseException:
            self.close()
            raise

    def _open_files(self, directory: Path, *, create: bool, readonly: bool) -> None:
        def opened(name: str, segment_bytes: int) -> PoolFile | None:
            if segment_bytes == 0:
                return None
            file = PoolFile(
                directory / name,
                segment_bytes,
                create=create,
                readonly=readonly,
                # The ids are small, and read often.
                unbuffered=not self.medium.in_ram and name != "tokens.kv",
            )
            self._opened.append(file)
            return file

        layers = directory / "layers"
        if layers.is_symlink():
            raise PoolCorrupt(f"{layers} is a symbolic link: the files in it would be those of another directory")
        if create:
            layers.mkdir(mode=0o700, exist_ok=True)
        geometry = self.geometry
        self._tokens = opened("tokens.kv", geometry.tokens_segment_bytes if self.tier == 0 else 0)
        sizes = zip(geometry.layer_segment_bytes, geometry.layer_state_segment_bytes, strict=True)
        for layer, (plane_bytes, state_bytes) in enumerate(sizes):
            self.planes.append(opened(f"layers/{layer:04d}.kv", plane_bytes))
            self.states.append(opened(f"layers/{layer:04d}.state", state_bytes))

    @property
    def has_ids(self) -> bool:
        """Whether the tier keeps the ids."""
        return self._tokens is not None

    @property
    def tokens(self) -> PoolFile:
        """The file of ids."""
        assert self._tokens is not None
        return self._tokens

    def reload_segments(self) -> None:
        """Read the list of segments anew, with no block held: for a reader, whose owner goes on."""
        geometry, defer = self.geometry, not self.medium.in_ram
        self.blocks = BlockAllocator(geometry.segment_blocks, defer=defer)
        self.records = BlockAllocator(max(1, geometry.segment_checkpoints), defer=defer)
        for kind in KINDS:
            segments = self._catalog.segments(kind, self.tier)
            end = max(segments, default=-1) + 1
            # Before anything takes memory for that many numbers.
            if end * self.allocator(kind).segment_length > _MOST_NUMBERS:
                raise PoolCorrupt(f"the catalog {self._catalog.path} is damaged: it lists segment {end - 1} of {kind}")
            for file in self.files(kind):
                file.require(end * file.segment_bytes)
            for segment in reversed(segments):
                self.allocator(kind).add_segment(segment)

    def allocator(self, kind: Kind) -> BlockAllocator:
        """The allocator of token blocks or of checkpoint records."""
        return self.blocks if kind == "blocks" else self.records

    def files(self, kind: Kind) -> list[PoolFile]:
        """The files that hold the segments of `kind`."""
        if kind == "blocks":
            return [file for file in (self._tokens, *self.planes) if file is not None]
        return [file for file in self.states if file is not None]

    def allocated(self) -> list[tuple[list[PoolFile], list[int]]]:
        """The files and the segments that are allocated in them, of each kind."""
        return [(self.files(kind), sorted(self.allocator(kind).segments)) for kind in KINDS]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all allocated segments."""
        return sum(len(self.allocator(kind).segments) * self.segment_bytes(kind) for kind in KINDS)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks and records that are held."""
        return self.blocks.used * self.block_bytes + self.records.used * self.geometry.checkpoint_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all files of the tier, padding left out."""
        geometry = self.geometry
        return geometry.block_bytes - (geometry.block_tokens * ID_BYTES if self._tokens is None else 0)

    def number_bytes(self, kind: Kind) -> int:
        """Bytes of a block or of a checkpoint's record over all files of the tier, padding left out."""
        return self.block_bytes if kind == "blocks" else self.geometry.checkpoint_bytes

    def segment_bytes(self, kind: Kind) -> int:
        """Bytes of a segment of `kind` over all its files."""
        geometry = self.geometry
        if kind == "checkpoints":
            return geometry.state_segment_bytes
        return geometry.segment_bytes - (geometry.tokens_segment_bytes if self._tokens is None else 0)

    def _expected_sizes(self) -> Iterator[tuple[PoolFile, int]]:
        for kind in KINDS:
            end = max(self.allocator(kind).segments, default=-1) + 1
            for file in self.files(kind):
                yield file, end * file.segment_bytes

    def require_whole(self) -> None:
        """Check that no file was truncated, deleted or replaced. Costs one `fstat` a file.

        Raises
        ------
        PoolCorrupt
            One was.
        """
        for file, size in self._expected_sizes():
            file.require(size)

    def try_reserve(
        self, blocks: int, records: int, behind: Sequence[Extent], *, tail_apart: bool
    ) -> Reservation | None:
        """Take blocks and records that are free now, or nothing and return `None`; see `BlockAllocator.allocate`."""
        if blocks > self.blocks.free or records > self.records.free:
            return None
        extents = self.blocks.allocate(blocks, behind, tail_apart=tail_apart)
        taken = self.records.allocate(records)
        assert extents is not None
        assert taken is not None
        return Reservation(extents, tuple(Extent(first + i, 1) for first, count in taken for i in range(count)))

    def release(self, reservation: Reservation) -> None:
        """Undo a reservation that was not committed."""
        self.blocks.release(reservation.extents)
        self.records.release(reservation.records)

    def wipe_what_is_freed(self, *, all_free: bool) -> None:
        """Overwrite numbers with zeros before they are free, from now on; `all_free` also those that are free now.

        The latter costs a write of all free blocks.
        """
        self.wipes = True
        for kind in KINDS:
            allocator = self.allocator(kind)
            allocator.defer()
            for run in allocator.free_extents() if all_free else ():
                zero_run(self, kind, run)

    @property
    def unsettled(self) -> bool:
        """Whether freed numbers wait for `settle`."""
        return bool(self.blocks.unsettled or self.records.unsettled)

    def settle(self, most_bytes: int | None = None) -> None:
        """Make what was freed free, overwritten where that is wanted: what freed it is on the medium.

        Parameters
        ----------
        most_bytes : int, optional
            How many bytes of each kind are enough, to a run.
        """
        for kind in KINDS:
            most = None if most_bytes is None else max(1, most_bytes // max(1, self.number_bytes(kind)))
            self.allocator(kind).settle(partial(zero_run, self, kind) if self.wipes else None, most)

    def lacking(self, blocks: int, records: int) -> Kind | None:
        """Which kind has fewer free than that, if one has."""
        if blocks > self.blocks.free:
            return "blocks"
        return "checkpoints" if records > self.records.free else None

    @property
    def room_to_grow(self) -> int:
        """Bytes that the capacity and the free RAM allow to allocate."""
        room = self.capacity - self.allocated_bytes
        return min(room, available_ram() - self.min_free_ram) if self.medium.in_ram else room

    def may_grow(self, kind: Kind) -> bool:
        """Whether the capacity and the free RAM allow one segment more."""
        # First what costs nothing.
        size, allocator = self.segment_bytes(kind), self.allocator(kind)
        if allocator.total + allocator.segment_length > _MOST_NUMBERS:
            return False
        return self.allocated_bytes + size <= self.capacity and size <= self.room_to_grow

    def grow(self, kind: Kind, lock: threading.RLock) -> int | None:
        """Allocate one segment more, in all files or in none. Takes `lock` only for the bookkeeping.

        Costs what the file system takes to clear the pages: about 0.3 s a GB of tmpfs on one thread.

        Returns
        -------
        int or None
            The segment; `None` where another thread has grown meanwhile as far as may be.

        Raises
        ------
        PoolFull
            The file system has no room.
        PoolCorrupt
            A file was truncated or deleted.
        """
        with self._growing:
            with lock:
                # Another thread may have grown meanwhile.
                if not self.may_grow(kind):
                    return None
                # A file that was cut would grow again, with zeros for what was lost.
                self.require_whole()
                segment = self.allocator(kind).next_segment()
            self._require_headroom(self.segment_bytes(kind))
            files = self.files(kind)
            _allocate(files, segment)
            try:
                with lock:
                    if self.allocated_bytes + self.segment_bytes(kind) > self.capacity:
                        # It was made smaller meanwhile.
                        for file in files:
                            file.give_back(segment)
                        return None
                    self._catalog.add_segment(kind, segment, self.tier)
                    self.allocator(kind).add_segment(segment)
            except BaseException:
                for file in files:
                    file.give_back(segment)
                raise
        return segment

    def _require_headroom(self, size: int) -> None:
        """Leave the catalog, where it lies on the same file system, what it needs to note what happens."""
        with refusals(f"cannot grow the files in {self._directory}"):
            directory, catalog = self._directory.stat(), self._catalog.path.parent.stat()
            status = os.statvfs(self._directory)
        # Of a tmpfs without a limit the free memory counts, which `may_grow` has looked at.
        if directory.st_dev != catalog.st_dev or not status.f_blocks:
            return
        free = status.f_bavail * status.f_frsize
        if free < size + self._catalog.headroom:
            raise PoolFull(
                f"no room on the file system of {self._directory} for {size} bytes more: {free} are free, and "
                f"{self._catalog.headroom} are the catalog's; free some space, or give the pool a smaller capacity"
            )

    def give_back(self, kind: Kind, segment: int) -> None:
        """Free the space of a drained segment. The pool's lock is held; no store holds a map of it."""
        # Before anything is changed: a catalog that lacks a segment which is in use cannot be opened again.
        self.allocator(kind).require_free(segment)
        # In this order a failure, or a crash, leaves at worst space that the next open gives back.
        self._catalog.remove_segment(kind, segment, self.tier)
        self.allocator(kind).remove_segment(segment)
        for file in self.files(kind):
            file.give_back(segment)

    def trim(self) -> None:
        """Give back what files take beyond their segments, as growth that a crash cut short leaves it."""
        for kind in KINDS:
            for file in self.files(kind):
                file.trim(self.allocator(kind).segments)

    def write_ids(self, extents: Sequence[Extent], start: int, ids: npt.NDArray[np.int64]) -> None:
        """Write the ids of tokens `[start, len(ids))` of a conversation that lies in `extents`.

        Raises
        ------
        PoolFull, PoolCorrupt
            They could not be written.
        """
        runs = self.geometry.token_runs(extents, start, len(ids))
        for offset, token, count in zip(
            self.geometry.id_offsets(runs).tolist(), runs.token.tolist(), runs.tokens.tolist(), strict=True
        ):
            self.tokens.write(ids[token : token + count].data.cast("B"), offset)

    def read_ids(self, extents: Sequence[Extent], start: int, stop: int) -> npt.NDArray[np.int64]:
        """The ids of tokens `[start, stop)`; int64, shape (stop - start,).

        Raises
        ------
        PoolCorrupt
            The file of ids is truncated.
        """
        ids = np.empty(stop - start, dtype=np.int64)
        view = ids.data.cast("B")
        runs = self.geometry.token_runs(extents, start, stop)
        for offset, token, count in zip(
            self.geometry.id_offsets(runs).tolist(), runs.token.tolist(), runs.tokens.tolist(), strict=True
        ):
            self.tokens.read(view[(token - start) * ID_BYTES : (token - start + count) * ID_BYTES], offset)
        return ids

    def first_id(self, extents: Sequence[Extent]) -> int:
        """The first id of a parked conversation. Costs one small read."""
        segment, block = divmod(extents[0].first, self.geometry.segment_blocks)
        offset = segment * self.geometry.tokens_segment_bytes + block * self.geometry.block_tokens * ID_BYTES
        view = memoryview(bytearray(ID_BYTES))
        self.tokens.read(view, offset)
        return int.from_bytes(view, sys.byteorder, signed=True)

    def common_prefix(self, extents: Sequence[Extent], tokens: int, ids: npt.NDArray[np.int64], start: int = 0) -> int:
        """How many leading ids a parked conversation and `ids` have in common, those before `start` being known to.

        Costs a read of the common ids and of at most as many more.
        """
        stop = min(tokens, len(ids))
        step = _FIRST_IDS
        while start < stop:
            end = min(start + step, stop)
            differing = np.flatnonzero(self.read_ids(extents, start, end) != ids[start:end])
            if len(differing):
                return start + int(differing[0])
            start, step = end, min(step * 8, _MOST_IDS)
        return max(start, 0)

    def sync(self) -> None:
        """Wait until the bytes of all files are on the medium."""
        for file in self._opened:
            file.sync()

    def require_in_range(self, extents: Sequence[Extent], records: Sequence[Extent], tokens: int) -> None:
        """Raise `PoolCorrupt` if a version lists blocks that cannot be its own."""
        if sum(count for _, count in extents) != self.geometry.blocks_for(tokens):
            raise PoolCorrupt(f"a version of {tokens} tokens lists {extents} as its blocks")
        for allocator, runs in ((self.blocks, extents), (self.records, records)):
            end, last = len(allocator.counts), 0
            for first, count in sorted(runs):
                if first + count > end:
                    raise PoolCorrupt(f"a version lists {runs}, beyond the {end} numbers that are allocated")
                if first < last:
                    raise PoolCorrupt(f"a version lists {runs}, which overlap: two of its parts would be one")
                last = first + count

    def close(self) -> None:
        """Close all files."""
        with contextlib.ExitStack() as closing:
            for file in self._opened:
                closing.callback(file.close)

    def full(self, what: str, blocks: int, records: int) -> PoolFull:
        """The error for a request that does not fit, in figures."""
        need = blocks * self.geometry.block_bytes + records * self.geometry.checkpoint_bytes
        text = (
            f"no room for {what}: it needs {need} bytes more, {self.used_bytes} of {self.capacity} are in use, and "
            "what is pinned, leased or being parked stays"
        )
        if self.medium.in_ram and self.allocated_bytes + self.geometry.segment_bytes <= self.capacity:
            text += f"; RAM is short: {available_ram()} bytes are available, {self.min_free_ram} must stay free"
        return PoolFull(text + ". Raise the capacity, or drop or unpin conversations")


def _allocate(files: Sequence[PoolFile], segment: int) -> None:
    """Allocate a segment in all files or in none, several at once."""
    waiting = deque(files)
    done: list[PoolFile] = []
    errors: list[Exception] = []

    def allocate() -> None:
        while waiting and not errors:
            try:
                file = waiting.popleft()
            except IndexError:
                return
            try:
                file.allocate(segment)
            except Exception as error:
                errors.append(error)
            else:
                done.append(file)

    threads = []
    try:
        for _ in range(min(_ALLOCATING_THREADS, len(files)) - 1):
            thread = threading.Thread(target=allocate, name="mmkv-allocate", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # As at the interpreter's end, or at the limit of threads: this one does it all.
                break
            threads.append(thread)
        allocate()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    except BaseException:
        waiting.clear()
        for thread in threads:
            thread.join()
        for file in done:
            file.give_back(segment)
        raise
