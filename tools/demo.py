"""Five conversations take turns on four slots, on a pool in RAM: what each turn's moves cost.

Replays a bug report on an LLM engine that moved every conversation whole, out of its slot and back into one, at each
turn. Here only what is new is parked. The bytes of every take are checked.

    make demo
    .venv/bin/python tools/demo.py --help
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import mmkv
from mmkv import device as cuda
from mmkv.medium import Medium, available_ram, medium_of

CONVERSATIONS = 5
SLOTS = 4
TURN_TOKENS = 383
# The report's model: keys of 8 bits, packed values of 4, their scales; 816 bytes a token and layer.
LAYOUT = mmkv.Layout(
    [
        mmkv.Layer(
            {
                "k": mmkv.Plane("int8", (4, 128)),
                "v": mmkv.Plane("uint8", (4, 64)),
                "scale": mmkv.Plane("float16", (24,)),
            }
        )
    ]
    * 48,
    model="demo, 48 layers x 816 bytes",
)
# What the pool holds at most, in conversations: the five, one that is parked whole for comparison, and some slack.
POOL_CONVERSATIONS = CONVERSATIONS + 1.5
# Bytes of a conversation that keep the demo under a minute: on two cores, and with a GPU.
LARGEST = {"cpu": 500_000_000, "cuda": 4_000_000_000}
# Less room than this on /dev/shm (a container has 64 MB there by default), and the pool goes to a disk.
LEAST_SHM = 1 << 30

console = Console(highlight=False)


class Noise:
    """The KV caches that no model computed: rows of random bytes, other ones for each conversation, layer and plane.

    A plane's rows are a window of one random buffer, so that they can be made, and checked, at the speed of memory.
    """

    def __init__(self, xp: ModuleType, max_tokens: int) -> None:
        self._xp = xp
        self._starts: dict[tuple[str, int, str], int] = {}
        self._random = np.random.default_rng()
        self._spread = 1 << 21
        largest = max(plane.token_bytes for layer in LAYOUT.layers for plane in layer.planes.values())
        words = largest // 8 * max_tokens + self._spread
        self._words = xp.asarray(self._random.integers(0, 1 << 63, words, dtype=np.int64))

    def _windows(self, conversation: str, slot: mmkv.Slot, start: int, stop: int) -> Iterator[tuple[Any, Any]]:
        """For each plane: rows `[start, stop)` of the slot as words, and what they must be."""
        for index, layer in enumerate(slot.arrays):
            for name, array in layer.items():
                window = self._starts.setdefault((conversation, index, name), int(self._random.integers(self._spread)))
                rows = array.view(self._xp.uint8).reshape(array.shape[0], -1)[start:stop].view(self._xp.int64)
                words = rows.shape[1]
                yield rows, self._words[window + start * words : window + stop * words].reshape(rows.shape)

    def write(self, conversation: str, slot: mmkv.Slot, start: int, stop: int) -> None:
        """Compute a conversation's rows `[start, stop)` into a slot."""
        for rows, expected in self._windows(conversation, slot, start, stop):
            rows[:] = expected

    def check(self, conversation: str, slot: mmkv.Slot, tokens: int) -> None:
        """End the demo unless the slot holds the conversation's first `tokens` rows."""
        for rows, expected in self._windows(conversation, slot, 0, tokens):
            if not self._xp.array_equal(rows, expected):
                raise SystemExit(f"WRONG BYTES: the slot does not hold what was parked of {conversation}")


@dataclass
class Agent:
    """A conversation: its name and its ids so far."""

    name: str
    ids: np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Move:
    """One park or take, as it was measured."""

    bytes: int
    seconds: float
    path: str


@dataclass
class Tax:
    """The moves of the turns of one way of working, by kind."""

    gave_back: list[Move] = field(default_factory=list)
    takes: list[Move] = field(default_factory=list)
    parked: list[Move] = field(default_factory=list)

    def milliseconds(self, kind: str) -> float:
        """The median time of one kind of move."""
        moves: list[Move] = getattr(self, kind)
        return 1e3 * statistics.median(move.seconds for move in moves)

    def turn_milliseconds(self) -> float:
        """The median of a turn's time, all its moves together."""
        turns = zip(self.gave_back, self.takes, self.parked, strict=True)
        return 1e3 * statistics.median(sum(move.seconds for move in turn) for turn in turns)

    def turn_bytes(self) -> float:
        """The median of a turn's bytes."""
        turns = zip(self.gave_back, self.takes, self.parked, strict=True)
        return statistics.median(sum(move.bytes for move in turn) for turn in turns)


