"""Five conversations take turns on four slots: the tax that each turn pays, as a bug report gives it, in three lines.

Each turn, the slot that was used longest ago gave back its conversation, takes the one whose turn it is, and that one,
some tokens longer, is parked. The report's engine moved everything each time, through pageable memory. Page-locked RAM
stands here twice, moving everything and moving only what is new, so that what comes from moving less and what comes
from the path can be told apart. Every take is checked byte by byte.

    python benchmarks/rotation.py --tokens 4096 --json rotation.json --plot rotation.png
    python benchmarks/rotation.py --device cuda:0 --json rotation.json --plot rotation.png
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks.asking import fail_if_parts_did, require_plots
from benchmarks.machine import Bus, provenance
from benchmarks.memory import DeviceMemory, Memory, PlaneRows, allocate_slot, memory_of, rows_of
from benchmarks.movers import MOVERS, Mover
from benchmarks.results import TARGETS, Output, median, reason_of, spread
from benchmarks.rig import console
from benchmarks.work import Ids, Noise, default_directory, layout_of, new_ids, temporary_directory, wipe

LINES = ("gave_back", "takes", "parked")


@dataclass
class Agent:
    """A conversation: its name, its ids, of which so many are spoken, and the tokens that were parked last."""

    name: str
    ids: Ids
    tokens: int


@dataclass
class Tax:
    """What each turn cost: seconds by line of the report."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {line: [] for line in LINES})

    @property
    def turns(self) -> list[float]:
        """The seconds of each turn, its lines together."""
        return [sum(lines) for lines in zip(*self.seconds.values(), strict=True)]


