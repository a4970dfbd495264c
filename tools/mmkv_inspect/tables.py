"""What people read: tables and lists of figures on the terminal, or at full width into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mmkv.geometry import Geometry
from mmkv.info import ConversationInfo, PoolStats, TierStats
from mmkv.layout import Layer, Layout, Plane, State
from mmkv.medium import Medium
from mmkv.rows import ConversationRow, VersionRow
from mmkv_inspect.notes import Owner
from mmkv_inspect.reading import PoolView
from mmkv_inspect.text import age_text, count_text, size_text, time_text, visible
from mmkv_inspect.usage import SpaceUse

__all__ = ["medium_text", "print_conversation", "print_figures", "print_lines", "print_list", "print_stats"]

_UNLIMITED = 1 << 20
# Below this many columns the gaps of a wide table shrink.
_ROOMY = 100
# What a first column, and any other, is cut to where words do not fit.
_FIRST, _LEAST = 8, 3

_Justify = Literal["left", "right"]
_LIST_COLUMNS: list[tuple[str, _Justify]] = [
    ("ID", "left"), ("Namespace", "left"), ("Tokens", "right"), ("Size", "right"), ("Alone", "right"),
    ("Extents", "right"), ("Ckpts", "right"), ("Age", "right"), ("Taken", "right"), ("Pinned", "left"),
]  # fmt: skip
# Behind Alone, where the pool has a hot tier.
_HOT_COLUMNS: list[tuple[str, _Justify]] = [("Hot", "right"), ("Dirty", "right")]
_HOT_AT = 5
_TIER_COLUMNS: list[tuple[str, _Justify]] = [
    ("Tier", "left"), ("Used", "right"), ("Fill", "right"), ("Capacity", "right"), ("Allocated", "right"),
    ("Dirty", "right"), ("Quarantined", "right"), ("Medium", "left"), ("Directory", "left"),
]  # fmt: skip
_EXTENT_COLUMNS: list[tuple[str, _Justify]] = [
    ("Extent", "right"), ("Blocks", "left"), ("Count", "right"), ("Tokens", "left"), ("Size", "right"),
]  # fmt: skip
_CHECKPOINT_COLUMNS: list[tuple[str, _Justify]] = [
    ("Checkpoint at", "right"), ("Record", "right"), ("Prompt boundary", "left"), ("Size", "right"),
]  # fmt: skip
_LAYER_COLUMNS: list[tuple[str, _Justify]] = [
    ("Layers", "left"), ("Planes", "left"), ("States", "left"), ("Bytes a token", "right"),
]  # fmt: skip


def _console(width: int | None = None) -> Console:
    return Console(markup=False, highlight=False, emoji=False, width=width)


def _print(text: str, style: str = "") -> None:
    # Rich would fold it in a pipe, too.
    console = _console(None if sys.stdout.isatty() else max(1, cell_len(text)))
    console.print(Text(text, style=style))


def _print_table(
    columns: Sequence[tuple[str, _Justify]], rows: Sequence[Sequence[str]], gap: int | None = None
) -> None:
    """Print rows under titles, or without these where none is given; the cells never count as Rich's markup."""
    console = _console()
    if gap is None:
        gap = 2 if not sys.stdout.isatty() or console.width >= _ROOMY else 1

    def table() -> Table:
        empty = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        empty.show_header = any(title for title, _ in columns)
        for at, (title, justify) in enumerate(columns):
            empty.add_column(title, justify=justify, overflow="fold", style="" if title or at else "bold")
        return empty

    # All lines of a column in one cell: a fourth of what a cell for each costs, and the same where no line is folded.
    whole = table()
    whole.add_row(*(Text("\n".join(cells)) for cells in zip(*rows, strict=True)))
    width = Measurement.get(console, console.options.update(width=_UNLIMITED), whole).maximum
    if not sys.stdout.isatty():
        _console(width).print(whole)
    elif width <= console.width:
        console.print(whole)
    else:
        folded = table()
        fitted = _fitted(columns, rows, console.width - gap * (len(columns) - 1))
        for column, size in zip(folded.columns, fitted, strict=True):
            column.width = size
        for row in rows:
            folded.add_row(*(Text(cell) for cell in row))
        console.print(folded)