def size_text(size: float) -> str:
    """A size as people read it."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


class Demo:
    """The engine that is not there: slots, agents, and what it does each turn."""

    def __init__(self, pool: mmkv.Pool, slots: list[mmkv.Slot], noise: Noise, prompt_tokens: int) -> None:
        self.pool = pool
        self.slots = slots
        self.noise = noise
        self.agents = [Agent(f"agent-{n}", self._new_ids(prompt_tokens)) for n in range(1, CONVERSATIONS + 1)]
        # Who is in which slot; the slot that was used longest ago comes first.
        self.occupants: dict[int, Agent] = {}
        self.tax = Tax()
        self.whole = Tax()

    @staticmethod
    def _new_ids(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng().integers(0, 150_000, count, dtype=np.int64)

    def _move(self, what: str, tokens: int, start: Callable[[], mmkv.Transfer], *, show: bool = True) -> Move:
        started = time.perf_counter()
        receipt = start().result()
        seconds = time.perf_counter() - started
        if show:
            rate = f"{receipt.bytes / seconds / 1e9:5.2f} GB/s" if receipt.bytes else ""
            moved = f"{size_text(receipt.bytes):>8} moved {1e3 * seconds:8.1f} ms {rate}"
            console.print(f"  {what:<24} {tokens:>8,} tokens {moved}", soft_wrap=True)
        return Move(receipt.bytes, seconds, receipt.path)

    def _park(self, verb: str, number: int, agent: Agent) -> Move:
        what = f"slot {number} {verb} {agent.name}"
        return self._move(what, len(agent.ids), lambda: self.pool.park(agent.name, self.slots[number], agent.ids))

    def read_prompt(self, agent: Agent) -> None:
        """Compute an agent's prompt in a slot, and park it."""
        number = self._free_slot()
        self.noise.write(agent.name, self.slots[number], 0, len(agent.ids))
        self._park("parked", number, agent)
        self.occupants[number] = agent

    def _free_slot(self) -> int:
        if len(self.occupants) < len(self.slots):
            return len(self.occupants)
        number = next(iter(self.occupants))
        del self.occupants[number]
        return number

    def turn(self, agent: Agent) -> None:
        """Bring an agent into the slot that was used longest ago, let it say something, and park that."""
        number = next(iter(self.occupants))
        slot, leaving = self.slots[number], self.occupants[number]
        self.tax.gave_back.append(self._park("gave back", number, leaving))
        del self.occupants[number]
        parked = len(agent.ids)
        agent.ids = np.concatenate([agent.ids, self._new_ids(TURN_TOKENS)])
        with self.pool.match(agent.ids) as match:
            if match.tokens != parked:
                raise SystemExit(f"only {match.tokens} of {parked} tokens of {agent.name} were found")
            what = f"slot {number} takes {agent.name}"
            self.tax.takes.append(self._move(what, parked, lambda: self.pool.take(match, slot)))
        self.noise.check(agent.name, slot, parked)
        self.noise.write(agent.name, slot, parked, len(agent.ids))
        self.tax.parked.append(self._park("parked", number, agent))
        self.occupants[number] = agent

    def whole_turn(self, agent: Agent) -> None:
        """The same three moves without what makes them small: everything moves, each time."""
        number = next(number for number, occupant in self.occupants.items() if occupant is agent)
        slot, tokens, name = self.slots[number], len(agent.ids), "whole"
        for verb in ("gave back", "takes", "parked"):
            if verb == "takes":
                move = self._move("", tokens, lambda: self.pool.take(name, slot), show=False)
                self.noise.check(agent.name, slot, tokens)
                self.whole.takes.append(move)
                self.pool.drop(name)
                continue
            move = self._move("", tokens, lambda: self.pool.park(name, slot, agent.ids, share=False), show=False)
            (self.whole.gave_back if verb == "gave back" else self.whole.parked).append(move)
        self.pool.drop(name)

    def run(self, turns: int) -> None:
        """All of it."""
        console.print("\n[bold]Reading the prompts[/bold]")
        for agent in self.agents:
            self.read_prompt(agent)
        for turn in range(turns):
            agent = self.agents[turn % len(self.agents)]
            console.print(f"\n[bold]Turn {turn + 1}[/bold], {agent.name}, {TURN_TOKENS} new tokens")
            self.turn(agent)
        # Two rounds, of which the first finds blocks that were never written and does not count.
        for count, agent in enumerate([*self.occupants.values()] * 2):
            if count == len(self.occupants):
                self.whole = Tax()
            self.whole_turn(agent)

    def show_tax(self) -> None:
        """Print what a turn cost, beside what it costs to move everything."""
        table = Table(title="Tax a turn, medians", title_justify="left", box=None, header_style="bold", pad_edge=False)
        for heading in ("", "gave back", "takes", "parked", "together", "moved"):
            table.add_column(heading, justify="left" if not heading else "right")
        for what, tax in (("mmkv, only what is new", self.tax), ("everything each time", self.whole)):
            times = [tax.milliseconds(kind) for kind in ("gave_back", "takes", "parked")]
            cells = [f"{value:.1f} ms" for value in (*times, tax.turn_milliseconds())]
            table.add_row(what, *cells, size_text(tax.turn_bytes()))
        console.print()
        console.print(table)
        paths = sorted({move.path for move in (*self.tax.takes, *self.tax.parked) if move.bytes})
        console.print(
            f"Every take was checked, {len(self.tax.takes) + 2 * len(self.whole.takes)} of them, byte by byte. "
            f"Path: {', '.join(paths)}."
        )


