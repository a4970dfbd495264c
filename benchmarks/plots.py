"""Pictures of the benchmarks' results, which a person reads at a glance."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt

from benchmarks.results import TARGETS

__all__ = ["plot_first_token", "plot_pool_vs_ram", "plot_rotation", "plot_tiers"]

_TAKE, _PARK = "#1f6fb4", "#f08c2e"
_MET, _MISSED, _PLAIN = "#3a9d4f", "#d1462f", "#8a8f98"
_LINES = {"gave_back": ("gave back", "#8a8f98"), "takes": ("takes", _TAKE), "parked": ("parked", _PARK)}
# A figure this many times better than its target fills its bar.
_MOST = 2.0
_ROW = 0.52
# Behind a label, so that no line runs through it.
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def plot_pool_vs_ram(data: Mapping[str, Any], path: Path) -> None:
    """Speeds of all contenders beside the bus's limit, and the figures beside their targets."""
    contenders = {name: found for name, found in data.get("contenders", {}).items() if "take_gbps" in found}
    figures = {name: figure for name, figure in data.get("figures", {}).items() if name in TARGETS}
    shown = [bool(contenders), bool(figures)]
    if not any(shown):
        return
    rows = [len(contenders) * 1.25, len(figures)]
    height = 1.9 + _ROW * max(count for count, one in zip(rows, shown, strict=True) if one)
    columns = sum(shown)
    figure, axes = plt.subplots(
        1, columns, figsize=(8.2 * columns, height), squeeze=False, layout="constrained"
    )  # fmt: skip
    left = list(axes[0])
    if contenders:
        bus = data.get("bus", {})
        _draw_speeds(left.pop(0), contenders, bus if "to_device_gbps" in bus else None)
    if figures:
        _draw_figures(left.pop(0), figures)
    figure.suptitle(f"Parking and taking a conversation of {data['work']['bytes'] / 1e9:.1f} GB", fontweight="bold")
    _save(figure, data, path)


def _draw_speeds(axis: Any, contenders: Mapping[str, Mapping[str, Any]], bus: Mapping[str, Any] | None) -> None:
    width = 0.38
    fastest = max(max(found["take_gbps"], found["park_gbps"]) for found in contenders.values())
    if bus:
        fastest = max(fastest, bus["to_device_gbps"], bus["from_device_gbps"])
    for row, found in enumerate(contenders.values()):
        kinds = (("take", row - width / 2, _TAKE), ("park", row + width / 2, _PARK))
        for kind, at, color in kinds:
            value = found[f"{kind}_gbps"]
            axis.barh(at, value, width, color=color, label=kind if row == 0 else None)
            axis.text(value + 0.01 * fastest, at, f"{value:.3g}", va="center", fontsize=9, bbox=_PAPER)
    if bus:
        limit = (bus["to_device_gbps"] + bus["from_device_gbps"]) / 2
        axis.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"the bus: {limit:.1f} GB/s")
    names = [_wrapped(found["title"]) for found in contenders.values()]
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_title("speed", loc="left", fontsize=10)
    axis.set_xlim(0, 1.15 * fastest)
    axis.set_xlabel("GB/s, higher is better")
    axis.legend(loc="lower right", framealpha=1)
    _clean(axis)


def _draw_figures(axis: Any, figures: Mapping[str, Mapping[str, Any]]) -> None:
    order = [name for name in TARGETS if name in figures]
    for row, name in enumerate(order):
        figure, target = figures[name], TARGETS[name]
        value = figure["value"]
        if value is None:
            axis.text(0.02, row, "not measured", va="center", fontsize=9, color=_MISSED)
            continue
        shown = f"{value:.3g}{target.unit if target.unit == 'x' else ' ' + target.unit}".strip()
        met = figure["met"]
        if target.value is None or met is None:
            axis.text(0.02, row, f"{shown} (no target)", va="center", fontsize=9, color=_PLAIN)
            continue
        better = value / target.value if target.bound == "at least" else max(target.value, 1e-9) / max(value, 1e-9)
        axis.barh(row, min(better, _MOST), 0.6, color=_MET if met else _MISSED)
        wanted = f"{target.bound} {target.value:g}"
        axis.text(min(better, _MOST) + 0.03, row, f"{shown}  ({wanted})", va="center", fontsize=9, bbox=_PAPER)
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(order)), [_wrapped(TARGETS[name].what, 40) for name in order])
    axis.set_ylim(len(order) - 0.4, -0.6)
    axis.set_title("figures beside their targets; red ones are not reached", loc="left", fontsize=10)
    axis.set_xlim(0, 1.45 * _MOST)
    axis.set_xticks([0, 1, _MOST], ["", "target", "twice as\ngood or more"])
    _clean(axis)


def plot_tiers(data: Mapping[str, Any], path: Path) -> None:
    """The figures of two tiers beside their targets, and when each layer of a take from the disk was there."""
    figures = {name: figure for name, figure in data.get("figures", {}).items() if name in TARGETS}
    lines = data.get("cold_lines")
    columns = 2 if lines else 1
    figure, axes = plt.subplots(
        1, columns, figsize=(8.2 * columns, 1.9 + _ROW * len(figures)), squeeze=False, layout="constrained"
    )  # fmt: skip
    _draw_figures(axes[0, 0], figures)
    if lines:
        axis = axes[0, 1]
        axis.step([0, *(1000 * second for second in lines)], range(len(lines) + 1), where="post", color=_TAKE)
        axis.set_xlabel("milliseconds since the take began")
        axis.set_ylabel("layers there")
        axis.set_title("a take from the disk", loc="left", fontsize=10)
        _clean(axis)
    figure.suptitle(f"A disk behind RAM: conversations of {data['work']['bytes'] / 1e9:.1f} GB", fontweight="bold")
    _save(figure, data, path)