def _fitted(columns: Sequence[tuple[str, _Justify]], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of columns that have `room` together: lines break between words first, in the first column last.

    Where that is not enough, words are cut: those of the first column, if it has a title, before others' figures are.
    """
    cells = [[title, *column] for (title, _), column in zip(columns, zip(*rows, strict=True), strict=True)]
    widths = [max(map(cell_len, column)) for column in cells]
    words = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    first, others = [0], list(range(1, len(columns)))
    limits = (
        (others, words),
        (first if columns[0][0] else [], [_FIRST]),
        (others, [_LEAST] * len(columns)),
        (first, [1]),
    )
    for chosen, least in limits:
        while sum(widths) > room:
            wide = [at for at in chosen if widths[at] > least[at]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def print_figures(figures: Sequence[tuple[str, str]]) -> None:
    """Print figures, one a line, each behind its name."""
    _print_table([("", "left"), ("", "left")], figures, gap=2)


def _print_title(title: str) -> None:
    _print("")
    _print(title, "bold")


def print_lines(title: str, lines: Sequence[str], style: str = "") -> None:
    """Print lines under a title, which is left out where there are none."""
    if lines:
        _print_title(title)
        for line in lines:
            _print(line, style)


def print_list(infos: Sequence[ConversationInfo], of: int, now: float, *, hot: bool = False) -> None:
    """Print conversations, one a line, and their sum; `of` is how many the pool holds, `hot` whether in two tiers."""
    if infos:
        columns = [*_LIST_COLUMNS[:_HOT_AT], *(_HOT_COLUMNS if hot else ()), *_LIST_COLUMNS[_HOT_AT:]]
        _print_table(columns, [_list_row(info, now, hot=hot) for info in infos])
    shown = "" if len(infos) == of else f"{len(infos):,} of "
    tokens = count_text(sum(info.tokens for info in infos), "token")
    _print(f"{shown}{count_text(of, 'conversation')}, {tokens}", "dim")


def _list_row(info: ConversationInfo, now: float, *, hot: bool) -> tuple[str, ...]:
    return (
        visible(info.conversation), visible(info.namespace), _tokens_text(info), size_text(info.bytes),
        size_text(info.owned_bytes), *((size_text(info.hot_bytes), size_text(info.dirty_bytes)) if hot else ()),
        f"{info.extents:,}", f"{len(info.checkpoints):,}", age_text(now - info.parked),
        "never" if info.taken is None else age_text(now - info.taken), "yes" if info.pinned else "",
    )  # fmt: skip


def _tokens_text(info: ConversationInfo) -> str:
    sound = "" if info.usable_tokens == info.tokens else f"{info.usable_tokens:,} of "
    return f"{sound}{info.tokens:,}"


def print_conversation(
    row: ConversationRow, info: ConversationInfo, geometry: Geometry, now: float, *, hot: bool = False
) -> None:
    """Print all that the catalog knows of one conversation."""
    print_figures(
        [
            ("ID", visible(info.conversation)),
            ("Namespace", visible(info.namespace) or "(none)"),
            ("Tokens", _tokens_text(info) + _usable_text(info)),
            ("Size", size_text(info.bytes)),
            ("Owned alone", f"{size_text(info.owned_bytes)} (what dropping it would free)"),
            *(_hot_figures(info) if hot else ()),
            ("First parked", time_text(info.created, now)),
            ("Last parked", time_text(info.parked, now)),
            ("Last taken", "never" if info.taken is None else time_text(info.taken, now)),
            ("Pinned", "yes" if info.pinned else "no"),
            ("Synced", "yes" if info.synced else "not yet: a power cut could lose this version"),
        ]
    )
    _print_version("Newest version", row.version, geometry)
    if row.fallback is not None:
        _print_version("Kept until the newest version is synced", row.fallback, geometry)


def _usable_text(info: ConversationInfo) -> str:
    if info.usable_tokens == info.tokens:
        return ""
    return "; the others need bytes that are in quarantine: they are not those that were parked"


def _hot_figures(info: ConversationInfo) -> list[tuple[str, str]]:
    return [
        ("In the hot tier", size_text(info.hot_bytes)),
        ("Dirty", f"{size_text(info.dirty_bytes)} (not at the pool's path yet)"),
    ]


def _print_version(title: str, version: VersionRow, geometry: Geometry) -> None:
    blocks = sum(extent.blocks for extent in version.extents)
    _print_title(
        f"{title}: number {version.id}, {count_text(version.tokens, 'token')} in {count_text(blocks, 'block')}"
    )
    rows, token = [], 0
    for ordinal, (first, count) in enumerate(version.extents):
        end = min(version.tokens, token + count * geometry.block_tokens)
        size = size_text(count * geometry.block_bytes)
        rows.append((f"{ordinal}", f"{first} to {first + count - 1}", f"{count:,}", f"{token:,} to {end - 1:,}", size))
        token = end
    _print_table(_EXTENT_COLUMNS, rows)
    if version.checkpoints:
        _print("")
        size = size_text(geometry.checkpoint_bytes)
        points = [(f"{p.tokens:,}", f"{p.record}", "yes" if p.boundary else "", size) for p in version.checkpoints]
        _print_table(_CHECKPOINT_COLUMNS, points)


def print_stats(view: PoolView, use: SpaceUse, problems: Sequence[str]) -> None:
    """Print the pool in figures."""
    geometry, layout = view.description.geometry, view.description.layout
    pinned = sum(row.pinned for row in view.rows)
    tokens = sum(row.version.tokens for row in view.rows)
    capacity = "unknown" if view.capacity is None else size_text(view.capacity)
    share = "" if not view.capacity else f" ({use.used / view.capacity:.1%} of the capacity)"
    print_figures(
        [
            ("Pool", visible(str(view.path))),
            *([("Catalog", visible(str(view.catalog)))] if view.description.catalog_elsewhere else []),
            ("File system", medium_text(view.medium)),
            ("UUID", view.description.uuid),
            ("Owner", _owner_text(view.owner, view.now)),
            ("Requests waiting", f"{view.requests:,}"),
            ("Conversations", f"{len(view.rows):,}, {pinned:,} of them pinned; {count_text(tokens, 'token')}"),
            ("Capacity", capacity),
            ("Allocated", f"{size_text(use.allocated)} in {_segments_text(view)}"),
            ("Used", size_text(use.used) + share),
            ("Free", "unknown" if use.free is None else size_text(use.free)),
            ("Fragmentation", _fragmentation_text(use)),
            *([("Corrupt", _bad_text(view))] if view.bad else []),
            ("Path", _path_text(view.owner, view.stats)),
            ("Model", visible(layout.model)),
            ("Fingerprint", layout.fingerprint),
            ("Bytes a token", f"{layout.token_bytes:,} over {count_text(len(layout.layers), 'layer')}"),
            ("Bytes a checkpoint", f"{layout.state_bytes:,}" if layout.state_bytes else "no layer has a state"),
            ("Block", f"{geometry.block_tokens:,} tokens, {size_text(geometry.block_bytes)}"),
        ]
    )
    if view.stats is not None and view.stats.tiers:
        _print_title("Tiers")
        _print_table(_TIER_COLUMNS, [_tier_row(tier) for tier in view.stats.tiers])
    _print_title("Layers")
    _print_layers(layout)
    if view.stats is not None:
        _print_title("Since the pool was opened" if view.owner.alive else "When the pool was last open")
        print_figures(_counters(view.stats))
    print_lines("Problems", [visible(problem) for problem in problems], "red")


def _tier_row(tier: TierStats) -> tuple[str, ...]:
    return (
        tier.name, size_text(tier.used), f"{tier.fill:.1%}", size_text(tier.capacity), size_text(tier.allocated),
        size_text(tier.dirty), size_text(tier.quarantined), visible(tier.medium), visible(tier.directory),
    )  # fmt: skip


def medium_text(medium: Medium) -> str:
    """What a directory lies on, and if it is shared, how far its locks reach."""
    text = f"{medium.fs_type}, mounted on {visible(str(medium.mount_point))}"
    if not medium.shared:
        return text
    reach = "also on other hosts" if medium.locks_across_hosts else "on this host only, as far as can be told"
    return f"{text}; shared: its locks hold {reach}"


def _bad_text(view: PoolView) -> str:
    blocks = sum(bad.kind == "blocks" for bad in view.bad)
    both = f"{count_text(blocks, 'block')} and {count_text(len(view.bad) - blocks, 'checkpoint')}"
    return f"{both} in quarantine; verify names what it finds"


def _fragmentation_text(use: SpaceUse) -> str:
    runs = count_text(use.free_runs, "free run")
    return f"{use.fragmentation:.1%}: {runs} in the allocated segments, the longest {size_text(use.largest_free_run)}"


def _owner_text(owner: Owner, now: float) -> str:
    if owner.pid is None:
        return "a process that has not told its number yet" if owner.alive else "none"
    text = f"process {owner.pid}"
    if owner.host is not None:
        text += f" on {visible(owner.host)}"
    if owner.started is not None:
        text += f", since {time_text(owner.started, now)}"
    return text if owner.alive else f"none; it was {text}"


def _path_text(owner: Owner, stats: PoolStats | None) -> str:
    moved = [f"{size_text(size)} by {visible(path)}" for path, size in stats.moved.items()] if stats else []
    device = stats.path if stats else owner.path
    texts = [", ".join(moved) or "nothing moved yet"]
    return "; ".join([*texts, f"device arrays go by {visible(device)}"] if device else texts)


def _segments_text(view: PoolView) -> str:
    geometry = view.description.geometry
    text = f"{count_text(len(view.block_segments), 'segment')} of {size_text(geometry.segment_bytes)}"
    if geometry.state_segment_bytes:
        text += f" and {len(view.checkpoint_segments):,} of {size_text(geometry.state_segment_bytes)} for checkpoints"
    return text


def _print_layers(layout: Layout) -> None:
    rows, start = [], 0
    while start < len(layout.layers):
        layer, end = layout.layers[start], start + 1
        while end < len(layout.layers) and _same(layout.layers[end], layer):
            end += 1
        name = f"{start}" if end == start + 1 else f"{start} to {end - 1}"
        rows.append((name, _arrays_text(layer.planes), _arrays_text(layer.state), f"{layer.token_bytes:,}"))
        start = end
    _print_table(_LAYER_COLUMNS, rows)


def _same(one: Layer, other: Layer) -> bool:
    return one is other or (list(one.planes.items()), list(one.state.items())) == (
        list(other.planes.items()),
        list(other.state.items()),
    )


def _arrays_text(arrays: Mapping[str, Plane | State]) -> str:
    return ", ".join(f"{visible(name)} {array.dtype}{list(array.shape)}" for name, array in arrays.items()) or "-"


def _counters(stats: PoolStats) -> list[tuple[str, str]]:
    return [
        ("Parks", f"{stats.parks:,}, {size_text(stats.bytes_parked)}"),
        ("Takes", f"{stats.takes:,}, {size_text(stats.bytes_taken)}"),
        ("Matches", f"{count_text(stats.hits, 'hit')}, {count_text(stats.misses, 'miss', 'misses')}"),
        ("Dropped to make room", f"{stats.evictions:,}"),
        ("Dropped for being idle", f"{stats.expirations:,}"),
        ("Failed transfers", f"{stats.failures:,}"),
        ("Under way", f"{count_text(stats.transfers, 'transfer')}, {count_text(stats.leases, 'lease')}"),
        ("Quarantined", size_text(stats.quarantined)),
        (
            "Checked by takes",
            f"{size_text(stats.bytes_verified)}, {count_text(stats.mismatches, 'take')} found other bytes",
        ),
        ("Without checksums", size_text(stats.unverified)),
        *(_between_tiers(stats) if any(tier.name == "hot" for tier in stats.tiers) else ()),
    ]


def _between_tiers(stats: PoolStats) -> list[tuple[str, str]]:
    return [
        ("Spills to the path", f"{stats.spills:,}, {size_text(stats.bytes_spilled)}"),
        ("Promotions to the hot tier", f"{stats.promotions:,}, {size_text(stats.bytes_promoted)}"),
        ("Prefetches", f"{stats.prefetches:,}"),
        ("Dropped from the hot tier", f"{stats.hot_evictions:,}"),
    ]
