"""The live view: what a running engine's pool does, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmkv.info import PoolStats, TierStats, TransferStats
from mmkv_inspect.sampling import Rates, Sample, State, rates_between, read_sample
from mmkv_inspect.text import age_text, count_text, size_text, visible

__all__ = ["frame", "print_frame", "sample_record", "watch"]

_BAR = 24
_WIDE = 1 << 12
_FULL = 0.9


def watch(path: Path, elsewhere: Path | None, interval: float) -> None:
    """Show the pool every `interval` seconds, until the user has seen enough."""
    console = Console(markup=False, highlight=False, emoji=False)
    try:
        with Live(console=console, auto_refresh=False) as live:
            for sample, rates in _samples(path, elsewhere, interval):
                live.update(frame(sample, rates), refresh=True)
    except KeyboardInterrupt:
        pass


def _samples(path: Path, elsewhere: Path | None, interval: float) -> Iterator[tuple[Sample, Rates | None]]:
    before: Sample | None = None
    while True:
        sample = read_sample(path, elsewhere)
        yield sample, None if before is None else rates_between(before, sample)
        before = sample
        time.sleep(interval)


def print_frame(sample: Sample) -> None:
    """Print one frame; into a pipe at full width."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=_WIDE)
    console.print(frame(sample, None))


def sample_record(sample: Sample) -> dict[str, Any]:
    """Plain values: sizes in bytes, times in seconds since the epoch."""
    return {
        "pool": str(sample.path),
        "model": sample.model,
        "state": str(sample.state),
        "noted": sample.noted,
        "age": sample.age,
        "requests": sample.requests,
        "owner": asdict(sample.owner),
        "engine": None if sample.stats is None else asdict(sample.stats),
    }


def frame(sample: Sample, rates: Rates | None) -> RenderableType:
    """All of the view at one moment."""
    parts: list[RenderableType] = [_head(sample), _state_line(sample)]
    stats = sample.stats
    if stats is not None and sample.state is not State.SILENT:
        parts += [Text(""), _tiers(stats.tiers), *_troubles(stats.tiers), Text(""), _counters(stats, rates), Text("")]
        title = "Was under way" if sample.state is State.GONE else "Under way"
        parts.append(_under_way(title, stats.under_way) if stats.under_way else Text("nothing under way", style="dim"))
    return Group(*parts)


def _head(sample: Sample) -> Text:
    text = Text(visible(str(sample.path)), style="bold", no_wrap=True, overflow="ellipsis")
    text.append(f"  {visible(sample.model)}", style="not bold")
    if sample.stats is not None:
        text.append(f"  {count_text(sample.stats.conversations, 'conversation')}", style="not bold")
        text.append(f", device arrays go by {visible(sample.stats.path)}", style="not bold")
    return text


def _state_line(sample: Sample) -> Text:
    owner, age = sample.owner, sample.age
    process = "a process" if owner.pid is None else f"process {owner.pid}"
    if owner.host is not None:
        process += f" on {visible(owner.host)}"
    old = "" if age is None else f", {_short(age)} old"
    if sample.state is State.GONE:
        text, style = f"the owner is gone: {process} left these figures{old}", "red"
        if owner.pid is None:
            text = "nobody has owned this pool yet"
    elif sample.state is State.SILENT:
        text, style = f"owned by {process}, which has noted no figures yet", "yellow"
    elif sample.state is State.STALE:
        text, style = f"owned by {process}; stale figures{old}, though transfers were under way: does it hang?", "red"
    else:
        text, style = f"owned by {process}; figures {_short(age or 0.0)} old", "green"
    if sample.requests:
        text += f"; {count_text(sample.requests, 'request waits', 'requests wait')}"
    return Text(text, style=style)


def _short(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else age_text(seconds)


def _table(*titles: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        # What has no title may be a bar.
        most = None if title else _BAR
        table.add_column(title, justify="right" if title in right else "left", max_width=most, overflow="fold")
    return table


def _bar(share: float, *, warn: bool = False) -> ProgressBar:
    style = "red" if warn and share > _FULL else "bar.complete"
    return ProgressBar(total=1.0, completed=min(1.0, share), complete_style=style, finished_style=style)


def _tiers(tiers: Sequence[TierStats]) -> Table:
    right = ("Fill", "Used", "Capacity", "Allocated", "Dirty", "Quarantined")
    table = _table("Tier", "", *right, "Medium", "Directory", right=right)
    for tier in tiers:
        sizes = (tier.used, tier.capacity, tier.allocated, tier.dirty, tier.quarantined)
        table.add_row(
            Text(tier.name), _bar(tier.fill, warn=True), f"{tier.fill:.1%}", *(size_text(size) for size in sizes),
            Text(visible(tier.medium)), Text(visible(tier.directory)),
        )  # fmt: skip
    return table


def _troubles(tiers: Sequence[TierStats]) -> list[Text]:
    return [Text(f"{tier.name}: {visible(tier.trouble)}", style="red") for tier in tiers if tier.trouble]


def _counters(stats: PoolStats, rates: Rates | None) -> Table:
    right = ("Rate", "GB/s", "In all", "Bytes")
    table = _table("", *right, right=right)
    moving = [("Parks", "parks", "bytes_parked"), ("Takes", "takes", "bytes_taken")]
    if any(tier.name == "hot" for tier in stats.tiers):
        moving += [("Spills", "spills", "bytes_spilled"), ("Promotions", "promotions", "bytes_promoted")]
    for title, count, size in moving:
        speed = "-" if rates is None else f"{getattr(rates, size) / 1e9:.2f}"
        table.add_row(title, _rate(rates, count), speed, f"{getattr(stats, count):,}", size_text(getattr(stats, size)))
    for title in ("Hits", "Misses", "Evictions", "Expirations", "Failures"):
        table.add_row(title, _rate(rates, title.lower()), "", f"{getattr(stats, title.lower()):,}", "")
    return table


def _rate(rates: Rates | None, name: str) -> str:
    return "-" if rates is None else f"{getattr(rates, name):.1f}/s"


def _under_way(title: str, transfers: Sequence[TransferStats]) -> Table:
    right = ("Layers", "Bytes", "GB/s", "For")
    table = _table(title, "", *right, right=right)
    for transfer in transfers:
        share = transfer.layers_done / transfer.layers if transfer.layers else 0.0
        speed = transfer.bytes / transfer.seconds / 1e9 if transfer.seconds > 0 else 0.0
        table.add_row(
            Text(visible(transfer.what)), _bar(share), f"{transfer.layers_done:,}/{transfer.layers:,}",
            size_text(transfer.bytes), f"{speed:.2f}", _short(transfer.seconds),
        )  # fmt: skip
    return table
