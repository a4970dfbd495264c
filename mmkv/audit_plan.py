"""What an audit reads: the units of a pool's versions, where their bytes lie, and in which pieces."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.catalog import Catalog
from mmkv.check_files import expected_files
from mmkv.directory import Description
from mmkv.errors import ConversationNotFound, PoolCorrupt
from mmkv.geometry import Extent, Geometry
from mmkv.medium import boot_id, medium_of
from mmkv.rows import ConversationRow, VersionRow
from mmkv.space import KINDS, Kind
from mmkv.store.files import PoolFile
from mmkv.unit_table import UnitRows, read_bad, read_units
from mmkv.units import Columns
from mmkv.warming import Claim, is_of, read_claim, stored_generations, stored_hot

__all__ = ["PIECE_BYTES", "Known", "Piece", "Tier", "known_of", "locate", "pieces_of", "tiers_of"]

_Numbers: TypeAlias = npt.NDArray[np.int64]
# As much as a thread reads at once.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Tier:
    """The files of one tier, opened where they are read."""

    name: str
    path: Path
    geometry: Geometry
    files: dict[str, PoolFile] = field(default_factory=dict)

    def file(self, name: str) -> PoolFile:
        """An open file, past the page cache where it lies on a disk."""
        if name not in self.files:
            size = expected_files(self.geometry)[name][1]
            on_disk = not medium_of(self.path).in_ram
            self.files[name] = PoolFile(self.path / name, size, readonly=True, unbuffered=on_disk)
        return self.files[name]

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()


def tiers_of(path: Path, description: Description, catalog: Catalog) -> dict[str, Tier]:
    """The tiers of a pool by name: `path`, and `hot` where there is one that is the catalog's."""
    tiers = {"path": Tier("path", path, description.geometry)}
    stored = stored_hot(catalog)
    claim = None if stored is None else read_claim(stored[0])
    if stored is not None and claim is not None and is_of(claim, path, description) and _is_current(claim, catalog):
        try:
            tiers["hot"] = Tier("hot", stored[0], Geometry.from_json(description.layout, claim.sizes))
        except ValueError as error:
            raise PoolCorrupt(f"the hot tier at {stored[0]} is damaged: {error}") from error
    return tiers


def _is_current(claim: Claim, catalog: Catalog) -> bool:
    return claim.boot == boot_id() and claim.generation in stored_generations(catalog)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a catalog says at one moment.

    Attributes
    ----------
    versions : list of (ConversationRow, VersionRow)
        What is audited.
    units : dict
        The checksums of their numbers, by kind.
    holders : dict
        By kind and number, the ids of the versions that hold it.
    hot, dirty : dict and set
        By kind and number, where it lies in the hot tier; those that lie only there.
    unknown : dict
        How many numbers have no checksums, by kind.
    bad : set
        What is in quarantine, by kind and number.
    """

    versions: list[tuple[ConversationRow, VersionRow]]
    units: dict[Kind, UnitRows]
    holders: dict[tuple[Kind, int], list[int]]
    hot: dict[tuple[str, int], int]
    dirty: set[tuple[str, int]]
    unknown: dict[Kind, int]
    bad: set[tuple[str, int]]

    def place(self, kind: Kind, number: int, tier: str) -> int | None:
        """The number under which a tier has the bytes, if it has them."""
        if tier == "hot":
            return self.hot.get((kind, number))
        return None if (kind, number) in self.dirty else number


def known_of(catalog: Catalog, columns: Columns, block_tokens: int, names: Collection[str] | None) -> Known:
    """What a catalog knows of some conversations, or of all.

    Raises
    ------
    ConversationNotFound
        There is none of one of the ids.
    PoolCorrupt
        A row does not make sense.
    """
    with catalog.snapshot():
        rows = catalog.load(hashes=False)
        residents = catalog.residents()
        bad: set[tuple[str, int]] = {(row.kind, row.number) for row in read_bad(catalog)}
        missing = set(names or ()) - {row.name for row in rows}
        if missing:
            raise ConversationNotFound(f"{catalog.path.parent} holds no conversation {min(missing)!r}")
        chosen = [row for row in rows if names is None or row.name in names]
        versions = [(row, version) for row in chosen for version in (row.version, row.fallback) if version is not None]
        numbers = {kind: _numbers(kind, (version for _, version in versions)) for kind in KINDS}
        units = {
            kind: _only(read_units(catalog, kind, columns, block_tokens if kind == "blocks" else 1), numbers[kind])
            for kind in KINDS
        }
    holders: dict[tuple[Kind, int], list[int]] = {}
    for _, version in versions:
        for kind in KINDS:
            for number in _numbers(kind, [version]).tolist():
                holders.setdefault((kind, number), []).append(version.id)
    return Known(
        versions,
        units,
        holders,
        {(row.kind, row.number): row.hot for row in residents},
        {(row.kind, row.number) for row in residents if row.dirty},
        {kind: len(numbers[kind]) - len(units[kind].numbers) for kind in KINDS},
        bad,
    )


def _numbers(kind: Kind, versions: Iterable[VersionRow]) -> _Numbers:
    runs = [
        block_numbers(version.extents)
        if kind == "blocks"
        else np.array([point.record for point in version.checkpoints], dtype=np.int64)
        for version in versions
    ]
    return np.unique(np.concatenate(runs)) if runs else np.zeros(0, dtype=np.int64)


def _only(rows: UnitRows, numbers: _Numbers) -> UnitRows:
    mine = np.isin(rows.numbers, numbers)
    order = np.argsort(rows.numbers[mine])
    return UnitRows(rows.numbers[mine][order], rows.tokens[mine][order], rows.values[mine][order])


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Units of one plane, or the records of one layer, that lie one behind the other in a file.

    Attributes
    ----------
    kind, columns : str and range
        Of which kind they are; which units, of each number.
    tier, file, offset : Tier, str, int
        Where they lie.
    rows : ndarray of int64, shape (numbers,)
        Which rows of `Known.units` they are.
    stride : int
        Bytes from one number to the next.
    starts, sizes : list of int, shape (columns,)
        Where each unit starts in a number's bytes, and the bytes of a token; of a state, all.
    """

    kind: Kind
    columns: range
    tier: Tier
    file: str
    offset: int
    rows: _Numbers
    stride: int
    starts: list[int]
    sizes: list[int]

    @property
    def bytes(self) -> int:
        """What is read."""
        return self.stride * len(self.rows)


