"""One take's check: the bytes in the slot against the checksums that were parked with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer
from mmkv.castagnoli import Values
from mmkv.checks import Checks, id_checksums
from mmkv.errors import ConversationCorrupt, MmkvError, TransferError
from mmkv.movers import Movers, Share
from mmkv.placement import Placement
from mmkv.plan import Arrays, layer_copies
from mmkv.quarantine import usable_tokens
from mmkv.scratch import Scratch
from mmkv.slotsums import SlotSums
from mmkv.space import Space
from mmkv.store.contract import Gate, Progress
from mmkv.summing import Summing
from mmkv.taking import Take
from mmkv.transfer import Transfer
from mmkv.unit_table import Bad
from mmkv.units import IDS, Spans

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Verification", "verification_of"]

_Numbers: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]


class Verification:
    """What is checked of a take: units whose rows it takes all, in the slot; others whole, in scratch memory.

    Of a unit of which the slot takes some rows only, the whole is read once more and checked, and the slot's rows are
    compared with those of it: what the slot held before does not count.

    Parameters
    ----------
    checks : Checks
        The pool's.
    take : Take
        What is taken.
    slot, states
        Where to.
    movers_of : callable
        Gives the stores of a tier.
    blocks : ndarray of bool
        Which of the blocks that are taken from are checked.
    record : bool
        Whether the states are.
    """

    def __init__(
        self,
        checks: Checks,
        take: Take,
        slot: Arrays,
        states: Sequence[Mapping[str, Buffer]],
        movers_of: Callable[[Space], Movers],
        blocks: _Mask,
        *,
        record: bool,
    ) -> None:
        geometry = checks.space.geometry
        block_tokens = geometry.block_tokens
        self._checks, self._take = checks, take
        self._record = record
        self._positions = take.positions[blocks]
        self._numbers = take.numbers[blocks]
        with checks.lock:
            self._expected = checks.units["blocks"].values(self._numbers)
            covered = checks.units["blocks"].tokens(self._numbers)
        start = self._positions * block_tokens
        self._whole = Spans(start, covered)
        rows = self._whole.rounded(geometry.layout.granule)
        first, end = np.maximum(start, take.have), np.minimum(start + rows.tokens, take.stop)
        self._taken = Spans(first, end - first)
        self._partial = np.flatnonzero((first > start) | (end < start + rows.tokens))
        summed_states = states if record else ()
        self.slot = SlotSums(checks.digester, checks.columns, slot, summed_states, self._taken, expected=self._expected)
        self._ids = _IdSums(checks.space, take, self._whole)
        self._scratch: tuple[SlotSums, SlotSums] | None = None
        self.shares: list[Share] = []
        if len(self._partial):
            self._plan_scratch(rows, movers_of)

    def _plan_scratch(self, rows: Spans, movers_of: Callable[[Space], Movers]) -> None:
        checks, at = self._checks, self._partial
        scratch = Scratch(checks.space.geometry, self._positions[at])
        whole, taken = (Spans(spans.token[at], spans.tokens[at]) for spans in (rows, self._taken))
        self._scratch = (
            SlotSums(checks.digester, checks.columns, scratch, (), whole),
            SlotSums(checks.digester, checks.columns, scratch, (), taken),
        )
        for token, tokens in zip(whole.token.tolist(), whole.tokens.tolist(), strict=True):
            placements = self._take.placements_of(token, token + tokens)
            self.shares += [_host_share(movers_of(place.space), place, scratch) for place in placements]

    def progress(self, whole: Transfer, stores_by_layer: Sequence[int]) -> Progress:
        """What hears the stores in the place of the take, and takes the checksums."""
        return Summing(whole, (self.slot, self._ids), stores_by_layer, first=False)

    def start_scratch(self, transfer: Transfer, gate: Gate | None) -> None:
        """Begin to read what is checked beside the slot; `transfer` hears `released` for each of `shares`."""
        if self._scratch is not None:
            layers = len(self._checks.space.geometry.layout.layers)
            progress = Summing(_Aside(transfer), self._scratch, [len(self.shares)] * layers, first=False)
            for share in self.shares:
                share.start("read", progress, (), gate)

    @property
    def bytes(self) -> int:
        """What is checked in the slot."""
        return self.slot.bytes

    def finish(self) -> None:
        """Compare; all bytes are down.

        Raises
        ------
        ConversationCorrupt
            Some are not those that were parked; what holds them is in quarantine.
        """
        differs = self._differing()
        wrong_states = np.zeros(0, dtype=np.int64)
        if self._record:
            with self._checks.lock:
                states = self._checks.units["checkpoints"].values(np.array([self._take.record]))[0]
            wrong_states = np.flatnonzero(self.slot.states != states)
        good: _Mask = np.logical_not(differs.any(axis=1))
        self._note(good, record=self._record and not len(wrong_states))
        if differs.any() or len(wrong_states):
            raise self._error(differs, wrong_states)

    def _differing(self) -> _Mask:
        """Which units of which blocks are not those that were parked."""
        expected, found = self._expected, self.slot.blocks
        found[:, -1] = self._ids.values()
        differs: _Mask = found != expected
        if self._scratch is not None:
            whole, taken = self._scratch
            at, planes = self._partial, slice(0, -1)
            differs[at, planes] = (whole.blocks != expected[at])[:, planes]
            differs[at, planes] |= (taken.blocks != found[at])[:, planes]
        return differs

    def _note(self, blocks: _Mask, *, record: bool) -> None:
        """Remember what was proven, where it stays in RAM."""
        checks = self._checks
        with checks.lock:
            checks.units["blocks"].prove(self._numbers[blocks])
            if record:
                checks.units["checkpoints"].prove(np.array([self._take.record]))
            checks.counters["bytes_verified"] += self.bytes

    def _error(self, differs: _Mask, wrong_states: _Numbers) -> ConversationCorrupt:
        columns, take = self._checks.columns, self._take
        bad: list[Bad] = []
        found: list[tuple[int, str, int, int]] = []
        for row in np.flatnonzero(differs.any(axis=1)).tolist():
            unit = columns.blocks[int(np.flatnonzero(differs[row])[0])]
            bad.append(Bad("blocks", int(self._numbers[row]), unit.layer, unit.name, time.time()))
            start = int(self._whole.token[row])
            found.append((unit.layer, unit.name, start, start + int(self._whole.tokens[row])))
        if len(wrong_states):
            unit = columns.checkpoints[int(wrong_states[0])]
            assert take.record is not None
            bad.append(Bad("checkpoints", take.record, unit.layer, unit.name, time.time()))
            found.append((unit.layer, unit.name, 0, take.count))
        layer, plane, start, end = min(found)
        units = int(np.count_nonzero(differs)) + len(wrong_states)
        sound = int(self._whole.token[differs.any(axis=1)].min(initial=take.count))
        records = {row.number for row in bad if row.kind == "checkpoints"}
        usable = usable_tokens(self._checks.space.geometry.layout, take.version.row, sound, records)
        error = ConversationCorrupt(
            f"{take.name!r}: layer {layer}, {plane!r}, tokens {start} to {end - 1} are not those that were parked "
            f"({units} units differ): what holds them is in quarantine; read its prompt again"
            + (f" from token {usable} on" if usable else ""),
            layer=layer,
            plane=plane,
            tokens=(start, end),
        )
        self._checks.condemn(bad, error)
        return error


class _IdSums:
    """The checksums of the ids of some blocks, read while the rows are on their way."""

    def __init__(self, space: Space, take: Take, spans: Spans) -> None:
        self._space, self._take, self._spans = space, take, spans
        self._values: Values | None = None
        self._lock = threading.Lock()

    def has_states(self, _layer: int) -> bool:
        """See `Sums.has_states`."""
        return False

    def take(self, _layers: Sequence[int]) -> None:
        """See `Sums.take`: the first layers to land are as good a time as any."""
        self.values()

    def copied(self, _address: int, _size: int) -> None:
        """See `Sums.copied`."""

    def values(self) -> Values:
        """The checksum of each span's ids."""
        with self._lock:
            if self._values is None:
                self._values = self._read()
            return self._values

    def _read(self) -> Values:
        spans = self._spans
        if not len(spans):
            return np.zeros(0, dtype=np.uint32)
        first, end = int(spans.token[0]), int(spans.token[-1] + spans.tokens[-1])
        try:
            ids = self._space.read_ids(self._take.version.extents, first, end)
        except MmkvError as error:
            what = f"the ids of {self._take.name!r} cannot be checked: {error}"
            raise TransferError(what, layer=-1, plane=IDS) from error
        return id_checksums(ids, spans, first)


