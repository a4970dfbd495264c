"""Time to the first token of a follow-up turn: read everything again, or bring the cache back, and how.

A conversation of some ten thousand tokens says 383 more. Its cache comes back from page-locked RAM or from mmkv before
the model computes, or from mmkv layer by layer while it computes; beside that stand a cache that never left, and
reading the whole prompt again. All ways take turns, and what they bring back is compared bit by bit.

    python benchmarks/first_token.py --json h200.json --plot h200.png
    python benchmarks/first_token.py --model smollm2 --tokens 2000
    python benchmarks/first_token.py --model random-1b --tokens 8192 --tokens 131072
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asking import fail, fail_if_parts_did, require_device, require_plots
from benchmarks.engine import MODELS, Engine, load_engine
from benchmarks.follow_up import WAYS, FollowUp
from benchmarks.machine import provenance
from benchmarks.memory import memory_of
from benchmarks.results import TARGETS, Output
from benchmarks.rig import console
from benchmarks.work import default_directory, temporary_directory
from mmkv.medium import available_ram, medium_of

NEW_TOKENS = 383


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one length."""
    ways = {way: entry["ms"] for way, entry in found["ways"].items()}
    return {
        "first_token_streamed": ways["streamed"] / max(ways["resident"], found["bytes_ms"]),
        "first_token_again": ways["again"] / ways["streamed"],
        "first_token_blocking": ways["blocking"] / ways["streamed"],
    }


def note_figures(output: Output) -> None:
    """Note each figure: the worst of all lengths, which stand beside it."""
    lengths = output.data["first_token"]
    for name in ratios(next(iter(lengths.values()))):
        by_tokens = {tokens: ratios(found)[name] for tokens, found in lengths.items()}
        worst = max if TARGETS[name].bound == "at most" else min
        output.figure(name, worst(by_tokens.values()), by_tokens=by_tokens)


def show(data: Mapping[str, Any]) -> None:
    """Print the medians of all ways, and the figures beside their targets."""
    lengths = data["first_token"].values()
    table = Table("first token, ms", box=None, header_style="bold")
    for found in lengths:
        table.add_column(f"{found['tokens']:,} tokens", justify="right")
        table.add_column("range", justify="right", style="dim")
    for way, title in WAYS.items():
        cells = []
        for found in lengths:
            entry = found["ways"][way]
            cells += [f"{entry['ms']:,.1f}", "{:,.1f} to {:,.1f}".format(*entry["range_ms"])]
        table.add_row(title, *cells)
    where = "the bus's speed" if "bus" in next(iter(lengths)) else "a copy's speed"
    cells = [cell for found in lengths for cell in (f"{found['bytes_ms']:,.1f}", f"{found['bytes'] / 1e9:.2f} GB")]
    table.add_row(f"its bytes at {where}", *cells, style="dim")
    console.print(table)
    for name, figure in data["figures"].items():
        target = TARGETS[name]
        each = ", ".join(
            f"{value:.3g}{target.unit} at {int(tokens):,}" for tokens, value in figure["by_tokens"].items()
        )
        on_gpu = data["work"]["device"] != "cpu"
        whose = "" if on_gpu else "on a GPU: "
        met = figure["met"] if on_gpu else None
        wanted = "" if figure["met"] is None else f" ({whose}{target.bound} {target.value:g}{target.unit})"
        mark = "" if met is None else " [green]met[/green]" if met else " [yellow]missed[/yellow]"
        console.print(f"{target.what}: {each}{wanted}{mark}")


def measure(engine: Engine, tokens: int, new_tokens: int, repeats: int, made: Path, output: Output) -> None:
    """One length."""
    memory = memory_of("cpu" if engine.device.type == "cpu" else str(engine.device))
    follow_up = FollowUp(engine, memory, tokens, new_tokens, made / f"pool-{tokens}")
    try:
        found = follow_up.measure(repeats, lambda text: console.print(text, style="dim"))
        output.update({"first_token": {str(tokens): found}, **({"bus": found["bus"]} if "bus" in found else {})})
        note_figures(output)
        output.update({"timeline": follow_up.timeline()})
    finally:
        follow_up.close()


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.", show_default=False)] = "",
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of the conversation, once for each length.", show_default=False),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of what is said.")] = NEW_TOKENS,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each way; reading again at most 3.")] = 7,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda:0 and so on; a GPU if there is one.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; a tmpfs if left out.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", show_default=False)
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.", show_default=False)
    ] = None,
) -> None:
    """Time to the first token of a follow-up turn: read everything again, or bring the cache back, and how.

    Left out, the model is a random one of 3 billion weights at 32,768 and 65,536 tokens on a GPU, and SmolLM2 at 2,000
    tokens elsewhere.
    """
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    require_device(device)
    require_plots(plot_file)
    on_cpu = device == "cpu"
    model = model or ("smollm2" if on_cpu else "random")
    if model not in MODELS:
        raise fail(f"--model {model} is unknown: it is one of {', '.join(MODELS)}")
    lengths = tokens or ([2000] if on_cpu else [32_768, 65_536])
    output = Output(json_file)
    with temporary_directory(directory or default_directory()) as made:
        engine = load_engine(model, device, made / "model.pt")
        layout = engine.layout
        size = max(lengths) * layout.token_bytes
        # The pool, page-locked RAM, and where the cache is in RAM, too, that and a copy.
        needed = int(size * (4 if on_cpu else 2.5)) + (256 << 20)
        if needed > available_ram():
            raise fail(
                f"this needs about {needed / 1e9:.1f} GB of memory and {available_ram() / 1e9:.1f} GB are available: "
                "choose fewer --tokens"
            )
        console.print(
            f"{engine.name}, {engine.parameters / 1e6:,.0f} million weights, {len(layout.layers)} layers x "
            f"{layout.layers[0].token_bytes} bytes a token, on {device}, {medium_of(made).fs_type} at {made.parent}; "
            f"+{new_tokens} tokens, {repeats} repeats"
        )
        work = {
            "model": engine.name,
            "parameters": engine.parameters,
            "layers": len(layout.layers),
            "token_bytes": layout.token_bytes,
            "new_tokens": new_tokens,
            "bytes": size,
            "device": device,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "attention": engine.attention,
            "repeats": repeats,
        }
        output.update({**provenance(device, {"pool": made}), "work": work})
        for length in lengths:
            try:
                measure(engine, length, new_tokens, repeats, made, output)
            except (RuntimeError, ValueError) as error:
                # The lengths before it stand.
                output.failed(f"{length:,} tokens", error)
                console.print(f"[red]{output.failures[-1]}[/red]", markup=True)
                output.update({"failed": output.failures[-1]})
    if "first_token" in output.data:
        show(output.data)
        if plot_file is not None:
            from benchmarks.plots import plot_first_token

            plot_first_token(output.data, plot_file)
    fail_if_parts_did(output)


if __name__ == "__main__":
    typer.run(main)