def pieces_of(known: Known, tiers: dict[str, Tier], columns: Columns) -> Iterator[Piece]:
    """The pieces of everything that has checksums, in the order of the files."""
    for name, tier in tiers.items():
        for kind in KINDS:
            numbers = known.units[kind].numbers.tolist()
            places = [known.place(kind, number, name) for number in numbers]
            rows = np.array([row for row, place in enumerate(places) if place is not None], dtype=np.int64)
            at = np.array([place for place in places if place is not None], dtype=np.int64)
            order = np.argsort(at, kind="stable")
            yield from _pieces(kind, tier, columns, rows[order], at[order])


def _pieces(kind: Kind, tier: Tier, columns: Columns, rows: _Numbers, at: _Numbers) -> Iterator[Piece]:
    geometry = tier.geometry
    if kind == "checkpoints":
        for layer, states in enumerate(columns.states):
            chosen, stride = range(states.start, states.stop), geometry.layer_record_bytes[layer]
            starts = [geometry.state_offsets[layer][columns.checkpoints[column].name] for column in chosen]
            sizes = [columns.checkpoints[column].bytes for column in chosen]
            for some in _runs(at, stride, 0) if chosen else ():
                file, offset = f"layers/{layer:04d}.state", int(at[some.start]) * stride
                yield Piece(kind, chosen, tier, file, offset, rows[some], stride, starts, sizes)
        return
    for column, unit in enumerate(columns.blocks):
        stride = unit.bytes * geometry.block_tokens
        for some in _runs(at, stride, geometry.segment_blocks) if unit.layer >= 0 or tier.name == "path" else ():
            file, offset = locate(tier, columns, kind, column, int(at[some.start]))
            yield Piece(kind, range(column, column + 1), tier, file, offset, rows[some], stride, [0], [unit.bytes])


def locate(tier: Tier, columns: Columns, kind: Kind, column: int, number: int) -> tuple[str, int]:
    """The file and the offset of a unit of the number that a tier knows it under."""
    unit, geometry = columns.of(kind)[column], tier.geometry
    if kind == "checkpoints":
        return f"layers/{unit.layer:04d}.state", geometry.state_offset(unit.layer, unit.name, number)
    runs = geometry.token_runs([Extent(number, 1)], 0, 1)
    if unit.layer < 0:
        return "tokens.kv", int(geometry.id_offsets(runs)[0])
    return f"layers/{unit.layer:04d}.kv", int(geometry.plane_offsets(runs, unit.layer, unit.name)[0])


def _runs(at: _Numbers, stride: int, segment: int) -> Iterator[slice]:
    """Runs of consecutive numbers, as long as a piece may be, within a segment where there are any."""
    if not len(at):
        return
    breaks = np.diff(at) != 1
    if segment:
        breaks |= at[1:] % segment == 0
    heads = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(at)]
    most = max(1, PIECE_BYTES // stride)
    for head, end in itertools.pairwise(heads):
        for start in range(head, end, most):
            yield slice(start, min(start + most, end))