def plot_rotation(data: Mapping[str, Any], path: Path) -> None:
    """The tax of a turn: all ways of moving, and those that the slowest one dwarfs once more, enlarged."""
    contenders = {name: found for name, found in data.get("contenders", {}).items() if "tax_ms" in found}
    if not contenders:
        return
    slowest = max(found["tax_ms"] for found in contenders.values())
    small = {name: found for name, found in contenders.items() if found["tax_ms"] < slowest / 2.5}
    panels = [contenders, small] if small and len(small) < len(contenders) else [contenders]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10.5, 1.9 + 0.72 * sum(map(len, panels))), squeeze=False, layout="constrained",
        height_ratios=[len(panel) for panel in panels],
    )  # fmt: skip
    for number, (axis, panel) in enumerate(zip(axes[:, 0], panels, strict=True)):
        _draw_taxes(axis, panel)
        if number:
            axis.set_title("the same, enlarged", loc="left", fontsize=10)
    axes[0, 0].legend(loc="lower right", framealpha=1)
    axes[-1, 0].set_xlabel("milliseconds a turn, lower is better")
    work = data["work"]
    figure.suptitle(
        f"{work['conversations']} conversations of {work['bytes'] / 1e9:.1f} GB on {work['slots']} slots, "
        f"{work['new_tokens']} new tokens a turn: the tax of a turn", fontweight="bold",
    )  # fmt: skip
    _save(figure, data, path)


def _draw_taxes(axis: Any, contenders: Mapping[str, Mapping[str, Any]]) -> None:
    widest = max(max(found["tax_ms"], sum(found[f"{line}_ms"] for line in _LINES)) for found in contenders.values())
    for row, found in enumerate(contenders.values()):
        start = 0.0
        for line, (label, color) in _LINES.items():
            value = found[f"{line}_ms"]
            axis.barh(row, value, 0.62, left=start, color=color, label=label if row == 0 else None)
            start += value
        axis.text(start + 0.01 * widest, row, _milliseconds(found["tax_ms"]), va="center")
    axis.set_yticks(range(len(contenders)), [_wrapped(found["title"]) for found in contenders.values()])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.16 * widest)
    _clean(axis)


def plot_first_token(data: Mapping[str, Any], path: Path) -> None:
    """The ways to the first token at every length, and the time line of one turn that was streamed by layer."""
    lengths, line = list(data["first_token"].values()), data.get("timeline")
    figure, axes = plt.subplots(
        1, 2 if line else 1, figsize=(14.5 if line else 7.5, 5.6), squeeze=False, layout="constrained"
    )  # fmt: skip
    _draw_ways(axes[0, 0], lengths)
    if line:
        _draw_timeline(axes[0, 1], line)
    new = data["work"]["new_tokens"]
    figure.suptitle(f"The first token of a turn of {new} tokens, {data['work']['model']}", fontweight="bold")
    _save(figure, data, path)


def _draw_ways(axis: Any, lengths: list[Mapping[str, Any]]) -> None:
    width = 0.8 / len(lengths)
    colors = [_TAKE, _PARK, _MET, _PLAIN]
    for number, found in enumerate(lengths):
        rows = [*((way["title"], way["ms"]) for way in found["ways"].values()), ("its bytes alone", found["bytes_ms"])]
        for row, (_, value) in enumerate(rows):
            at = row + (number - (len(lengths) - 1) / 2) * width
            label = f"{found['tokens']:,} tokens" if row == 0 else None
            axis.barh(at, value, width, color=colors[number % len(colors)], label=label)
            axis.text(value * 1.06, at, _milliseconds(value), va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [_wrapped(title) for title, _ in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    least, most = axis.get_xlim()
    axis.set_xlim(least, most * 2.2)
    axis.set_xlabel("milliseconds, lower is better; each line is ten times the last")
    axis.legend(loc="lower right", framealpha=1)
    _clean(axis)


def _draw_timeline(axis: Any, line: Mapping[str, Any]) -> None:
    for layer, (began, ended) in enumerate(zip(line["began_ms"], line["ended_ms"], strict=True)):
        axis.barh(
            layer, ended - began, 0.8, left=began, color=_PARK, label=None if layer else "the layer's compute ran"
        )  # fmt: skip
    layers = range(len(line["arrived_ms"]))
    axis.plot(
        line["arrived_ms"], layers, "|", color=_TAKE, markersize=9, markeredgewidth=2, label="its bytes were there"
    )
    axis.axvline(line["first_token_ms"], color="black", linestyle="--", linewidth=1, label="the first token")
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("milliseconds since the prompt came")
    axis.set_ylabel("layer")
    axis.set_title(f"one turn, {line['tokens']:,} tokens, layer by layer", loc="left", fontsize=10)
    axis.legend(loc="upper right", framealpha=1)
    _clean(axis)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _wrapped(text: str, width: int = 29) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def _clean(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _save(figure: Any, data: Mapping[str, Any], path: Path) -> None:
    machine = data["machine"]
    where = machine["gpu"]["name"] if machine.get("gpu") else machine["cpu"]
    versions = f"mmkv {data['versions']['mmkv']}"
    figure.supxlabel(f"{where}, {machine['cores']} cores, {versions}, {data['date'][:10]}", fontsize=8, color=_PLAIN)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