@contextlib.contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A directory that is gone at the end, also after Ctrl-C or a `kill`."""

    def terminate(*_: object) -> None:
        raise SystemExit(143)

    former = signal.signal(signal.SIGTERM, terminate)
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="mmkv-demo-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        signal.signal(signal.SIGTERM, former)


def default_directory() -> Path:
    """A tmpfs with some room where there is one, the system's directory for temporary files elsewhere."""
    shm = Path("/dev/shm")
    has_room = shm.is_dir() and min(medium_of(shm).free_bytes(), available_ram()) >= LEAST_SHM
    return shm if has_room else Path(tempfile.gettempdir())


def fitting_tokens(medium: Medium, kind: str) -> int:
    """How many tokens a conversation may grow to, so that slots and pool fit this machine."""
    rooms = [LARGEST[kind], int(0.8 * medium.free_bytes() / POOL_CONVERSATIONS)]
    memory = 0.4 * available_ram()
    if kind == "cuda":
        import cupy

        rooms.append(int(0.5 * cupy.cuda.runtime.memGetInfo()[0] / SLOTS))
        if medium.in_ram:
            rooms.append(int(memory / POOL_CONVERSATIONS))
    else:
        rooms.append(int(memory / (SLOTS + (POOL_CONVERSATIONS if medium.in_ram else 0))))
    return min(rooms) // LAYOUT.token_bytes


def main(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; in RAM if left out.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt; what fits if left out.", show_default=False)
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="How many turns.")] = 10,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.", show_default=False)
    ] = None,
) -> None:
    """Five conversations take turns on four slots, on a pool in RAM: what each turn's moves cost."""
    started = time.monotonic()
    if device is None:
        device = "cuda:0" if cuda.available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in LARGEST:
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda nor cuda:N", param_hint="--device")
    if kind == "cuda" and not cuda.available():
        raise typer.BadParameter("CuPy is not installed, or sees no GPU", param_hint="--device")
    xp: ModuleType = np
    if kind == "cuda":
        import cupy

        xp = cupy
        cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()
    parent = directory or default_directory()
    with fresh_directory(parent) as made:
        medium = medium_of(made)
        growth = TURN_TOKENS * (turns // CONVERSATIONS + 1)
        if tokens is None:
            tokens = fitting_tokens(medium, kind) - growth
            if tokens < 1:
                raise SystemExit(f"demo: too little room in {parent}, or too little memory: choose another --dir")
        max_tokens = tokens + growth
        console.print(
            f"{CONVERSATIONS} conversations on {SLOTS} slots: {tokens:,} tokens each, {len(LAYOUT.layers)} layers x "
            f"{LAYOUT.layers[0].token_bytes} bytes = {size_text(tokens * LAYOUT.token_bytes)}\n"
            f"slots on {device}, pool on {medium.fs_type} in {made}"
        )
        slots = [mmkv.Slot.allocate(LAYOUT, max_tokens, device) for _ in range(SLOTS)]
        capacity = int(POOL_CONVERSATIONS * max_tokens * (LAYOUT.token_bytes + 8)) + (64 << 20)
        with mmkv.Pool.open(made / "pool", LAYOUT, capacity=capacity) as pool:
            demo = Demo(pool, slots, Noise(xp, max_tokens), tokens)
            demo.run(turns)
            demo.show_tax()
            console.print("\n[bold]$ mmkv-inspect list POOL[/bold]")
            subprocess.run([sys.executable, "-m", "mmkv_inspect", "list", str(made / "pool")], check=True)
    console.print(f"\nDone in {time.monotonic() - started:.0f} s; the pool is removed.")


if __name__ == "__main__":
    try:
        typer.run(main)
    except mmkv.MmkvError as error:
        sys.exit(f"demo: {error}")
