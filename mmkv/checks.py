"""Checksums of a pool: what is known of its units, what a park adds to it, and what is done about bad blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmkv.ahead import SummingAhead
from mmkv.buffer import Buffer
from mmkv.castagnoli import Values
from mmkv.catalog import Catalog
from mmkv.checksum import combine, crc32c
from mmkv.device import Event
from mmkv.digesting import Digester
from mmkv.errors import MmkvError
from mmkv.ledger import Ledger
from mmkv.plan import Arrays
from mmkv.quarantine import Quarantine
from mmkv.slotsums import SlotSums
from mmkv.space import KINDS, Kind, Space
from mmkv.store.contract import Progress
from mmkv.summing import Summing
from mmkv.unit_table import Bad, UnitRows, put_bad, read_units
from mmkv.units import Columns, Spans, Units

__all__ = ["Checks", "ParkSums", "Verify", "as_verify", "id_checksums"]

Verify: TypeAlias = Literal["always", "first", "never"]
_Numbers: TypeAlias = npt.NDArray[np.int64]


class Checks:
    """The checksums of one pool. The pool's lock guards what is known; methods that change it take it themselves.

    Parameters
    ----------
    lock, catalog, space, ledger
        The pool's parts.
    verify : str
        When takes are checked, if they do not say; with `never`, parks take no checksums.
    """

    def __init__(self, lock: threading.RLock, catalog: Catalog, space: Space, ledger: Ledger, verify: Verify) -> None:
        self.lock = lock
        self.verify: Verify = verify
        self.space = space
        self.columns = Columns(space.geometry.layout)
        self.digester = Digester()
        self.units = {kind: Units(space.allocator(kind), len(self.columns.of(kind))) for kind in KINDS}
        self.counters = dict.fromkeys(("bytes_verified", "mismatches"), 0)
        self._catalog, self._ledger = catalog, ledger
        self._loaded = False

    def load(self) -> None:
        """Take in what the catalog lists, save for numbers that no version holds.

        Raises
        ------
        PoolCorrupt
            A row does not make sense.
        """
        self._loaded = True
        for kind in KINDS:
            most = self.space.geometry.block_tokens if kind == "blocks" else 1
            rows = read_units(self._catalog, kind, self.columns, most)
            counts = self.space.allocator(kind).counts
            held = rows.numbers < len(counts)
            held[held] = counts[rows.numbers[held]] > 0
            self.units[kind].put(rows.numbers[held], rows.tokens[held], rows.values[held])

    def doubt(self, kind: Kind, numbers: _Numbers) -> None:
        """The bytes of some numbers came from a medium. The lock is held."""
        self.units[kind].doubt(numbers)

    def may_continue(self, number: int, tokens: int) -> bool:
        """Whether the checksums of a block that holds `tokens` tokens go on where they end: no others are covered.

        The lock is held.
        """
        return int(self.units["blocks"].tokens(np.array([number]))[0]) in (0, tokens)

    def park_sums(
        self, slot: Arrays, states: Sequence[Mapping[str, Buffer]], start: int, ids: npt.NDArray[np.int64]
    ) -> ParkSums | None:
        """What takes the checksums of a park that writes the rows of `ids[start:]`; `None` where none are wanted."""
        return None if self.verify == "never" else ParkSums(self, slot, states, start, ids)

    def unknown(self, numbers: Mapping[Kind, _Numbers]) -> dict[Kind, UnitRows]:
        """The rows of numbers that have no checksums."""
        return {
            kind: UnitRows(of, np.zeros_like(of), np.zeros((len(of), len(self.columns.of(kind))), dtype=np.uint32))
            for kind, of in numbers.items()
        }

    def commit(self, rows: Mapping[Kind, UnitRows], proven: npt.NDArray[np.bool_] | bool = True) -> None:
        """The rows of a committed version hold from now on; `proven` says which blocks are. The lock is held."""
        for kind, of in rows.items():
            known = proven if kind == "blocks" else True
            self.units[kind].put(of.numbers, of.tokens, of.values, known)

    def condemn(self, bad: Sequence[Bad], error: MmkvError) -> None:
        """Put numbers that a lease holds into quarantine; `error` is told of trouble."""
        with self.lock:
            self.counters["mismatches"] += 1
            self._ledger.quarantine.put(bad)
            try:
                put_bad(self._catalog, bad)
            except MmkvError as trouble:
                # For this process they are in quarantine all the same.
                error.add_note(f"the quarantine could not be noted in the catalog: {trouble}")

    def figures(self, quarantine: Quarantine) -> dict[str, int]:
        """What `PoolStats` says of checksums; a reader, who loads none, does not say what lacks them.

        The lock is held.
        """
        sizes = {kind: self.space.number_bytes(kind) for kind in KINDS}
        unknown = {kind: self.units[kind].unknown if self._loaded else 0 for kind in KINDS}
        return {
            **self.counters,
            "corrupt": sum(quarantine.count(kind) * sizes[kind] for kind in KINDS),
            "unverified": sum(unknown[kind] * sizes[kind] for kind in KINDS),
        }

    def close(self) -> None:
        """Let go of the devices."""
        self.digester.close()


class ParkSums:
    """The checksums of what a park writes.

    Parameters
    ----------
    checks : Checks
        The pool's.
    slot, states
        The arrays that are parked.
    start : int
        The first token whose row is written.
    ids : ndarray of int64
        The ids of all tokens.
    """

    def __init__(
        self,
        checks: Checks,
        slot: Arrays,
        states: Sequence[Mapping[str, Buffer]],
        start: int,
        ids: npt.NDArray[np.int64],
    ) -> None:
        geometry = checks.space.geometry
        self._checks = checks
        self._ids = ids
        self._spans = Spans.cut(start, len(ids), geometry.block_tokens)
        self._rows = self._spans.rounded(geometry.layout.granule)
        self.slot = SlotSums(checks.digester, checks.columns, slot, states, self._rows)
        devices = {self.slot.device(layer) for layer in self.slot.layers if self.slot.layer_bytes(layer)}
        on_device = {device for device in devices if device is not None}
        self._is_ahead = len(on_device) == len(devices) > 0 and checks.digester.is_ready(on_device)
        self._ahead: SummingAhead | None = None

    @property
    def parts(self) -> int:
        """How often the park hears `released` because of them."""
        return int(self._is_ahead)

    def progress(self, whole: Progress, stores_by_layer: Sequence[int]) -> Progress:
        """What hears the stores in the place of the park, and takes the checksums."""
        if self._is_ahead:
            self._ahead = SummingAhead(whole, self.slot, self._checks.digester)
            return self._ahead
        return Summing(whole, (self.slot,), stores_by_layer, first=True)

    def begin(self, after: Sequence[Event]) -> None:
        """The copies are under way: begin what is done beside them, once `after` has fired."""
        if self._ahead is not None:
            self._ahead.begin(after)

    def rows(
        self, numbers: _Numbers, records: _Numbers, continued: int
    ) -> tuple[dict[Kind, UnitRows], npt.NDArray[np.bool_]]:
        """The rows of the blocks and of the record that were written, and which of the blocks need no proof.

        All layers were taken, and the lock is held.

        Parameters
        ----------
        numbers, records : ndarray of int64
            The numbers of the blocks, in the conversation's order, and of the record, if there is one.
        continued : int
            The number of the block whose checksums those of the first one go on from, where that was not begun anew.
        """
        checks, spans = self._checks, self._spans
        values = self.slot.blocks.copy()
        values[:, -1] = id_checksums(self._ids, spans)
        block_tokens = checks.space.geometry.block_tokens
        tokens = spans.token % block_tokens + spans.tokens
        proven = np.ones(len(spans), dtype=bool)
        if len(spans) and (begun := int(spans.token[0]) % block_tokens):
            units, before = checks.units["blocks"], np.array([continued])
            if int(units.tokens(before)[0]) == begun:
                values[0] = combine(units.values(before)[0], values[0], self._first_bytes())
                proven[0] = units.proven(before)[0]
            else:
                tokens[0] = 0
        one = np.ones(len(records), dtype=np.int64)
        states = np.broadcast_to(self.slot.states, (len(records), len(self.slot.states)))
        return {"blocks": UnitRows(numbers, tokens, values), "checkpoints": UnitRows(records, one, states)}, proven

    def _first_bytes(self) -> _Numbers:
        """What was written of each unit of the first block."""
        sizes = np.array([unit.bytes for unit in self._checks.columns.blocks], dtype=np.int64)
        rows = np.full(len(sizes), self._rows.tokens[0])
        rows[-1] = self._spans.tokens[0]
        return rows * sizes


def id_checksums(ids: npt.NDArray[np.int64], spans: Spans, first: int = 0) -> Values:
    """The checksum of the ids of each span; `ids` are those from token `first` on."""
    octets = ids.astype("<i8", copy=False).data.cast("B")
    starts = ((spans.token - first) * 8).tolist()
    sizes = (spans.tokens * 8).tolist()
    found = [crc32c(octets[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return np.array(found, dtype=np.uint32)


def as_verify(value: object) -> Verify:
    """One of `always`, `first` and `never`, or a `ValueError`."""
    for choice in get_args(Verify):
        if value == choice:
            known: Verify = choice
            return known
    raise ValueError(f"verify must be one of {', '.join(get_args(Verify))}, not {value!r}")