class _Aside:
    """The progress of what is read beside a transfer: it fails with it, and counts in nothing else."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.failed = transfer.failed
        self.released = transfer.released

    @property
    def stopped(self) -> bool:
        """See `Progress.stopped`."""
        return self._transfer.stopped

    def submitted(self, layer: int, event: Event) -> None:
        """See `Progress.submitted`; host memory submits nothing."""

    def landed(self, layer: int) -> None:
        """See `Progress.landed`."""

    def moved(self, path: str, size: int, address: int | None = None) -> None:
        """See `Progress.moved`."""


def _host_share(movers: Movers, placement: Placement, scratch: Scratch) -> Share:
    return Share(movers.host_store, layer_copies(placement, scratch, ()))


def verification_of(
    checks: Checks,
    take: Take,
    slot: Arrays,
    states: Sequence[Mapping[str, Buffer]],
    movers_of: Callable[[Space], Movers],
    *,
    always: bool,
) -> Verification | None:
    """What has to be checked of a take; `None` if it is nothing.

    Parameters
    ----------
    always : bool
        Whether also what was proven before, and lies in RAM since.
    """
    block_tokens, granule = checks.space.geometry.block_tokens, checks.space.geometry.layout.granule
    on_disk = not checks.space.medium.in_ram
    with checks.lock:
        units, numbers = checks.units["blocks"], take.numbers
        tokens = units.tokens(numbers)
        end = np.minimum(take.stop, (take.positions + 1) * block_tokens)
        rows = -(-tokens // granule) * granule
        # Of what was parked without, nothing can be told.
        known = (tokens > 0) & (take.positions * block_tokens + rows >= end)
        wanted = known & (always | ~units.proven(numbers) | (take.is_cold("blocks") & on_disk))
        record = False
        if take.record is not None:
            units, number = checks.units["checkpoints"], np.array([take.record])
            cold = on_disk and bool(take.is_cold("checkpoints").any())
            record = bool(units.tokens(number)[0]) and (always or cold or not units.proven(number)[0])
    if not wanted.any() and not record:
        return None
    return Verification(checks, take, slot, states, movers_of, wanted, record=record)
