"""Break parked bytes at random and see whether the next take tells; take what is whole and see that none does.

A pool holds conversations that were parked, grown, cut, forked and shared. Single corruptions are made behind its back,
in its files: a bit, two words, rows, units of two blocks, of two planes or of two layers change places, a unit is as it
was before it was written, or an id is another. Each must make a take that touches the unit raise, whatever prefix it
takes and whatever its slot has, and a park must bring the bytes back. Clean takes must neither raise nor give a wrong
byte.

    python benchmarks/corruptions.py
    python benchmarks/corruptions.py --corruptions 1000 --clean 1000 --place disk
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.results import Output
from benchmarks.rig import console
from benchmarks.work import default_directory, default_disk, temporary_directory
from mmkv.geometry import Extent
from mmkv.store.files import PoolFile

__all__ = ["KINDS", "PLACES", "Trials"]

PLACES = ("ram", "disk", "tiers")
_LAYER = mmkv.Layer(
    {"k": mmkv.Plane("int8", (2, 8)), "v": mmkv.Plane("uint8", (16,)), "scale": mmkv.Plane("float16", (4,))}
)
LAYOUT = mmkv.Layout([_LAYER] * 3, model="corruptions")
_BLOCK = 512
_MOST_TOKENS = 5 * _BLOCK
_FILL = 0xA5

Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Place:
    """Where the parked rows of one unit lie."""

    file: PoolFile
    offset: int
    row_bytes: int
    rows: int
    layer: int
    name: str

    def read(self) -> Octets:
        """The bytes."""
        return np.frombuffer(os.pread(self.file.fd, self.row_bytes * self.rows, self.offset), dtype=np.uint8).copy()

    def write(self, octets: Octets) -> None:
        """Replace them."""
        os.pwrite(self.file.fd, octets.tobytes(), self.offset)


@dataclass
class Parked:
    """What a conversation holds: its ids, and the row of each of its tokens, of all planes of all layers."""

    ids: npt.NDArray[np.int64]
    rows: Octets


@dataclass
class Trials:
    """A pool, what it must give, and counts of what was found.

    Parameters
    ----------
    directory : Path
        Where the pool is made.
    place : str
        `ram`, `disk`, or `tiers` for a disk with a hot tier, in whose files the bytes are broken then.
    hot : Path, optional
        Where the hot tier is made.
    """

    directory: Path
    place: str
    hot: Path | None = None
    seed: int = 0
    made: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    wrong: int = 0
    clean: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        tiers: dict[str, Any] = {} if self.hot is None else {"hot": self.hot, "hot_capacity": "16MiB"}
        self.pool = mmkv.Pool.open(
            self.directory, LAYOUT, capacity="32MiB", verify="always", min_free_ram=0, threads=2, **tiers
        )
        self.parked: dict[str, Parked] = {}
        self.slot = mmkv.Slot.allocate(LAYOUT, _MOST_TOKENS + 7)

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()

    # The slot as rows of bytes, layer after layer and plane after plane.

    def _planes(self) -> list[tuple[int, str, Octets]]:
        return [
            (layer, name, self.slot.arrays[layer][name].reshape(_MOST_TOKENS + 7, -1).view(np.uint8))
            for layer, spec in enumerate(LAYOUT.layers)
            for name in spec.planes
        ]

    def _fill(self, rows: Octets, start: int = 0) -> None:
        at = 0
        for _, _, array in self._planes():
            width = array.shape[1]
            array[:] = _FILL
            array[start : len(rows)] = rows[start:, at : at + width]
            at += width

    def _holds(self, rows: Octets, have: int) -> bool:
        """Whether the slot holds the rows from `have` on, and no byte of others was touched."""
        at = 0
        for _, _, array in self._planes():
            width = array.shape[1]
            expected = np.full_like(array, _FILL)
            expected[have : len(rows)] = rows[have:, at : at + width]
            at += width
            if not np.array_equal(array, expected):
                return False
        return True

    def _noise(self, tokens: int) -> Octets:
        return self.rng.integers(0, 256, (tokens, LAYOUT.token_bytes), dtype=np.uint8)

    # What the pool holds

    def park(self, name: str, parked: Parked) -> None:
        """Park a conversation, and know it."""
        self._fill(parked.rows)
        self.pool.park(name, self.slot, parked.ids).result(60)
        self.parked[name] = parked

    def new(self, tokens: int) -> Parked:
        """A conversation that no other begins like."""
        return Parked(self.rng.integers(0, 1 << 60, tokens), self._noise(tokens))

    def grown(self, former: Parked, keep: int, tokens: int) -> Parked:
        """A conversation that begins like another one, and goes on in its own way."""
        new = self.new(tokens)
        return Parked(np.concatenate([former.ids[:keep], new.ids]), np.concatenate([former.rows[:keep], new.rows]))

    def step(self) -> None:
        """Park something: a new conversation, a grown, edited, cut or forked one, or one that shares a prefix."""
        rng, names = self.rng, sorted(self.parked)
        name = f"c{rng.integers(6)}"
        former = self.parked.get(name)
        match int(rng.integers(6)):
            case 0 | 1 if former is not None and len(former.ids) < _MOST_TOKENS:
                most = _MOST_TOKENS - len(former.ids)
                self.park(name, self.grown(former, len(former.ids), int(rng.integers(1, most + 1))))
            case 2 if former is not None and len(former.ids) > 1:
                keep = int(rng.integers(1, len(former.ids)))
                self.park(name, self.grown(former, keep, int(rng.integers(1, _MOST_TOKENS - keep + 1))))
            case 3 if former is not None and len(former.ids) > 1:
                keep = int(rng.integers(1, len(former.ids)))
                self.park(name, Parked(former.ids[:keep], former.rows[:keep]))
            case 4 if names and former is None:
                source = self.parked[str(rng.choice(names))]
                keep = int(rng.integers(1, len(source.ids) + 1))
                self.park(name, self.grown(source, keep, int(rng.integers(1, _MOST_TOKENS - keep + 2))))
            case 5 if names and former is None:
                source_name = str(rng.choice(names))
                source = self.parked[source_name]
                keep = int(rng.integers(1, len(source.ids) + 1))
                self.pool.fork(source_name, name, keep)
                self.parked[name] = Parked(source.ids[:keep], source.rows[:keep])
            case _:
                if former is not None:
                    self.pool.drop(name)
                    del self.parked[name]
                self.park(name, self.new(int(rng.integers(1, _MOST_TOKENS + 1))))

    # Clean takes

    def take_clean(self) -> None:
        """Take some prefix of something, with some rows in the slot already; nothing may be wrong."""
        rng = self.rng
        if not self.parked or rng.random() < 0.2:
            self.step()
        name = str(rng.choice(sorted(self.parked)))
        parked = self.parked[name]
        tokens = len(parked.ids) if rng.random() < 0.3 else int(rng.integers(1, len(parked.ids) + 1))
        have = 0 if rng.random() < 0.3 else int(rng.integers(0, tokens + 1))
        self._fill(parked.rows[:0])
        self.clean += 1
        try:
            if rng.random() < 0.3:
                with self.pool.match(parked.ids[:tokens]) as match:
                    self.pool.take(match, self.slot, have=have).result(60)
            else:
                self.pool.take(name, self.slot, tokens=tokens, have=have).result(60)
        except mmkv.MmkvError as error:
            self.alarms.append(str(error))
            return
        self.wrong += not self._holds(parked.rows[:tokens], have)

    # Corruptions

    def corrupt(self) -> None:
        """Break something, see that a take tells, and park it anew."""
        rng = self.rng
        if not self.parked or rng.random() < 0.1:
            self.step()
        name = str(rng.choice(sorted(self.parked)))
        parked = self.parked[name]
        kind = list(KINDS)[int(rng.integers(len(KINDS)))]
        broken = KINDS[kind](self, name)
        if broken is None:
            return self.corrupt()
        self.made[kind] += 1
        place, block, restore = broken
        rows = range(block * _BLOCK, min(len(parked.ids), (block + 1) * _BLOCK))
        token = int(rng.integers(rows.start, rows.stop))
        have, tokens = int(rng.integers(0, token + 1)), int(rng.integers(token + 1, len(parked.ids) + 1))
        if rng.random() < 0.3:
            have, tokens = 0, len(parked.ids)
        self._fill(parked.rows[:0])
        try:
            self.pool.take(name, self.slot, tokens=tokens, have=have).result(60)
        except mmkv.ConversationCorrupt:
            # Others may share the block: of all, what follows is lost.
            self._park_anew()
        else:
            what = f"{kind} in layer {place.layer}, {place.name!r}, block {block} of {len(parked.ids)} tokens"
            self.missed.append(f"{what}, taken from {have} to {tokens}")
            restore()
        return None

    def _park_anew(self) -> None:
        for name in sorted(self.parked):
            self.park(name, self.parked[name])

    def places(self, name: str, block: int) -> list[Place]:
        """Where the units of a block of a conversation lie, the ids last."""
        pool = self.pool
        with pool._lock:
            version = pool._ledger.conversations[name].version
            number = [n for first, count in version.extents for n in range(first, first + count)][block]
            space, at = pool._space, number
            if pool._hot is not None:
                hot = int(pool._hot.residents["blocks"].places(np.array([number]))[0])
                if hot >= 0:
                    space, at = pool._hot.space, hot
        rows = min(len(self.parked[name].ids) - block * _BLOCK, _BLOCK)
        runs = space.geometry.token_runs([Extent(at, 1)], 0, rows)
        found = []
        for layer, spec in enumerate(LAYOUT.layers):
            file = space.planes[layer]
            assert file is not None
            for plane, of in spec.planes.items():
                offset = int(space.geometry.plane_offsets(runs, layer, plane)[0])
                found.append(Place(file, offset, of.token_bytes, rows, layer, plane))
        runs = pool._space.geometry.token_runs([Extent(number, 1)], 0, rows)
        found.append(Place(pool._space.tokens, int(pool._space.geometry.id_offsets(runs)[0]), 8, rows, -1, "token_ids"))
        return found


Broken = tuple[Place, int, Callable[[], None]]


def _some(trials: Trials, name: str) -> tuple[int, list[Place]]:
    blocks = -(-len(trials.parked[name].ids) // _BLOCK)
    block = int(trials.rng.integers(blocks))
    return block, trials.places(name, block)


def _broken(block: int, changes: list[tuple[Place, Octets, Octets]]) -> Broken | None:
    """Make changes, given as places with what they hold and what they are to hold."""
    if all(np.array_equal(before, after) for _, before, after in changes):
        return None
    for place, _, after in changes:
        place.write(after)

    def restore() -> None:
        for place, before, _ in changes:
            place.write(before)

    return changes[0][0], block, restore


def _bit(trials: Trials, name: str) -> Broken | None:
    block, places = _some(trials, name)
    place = places[int(trials.rng.integers(len(places)))]
    before = place.read()
    after = before.copy()
    after[int(trials.rng.integers(len(after)))] ^= np.uint8(1 << int(trials.rng.integers(8)))
    return _broken(block, [(place, before, after)])


def _swapped(trials: Trials, name: str, width: Callable[[Place], int]) -> Broken | None:
    """Two pieces of so many bytes of one unit change places."""
    block, places = _some(trials, name)
    place = places[int(trials.rng.integers(len(places) - 1))]
    size = width(place)
    before = place.read()
    pieces = len(before) // size
    if pieces < 2:
        return None
    one, other = (int(piece) for piece in trials.rng.choice(pieces, 2, replace=False))
    after = before.copy()
    after[one * size : (one + 1) * size] = before[other * size : (other + 1) * size]
    after[other * size : (other + 1) * size] = before[one * size : (one + 1) * size]
    return _broken(block, [(place, before, after)])


def _word_swap(trials: Trials, name: str) -> Broken | None:
    return _swapped(trials, name, lambda _: 4)


def _row_swap(trials: Trials, name: str) -> Broken | None:
    return _swapped(trials, name, lambda place: place.row_bytes)


def _exchange(block: int, one: Place, other: Place) -> Broken | None:
    """Two units change places, as far as both have rows."""
    size = min(one.rows * one.row_bytes, other.rows * other.row_bytes)
    here, there = one.read(), other.read()
    return _broken(
        block,
        [
            (one, here, np.concatenate([there[:size], here[size:]])),
            (other, there, np.concatenate([here[:size], there[size:]])),
        ],
    )


def _block_swap(trials: Trials, name: str) -> Broken | None:
    blocks = -(-len(trials.parked[name].ids) // _BLOCK)
    if blocks < 2:
        return None
    one, other = (int(block) for block in trials.rng.choice(blocks, 2, replace=False))
    plane = int(trials.rng.integers(9))
    return _exchange(one, trials.places(name, one)[plane], trials.places(name, other)[plane])


def _plane_swap(trials: Trials, name: str) -> Broken | None:
    block, places = _some(trials, name)
    layer = 3 * int(trials.rng.integers(3))
    return _exchange(block, places[layer], places[layer + 1])


def _layer_swap(trials: Trials, name: str) -> Broken | None:
    block, places = _some(trials, name)
    one, other = (3 * int(layer) for layer in trials.rng.choice(3, 2, replace=False))
    plane = int(trials.rng.integers(3))
    return _exchange(block, places[one + plane], places[other + plane])


def _stale(trials: Trials, name: str) -> Broken | None:
    """The unit holds what another conversation had there before: a write is missing."""
    others = [other for other in sorted(trials.parked) if other != name]
    if not others:
        return None
    _, old = _some(trials, str(trials.rng.choice(others)))
    block, places = _some(trials, name)
    plane = int(trials.rng.integers(len(places) - 1))
    before, stale = places[plane].read(), old[plane].read()[: places[plane].rows * places[plane].row_bytes]
    return _broken(block, [(places[plane], before, np.concatenate([stale, before[len(stale) :]]))])


def _missing(trials: Trials, name: str) -> Broken | None:
    """The last rows of a unit were not written: zeros, as in a new segment."""
    block, places = _some(trials, name)
    place = places[int(trials.rng.integers(len(places) - 1))]
    before = place.read()
    after = before.copy()
    after[int(trials.rng.integers(place.rows)) * place.row_bytes :] = 0
    return _broken(block, [(place, before, after)])


KINDS: dict[str, Callable[[Trials, str], Broken | None]] = {
    "bit": _bit,
    "word swap": _word_swap,
    "row swap": _row_swap,
    "block swap": _block_swap,
    "plane swap": _plane_swap,
    "layer swap": _layer_swap,
    "stale block": _stale,
    "missing write": _missing,
}


def main(
    corruptions: Annotated[int, typer.Option(min=0, help="Single corruptions, over all places.")] = 10_000,
    clean: Annotated[int, typer.Option(min=0, help="Clean takes, over all places.")] = 10_000,
    place: Annotated[list[str] | None, typer.Option(help=f"Only these; any of {', '.join(PLACES)}.")] = None,
    seed: Annotated[int, typer.Option(help="Another one makes other corruptions.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
) -> None:
    """Break parked bytes at random and see whether the next take tells; take what is whole and see that none does."""
    places = place or list(PLACES)
    unknown = sorted(set(places) - set(PLACES))
    if unknown:
        raise typer.BadParameter(f"--place {unknown[0]} is unknown: it is one of {', '.join(PLACES)}")
    output = Output(json_file, add=False)
    failed = False
    for index, where in enumerate(places):
        share = [(number + index) // len(places) for number in (corruptions, clean)]
        with temporary_directory(default_directory()) as in_ram, temporary_directory(default_disk()) as on_disk:
            directory = (in_ram if where == "ram" else on_disk) / "pool"
            trials = Trials(directory, where, in_ram / "hot" if where == "tiers" else None, seed + index)
            started = time.perf_counter()
            try:
                for _ in track(range(share[1]), f"{where}: clean takes", console=console, transient=True):
                    trials.take_clean()
                for _ in track(range(share[0]), f"{where}: corruptions", console=console, transient=True):
                    trials.corrupt()
            finally:
                trials.close()
        made = sum(trials.made.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(trials.made.items()))
        console.print(
            f"{where}: {made - len(trials.missed)} of {made} corruptions found ({kinds}); {len(trials.alarms)} false "
            f"alarms and {trials.wrong} wrong takes of {trials.clean}; {time.perf_counter() - started:.0f} s"
        )
        for text in [*trials.missed[:5], *trials.alarms[:5]]:
            console.print(f"  [red]{text}[/red]", markup=True)
        output.update(
            {
                where: {
                    "corruptions": made,
                    "missed": len(trials.missed),
                    "clean": trials.clean,
                    "false_alarms": len(trials.alarms),
                    "wrong": trials.wrong,
                }
            }
        )
        failed = failed or bool(trials.missed or trials.alarms or trials.wrong)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
