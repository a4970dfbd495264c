"""Taking a conversation in from a file of its own: a park whose rows come from there."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from mmkv.blocks import block_numbers
from mmkv.buffer import allocate_host
from mmkv.catalog import Catalog
from mmkv.checks import Checks
from mmkv.checksum import UnitStream
from mmkv.directory import require_layout
from mmkv.errors import LayoutMismatch, TransferCancelled
from mmkv.geometry import Geometry
from mmkv.layout import Layout
from mmkv.ledger import Ledger
from mmkv.portable import IDS, About, Part, parts_of
from mmkv.prefix import continued_hashes, first_seed
from mmkv.room import Room
from mmkv.rows import Checkpoint, VersionRow
from mmkv.sizes import round_up
from mmkv.space import Kind, Reservation, Space
from mmkv.store.files import PoolFile
from mmkv.tensorfile import TensorFile
from mmkv.transfer import Transfer
from mmkv.unit_table import UnitRows, put_units
from mmkv.units import Spans

__all__ = ["Arrival", "Parcel"]

_CHUNK = 4 << 20
_ID_BYTES = 8


class Parcel:
    """A file that holds a conversation of a layout; a context manager.

    Parameters
    ----------
    file : Path
        The file.
    layout : Layout
        The layout that the conversation must have.
    pool : Path
        The pool's directory, for errors.

    Raises
    ------
    LayoutMismatch
        It has another one.
    MmkvError, ValueError
        It cannot be read, or is no such file.
    """

    def __init__(self, file: Path, layout: Layout, pool: Path) -> None:
        self.file = TensorFile(file)
        try:
            try:
                self.about = About.parse(self.file.metadata)
            except ValueError as error:
                raise ValueError(f"{file} cannot be imported: {error}") from error
            if self.about.fingerprint != layout.fingerprint:
                raise _mismatch(file, self.file.metadata, layout, pool)
            points = [tokens for tokens, _ in self.about.checkpoints]
            if layout.state_bytes and self.about.tokens not in points:
                raise ValueError(f"{file} cannot be imported: it has no states at its {self.about.tokens} tokens")
            if points and not layout.state_bytes:
                raise ValueError(f"{file} cannot be imported: its layout has no states, and it has checkpoints")
            self._require_tensors(file, layout, points)
        except BaseException:
            self.file.close()
            raise

    def _require_tensors(self, file: Path, layout: Layout, points: list[int]) -> None:
        arrays = 1 + sum(len(layer.planes) + len(points) * len(layer.state) for layer in layout.layers)
        if len(self.file.tensors) != arrays:
            raise ValueError(
                f"{file} cannot be imported: it has {len(self.file.tensors)} tensors, and a conversation of this "
                f"layout with {len(points)} checkpoints has {arrays}"
            )
        self.parts = parts_of(layout, self.about.tokens, points)
        for part in self.parts:
            found = self.file.tensors.get(part.tensor.name)
            if found != part.tensor:
                what = "is missing" if found is None else f"is {found.dtype}{list(found.shape)}"
                raise ValueError(
                    f"{file} cannot be imported: {part.tensor.name!r} {what}, and must be "
                    f"{part.tensor.dtype}{list(part.tensor.shape)}"
                )

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _mismatch(file: Path, metadata: dict[str, str], layout: Layout, pool: Path) -> Exception:
    try:
        require_layout(pool, layout, Layout.from_json(json.loads(metadata.get("layout", ""))))
    except LayoutMismatch as error:
        return LayoutMismatch(f"{file} cannot be imported: {error}")
    except (ValueError, RecursionError):
        pass
    return LayoutMismatch(
        f"{file} cannot be imported: its layout is not that of the pool at {pool}, and it does not say in what"
    )


class Arrival:
    """A version that is taken in from a file: its blocks are held from here on until it is committed or released.

    Parameters
    ----------
    lock, catalog, space, ledger, room, checks
        The pool's parts.
    boot : str
        This boot's id.
    parcel : Parcel
        The file.
    name, namespace : str
        What the conversation is to be called.
    replace : bool
        Whether there may be one of that id.

    Raises
    ------
    PoolFull
        There is no room.
    ValueError
        There is a conversation of that id, or one in another namespace.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        space: Space,
        ledger: Ledger,
        room: Room,
        checks: Checks,
        *,
        boot: str,
        parcel: Parcel,
        name: str,
        namespace: str,
        replace: bool,
    ) -> None:
        self._lock, self._catalog, self._space, self._ledger = lock, catalog, space, ledger
        self._checks = checks
        # The checksums of each tensor, unit by unit.
        self._sums: dict[tuple[int, str, int | None], UnitStream] = {}
        self._boot = boot
        self._parcel = parcel
        self._name = name
        self._namespace = namespace
        self._replace = replace
        self._revoked = self._committed = False
        self.tokens = parcel.about.tokens
        with lock:
            self._require_free()
        points = parcel.about.checkpoints
        blocks = space.geometry.blocks_for(self.tokens)
        self._new: Reservation = room.reserve(f"{name!r}", blocks, len(points), (), tail_apart=False)
        self._points = tuple(
            Checkpoint(tokens, record.first, boundary)
            for (tokens, boundary), record in zip(points, self._new.records, strict=True)
        )

    def _require_free(self) -> None:
        former = self._ledger.conversations.get(self._name)
        if former is not None and not self._replace:
            raise ValueError(f"conversation {self._name!r} exists already: choose another id, or replace it")
        if former is not None and former.namespace != self._namespace:
            raise ValueError(
                f"conversation {self._name!r} is parked in namespace {former.namespace!r}, not {self._namespace!r}: "
                "use another id, or drop it first"
            )

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are held until it ends."""
        return sum(count for _, count in self._new.extents) * self._space.geometry.block_bytes

    def revoke(self) -> None:
        """Never commit: the conversation was dropped meanwhile. The pool's lock is held."""
        self._revoked = True

    def copy(self, transfer: Transfer) -> None:
        """Copy all bytes into the pool's files, and see that they are on the medium. Takes some MB of memory."""
        buffer = allocate_host((_CHUNK,), "uint8").data
        self._hashes = self._hash_ids(buffer)
        for part in self._parcel.parts:
            at, sums = 0, self._new_sums(part)
            for file, offset, size in self._runs(part):
                for start in range(0, size, _CHUNK):
                    if transfer.stopped:
                        return
                    view = buffer[: min(_CHUNK, size - start)]
                    self._parcel.file.read(part.tensor.name, view, at + start)
                    if sums is not None:
                        sums.add(view)
                    file.write(view, offset + start)
                    transfer.moved("posix", len(view))
                at += size
        self._space.sync()

    def _new_sums(self, part: Part) -> UnitStream | None:
        if self._checks.verify == "never":
            return None
        rows = self._space.geometry.block_tokens
        if part.layer < 0:
            size = rows * _ID_BYTES
        elif part.checkpoint is None:
            size = rows * self._space.geometry.plane_regions[part.layer][part.name][1]
        else:
            size = part.tensor.bytes
        sums = self._sums[part.layer, part.name, part.checkpoint] = UnitStream(size)
        return sums

    def _units(self) -> dict[Kind, UnitRows]:
        """The checksums of what was taken in."""
        blocks = block_numbers(self._new.extents)
        records = np.array([point.record for point in self._points], dtype=np.int64)
        rows = self._checks.unknown({"blocks": blocks, "checkpoints": records})
        if self._checks.verify == "never":
            return rows
        columns, block_tokens = self._checks.columns, self._space.geometry.block_tokens
        for column, unit in enumerate(columns.blocks):
            rows["blocks"].values[:, column] = self._sums[unit.layer, unit.name, None].values()
        for column, unit in enumerate(columns.checkpoints):
            for place in range(len(records)):
                rows["checkpoints"].values[place, column] = self._sums[unit.layer, unit.name, place].values()[0]
        rows["blocks"].tokens[:] = Spans.cut(0, self.tokens, block_tokens).tokens
        rows["checkpoints"].tokens[:] = 1
        return rows

    def _hash_ids(self, buffer: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        block_tokens = self._space.geometry.block_tokens
        seed = first_seed(self._namespace)
        hashes: list[int] = []
        whole = self.tokens // block_tokens * block_tokens * _ID_BYTES
        for start in range(0, whole, _CHUNK):
            view = buffer[: min(_CHUNK, whole - start)]
            self._parcel.file.read(IDS, view, start)
            hashes += continued_hashes(np.frombuffer(view, dtype=np.int64), seed, block_tokens)
            seed = hashes[-1]
        return np.array(hashes, dtype=np.uint64)

    def _runs(self, part: Part) -> list[tuple[PoolFile, int, int]]:
        """The file, offset and size of each run that a tensor goes to, in order."""
        space, geometry = self._space, self._space.geometry
        if part.checkpoint is not None:
            file, record = space.states[part.layer], self._points[part.checkpoint].record
            assert file is not None
            return [(file, geometry.state_offset(part.layer, part.name, record), part.tensor.bytes)]
        if part.layer < 0:
            runs = geometry.token_runs(self._new.extents, 0, self.tokens)
            return _with_sizes(space.tokens, geometry.id_offsets(runs).tolist(), runs.tokens.tolist(), _ID_BYTES)
        file = space.planes[part.layer]
        assert file is not None
        runs = geometry.token_runs(self._new.extents, 0, _rows(geometry, self.tokens))
        token_bytes = geometry.plane_regions[part.layer][part.name][1]
        offsets = geometry.plane_offsets(runs, part.layer, part.name).tolist()
        return _with_sizes(file, offsets, runs.tokens.tolist(), token_bytes)

    def commit(self) -> None:
        """Make the version visible, in one transaction; all its bytes are on the medium."""
        self._catalog.require_there()
        self._space.require_whole()
        with self._lock:
            if self._revoked:
                raise TransferCancelled(f"{self._name!r} was dropped while it was being imported")
            self._require_free()
            row = VersionRow(
                0, self.tokens, time.time(), self._boot, True, self._hashes, self._new.extents, self._points
            )
            used = self._ledger.next_use()
            numbers = [("blocks", n) for first, count in self._new.extents for n in range(first, first + count)]
            numbers += [("checkpoints", point.record) for point in self._points]
            # A former use of the numbers may have left rows of residents.
            units = self._units()
            row = self._catalog.put_version(
                self._name,
                self._namespace,
                row,
                used,
                synced=True,
                cold=numbers if self._catalog.has_residents else (),
                also=partial(put_units, new=units),
            )
            self._checks.commit(units)
            self._ledger.commit(self._name, self._namespace, row, used, None)
            self._committed = True

    def release(self) -> None:
        """Let go of what was not committed."""
        with self._lock:
            if not self._committed:
                self._space.release(self._new)


def _rows(geometry: Geometry, tokens: int) -> int:
    return round_up(tokens, geometry.layout.granule)


def _with_sizes(
    file: PoolFile, offsets: list[int], tokens: list[int], token_bytes: int
) -> list[tuple[PoolFile, int, int]]:
    return [(file, offset, count * token_bytes) for offset, count in zip(offsets, tokens, strict=True)]