class Rotation:
    """The engine that is not there: its slots, and its conversations, which are in turn in one of them.

    Parameters
    ----------
    slots : int
        How many slots; there is one conversation more.
    tokens, turns, new_tokens : int
        Tokens of each prompt; how many turns; tokens that a turn adds.
    """

    def __init__(
        self, memory: Memory, layout: mmkv.Layout, slots: int, conversations: int, tokens: int, turns: int,
        new_tokens: int,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.layout = layout
        self.conversations = conversations
        self.prompt = tokens
        self.turns = turns
        self.new_tokens = new_tokens
        self.max_tokens = tokens + (turns // conversations + 2) * new_tokens
        self.slots = [allocate_slot(memory, layout, self.max_tokens) for _ in range(slots)]
        self.rows: list[list[PlaneRows]] = [rows_of(slot.arrays) for slot in self.slots]
        self.noise = Noise(memory, max(plane.entries * plane.row_bytes for plane in self.rows[0]))

    def run(self, mover: Mover, advance: Callable[[], None]) -> Tax:
        """Read the prompts, and let the turns pass."""
        tax = Tax()
        agents = [Agent(f"agent-{n}", new_ids(self.max_tokens), self.prompt) for n in range(self.conversations)]
        # Who is in which slot; the slot that was used longest ago comes first.
        occupants: dict[int, Agent] = {}
        for agent in agents:
            number = len(occupants) if len(occupants) < len(self.slots) else self._oldest(mover, occupants)
            self.noise.write(agent.name, self.rows[number], 0, agent.tokens)
            mover.parked(number, agent.name, agent.ids[: agent.tokens])
            occupants[number] = agent
        mover.ready()
        for turn in range(min(self.turns, mover.most_turns)):
            self._turn(mover, occupants, agents[turn % len(agents)], tax)
            advance()
        return tax

    def _oldest(self, mover: Mover, occupants: dict[int, Agent]) -> int:
        """Free the slot that was used longest ago."""
        number = next(iter(occupants))
        leaving = occupants.pop(number)
        mover.gave_back(number, leaving.name, leaving.ids[: leaving.tokens])
        return number

    def _turn(self, mover: Mover, occupants: dict[int, Agent], agent: Agent, tax: Tax) -> None:
        number = next(iter(occupants))
        if agent in occupants.values():
            raise RuntimeError(f"{agent.name} is in a slot already: choose more conversations than slots")
        leaving = occupants.pop(number)
        before = leaving.ids[: leaving.tokens]
        parked = agent.tokens
        times = [self._seconds(lambda: mover.gave_back(number, leaving.name, before))]
        if mover.clears:
            wipe(self.memory, self.rows[number])
        times.append(
            self._seconds(lambda: mover.takes(number, agent.name, parked, leaving.name, before))
        )  # fmt: skip
        self.noise.require(agent.name, self.rows[number], parked, mover.name)
        agent.tokens += self.new_tokens
        self.noise.write(agent.name, self.rows[number], parked, agent.tokens)
        ids = agent.ids[: agent.tokens]
        times.append(self._seconds(lambda: mover.parked(number, agent.name, ids)))
        occupants[number] = agent
        for line, seconds in zip(LINES, times, strict=True):
            tax.seconds[line].append(seconds)

    def _seconds(self, work: Callable[[], object]) -> float:
        self.memory.synchronize()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


def measure(rotation: Rotation, names: Sequence[str], directory: Path, output: Output, bus: Bus | None) -> None:
    """Let each way of moving have its rotation, one after the other: each needs the memory for all conversations."""
    for name in names:
        kind = MOVERS[name]
        title = kind.title if rotation.memory.on_device else kind.title.replace("page-locked RAM", "RAM")
        try:
            with _made(name, rotation, directory) as mover:
                tax = rotation.run(mover, lambda: bus.measure() if bus is not None else None)
                found = {**record(tax), "path": mover.path}
        except Exception as error:
            console.print(f"[red]{title}:[/red] {reason_of(error)}", markup=True)
            output.update({"contenders": {name: {"title": title, "reason": reason_of(error)}}})
            output.failed(title, error)
            continue
        output.update({"contenders": {name: {"title": title, **found}}})
        console.print(f"{title}: {found['tax_ms']:.1f} ms a turn")


@contextmanager
def _made(name: str, rotation: Rotation, directory: Path) -> Iterator[Mover]:
    mover: Mover = MOVERS[name](
        rotation.memory, rotation.layout, rotation.slots, rotation.rows, rotation.max_tokens, directory / name
    )
    try:
        yield mover
    finally:
        mover.close()


def record(tax: Tax) -> dict[str, Any]:
    """The medians of each line and of a turn, in milliseconds."""
    lines = {f"{line}_ms": 1e3 * median(times) for line, times in tax.seconds.items()}
    turns = [1e3 * seconds for seconds in tax.turns]
    return {**lines, "tax_ms": median(turns), "tax_range_ms": spread(turns), "turns": len(turns)}


def figures(output: Output) -> None:
    """How often the others' tax mmkv's is."""
    taxes = {name: found["tax_ms"] for name, found in output.data.get("contenders", {}).items() if "tax_ms" in found}
    pairs = {
        "tax_report": ("report", "mmkv"),
        "tax_everything": ("ram_everything", "mmkv"),
        "tax_new": ("ram_new", "mmkv"),
        "tax_swap": ("mmkv", "mmkv_swap"),
    }
    for figure, (other, ours) in pairs.items():
        if other in taxes and ours in taxes:
            output.figure(figure, taxes[other] / taxes[ours], ms=taxes[ours], other_ms=taxes[other])


def show(data: dict[str, Any]) -> None:
    """Print the tax, line by line."""
    table = Table("Tax a turn, ms", "gave back", "takes", "parked", "together", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for found in data["contenders"].values():
        cells = [found.get(f"{line}_ms") for line in (*LINES, "tax")]
        table.add_row(found["title"], *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    console.print(table)
    for name, figure in data.get("figures", {}).items():
        if name.startswith("tax") and figure["value"] is not None:
            wanted = "" if figure["met"] is None else f" ({figure['bound']} {figure['target']:g})"
            console.print(f"{TARGETS[name].what}: {figure['value']:.1f}{wanted}")


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of each prompt; 4,096, with a device 131,072 if left out.", show_default=False
        ),
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token in one layer.")] = 816,
    turns: Annotated[int, typer.Option(min=1, help="How many turns; of the slowest way 5 at most.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a turn adds.")] = 383,
    conversations: Annotated[int, typer.Option(min=2, help="How many conversations.")] = 5,
    slots: Annotated[int, typer.Option(min=1, help="How many slots.")] = 4,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the slots lie: cpu, or cuda:0 and so on.")] = "cpu",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Only these; any of {', '.join(MOVERS)}.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Add to what the file holds.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.", show_default=False)
    ] = None,
) -> None:
    """Conversations take turns on fewer slots: the tax a turn, for each way of moving them."""
    unknown = sorted(set(only or []) - set(MOVERS))
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]} is unknown: it is one of {', '.join(MOVERS)}")
    if conversations <= slots:
        raise typer.BadParameter("a rotation needs more --conversations than --slots")
    require_plots(plot_file)
    tokens = tokens or (4096 if device == "cpu" else 131_072)
    output = Output(json_file, add=add)
    memory = memory_of(device)
    parent = default_directory() if directory is None else directory
    with temporary_directory(parent) as made:
        rotation = Rotation(memory, layout_of(layers, row_bytes), slots, conversations, tokens, turns, new_tokens)
        size = rotation.layout.token_bytes * tokens
        console.print(
            f"{conversations} conversations on {slots} slots: {tokens:,} tokens x {layers} layers x {row_bytes} bytes "
            f"= {size / 1e9:.2f} GB each, {new_tokens} new tokens a turn, {turns} turns, slots on {device}"
        )
        work = {
            "layers": layers, "tokens": tokens, "row_bytes": row_bytes, "bytes": size, "device": device,
            "conversations": conversations, "slots": slots, "turns": turns, "new_tokens": new_tokens,
        }  # fmt: skip
        output.update({**provenance(device, {"pool": made}), "work": work})
        bus = Bus(memory) if isinstance(memory, DeviceMemory) else None
        measure(rotation, [name for name in MOVERS if not only or name in only], made, output, bus)
        if bus is not None:
            output.update({"bus": bus.figures()})
            bus.close()
    figures(output)
    show(output.data)
    if plot_file is not None:
        from benchmarks.plots import plot_rotation

        plot_rotation(output.data, plot_file)
    fail_if_parts_did(output)


if __name__ == "__main__":
    typer.run(main)
