"""The commands of mmkv-inspect: what they take and what they print."""

# ruff: noqa: D301 - the \b in a help text keeps its lines apart

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mmkv.errors import ConversationNotFound
from mmkv.sizes import parse_bytes
from mmkv_inspect.reading import PoolView, read_pool
from mmkv_inspect.selection import Selection, SortKey, sort_infos
from mmkv_inspect.text import complain, count_text, parse_age, size_text, visible

__all__ = ["VARIABLE", "CatalogOption", "Command", "JsonOption", "PoolArgument", "app"]

VARIABLE = "MMKV_POOL"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


_USAGES = {
    "list": "[POOL]",
    "show": "[POOL] ID",
    "stats": "[POOL]",
    "top": "[POOL]",
    "rm": "POOL [ID]...",
    "probe": "DIR",
    "check": "[POOL]",
    "verify": "[POOL] [ID]...",
    "export": "[POOL] ID FILE",
    "import": "POOL FILE [ID]",
}


class Command(TyperCommand):
    """A command whose usage line says which arguments may be left out."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002, D102
        return ["[OPTIONS]", _USAGES[self.name or ""]]


def _size(text: str) -> int:
    try:
        return parse_bytes(text, "a size")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _age(text: str) -> float:
    try:
        return parse_age(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


PoolArgument = Annotated[
    Path, typer.Argument(metavar="POOL", envvar=VARIABLE, readable=False, help="The pool's directory.")
]
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        "--catalog", metavar="FILE", readable=False, help="The pool's catalog, where it lies outside of its directory."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document: sizes in bytes, times as Unix seconds.")
]
_Namespace = Annotated[
    str | None, typer.Option("--namespace", metavar="NS", help="Only this namespace; '' is the default one.")
]
_Match = Annotated[str | None, typer.Option("--match", metavar="GLOB", help="Only ids that match, such as 'agent-*'.")]
_OlderThan = Annotated[
    float | None,
    typer.Option(
        "--older-than", metavar="AGE", parser=_age, help="Only those last parked longer ago, such as 7d, 12h, 1d12h."
    ),
]


_SORT_HELP = (
    f"One of {', '.join(SortKey)}. The largest, the oldest and the longest not taken come first, names from a to z."
)


@app.callback()
def _root() -> None:
    """See what an mmkv pool holds, and drop what it should not.

    Works on the files of a pool, with or without an engine that has it open, and never makes the engine wait. Needs
    no GPU. POOL is the pool's directory; left out, the environment variable MMKV_POOL names it, save for rm, which
    wants it said.

    \b
    Examples:
      mmkv-inspect list /mnt/kv                      what is parked, the most recently used first
      mmkv-inspect show /mnt/kv chat-42              where one conversation lies
      mmkv-inspect stats /mnt/kv                     space, layout, owner, the path that bytes take
      mmkv-inspect top /mnt/kv                       what a running engine moves, every second
      mmkv-inspect rm /mnt/kv chat-42                drop one, also while the engine runs
      mmkv-inspect rm /mnt/kv --older-than 7d        drop all that were not parked for a week
      mmkv-inspect probe /mnt/kv                     what this machine can do for a pool there
      mmkv-inspect check /mnt/kv                     whether catalog and files fit together
      mmkv-inspect verify /mnt/kv --all              whether the parked bytes are those that were parked
      mmkv-inspect export /mnt/kv chat-42 FILE       one conversation as a file, which import takes in elsewhere

    \b
    Exit codes:
      0  fine
      1  something was not found, or the pool has a problem
      2  the command was not understood
    """


@app.command("list", cls=Command, short_help="List the conversations of a pool.")
def _list(
    pool: PoolArgument,
    sort: Annotated[SortKey, typer.Option(metavar="KEY", help=_SORT_HELP)] = SortKey.RECENT,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    namespace: _Namespace = None,
    match: _Match = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Only pinned ones.")] = False,
    larger_than: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=_size, help="Only larger ones, such as 500MB or 10GiB.")
    ] = None,
    older_than: _OlderThan = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N of them.")] = None,
    catalog: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the conversations of a pool.

    Size is what a conversation's blocks and checkpoints (Ckpts) take, Alone the part of it that no other conversation
    shares: what dropping it would free. Age counts from the last park, Taken from the last take. Characters of an id
    that a terminal would not show come out as escapes such as \\x1b. Into a pipe the table is as wide as it must be;
    --json is for programs.

    \b
    Examples:
      mmkv-inspect list /mnt/kv --sort size --limit 10
      mmkv-inspect list /mnt/kv --match 'agent-*' --older-than 12h
      mmkv-inspect list /mnt/kv --json | jq -r '.[] | select(.pinned | not) | .conversation'
      MMKV_POOL=/mnt/kv mmkv-inspect list --pinned
    """
    view = read_pool(pool, catalog)
    selection = Selection(namespace, match, pinned, larger_than, older_than)
    infos = sort_infos(selection.chosen(view.infos(), view.now), sort, reverse=reverse)[:limit]
    if as_json:
        from mmkv_inspect.records import list_record, print_json

        print_json(list_record(infos))
    else:
        from mmkv_inspect.tables import print_list

        print_list(infos, len(view.rows), view.now, hot=view.has_hot_tier)


@app.command("show", cls=Command, short_help="Show where one conversation lies.")
def _show(
    pool: Annotated[str, typer.Argument(metavar="POOL", help=f"The pool's directory; left out, {VARIABLE} names it.")],
    conversation: Annotated[str | None, typer.Argument(metavar="ID", help="The conversation's id, in full.")] = None,
    catalog: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one conversation: its figures, and the blocks and checkpoints that hold it.

    \b
    Examples:
      mmkv-inspect show /mnt/kv chat-42
      mmkv-inspect show /mnt/kv -- -id-that-starts-with-a-dash
      mmkv-inspect show /mnt/kv $'id with \\x1b an escape' --json
    """
    if conversation is None:
        # One argument is the id: typer fills from the left.
        pool, conversation = os.environ.get(VARIABLE, ""), pool
        if not pool:
            raise typer.BadParameter(f"both POOL and ID are needed, for {VARIABLE} names no pool")
    view = read_pool(Path(pool), catalog)
    pairs = zip(view.rows, view.infos(), strict=True)
    row, info = next((pair for pair in pairs if pair[0].name == conversation), (None, None))
    if row is None or info is None:
        raise ConversationNotFound(f"{view.path} holds no conversation {conversation!r}")
    if as_json:
        from mmkv_inspect.records import conversation_record, print_json

        print_json(conversation_record(row, info))
    else:
        from mmkv_inspect.tables import print_conversation

        print_conversation(row, info, view.description.geometry, view.now, hot=view.has_hot_tier)


@app.command("stats", cls=Command, short_help="Show a pool in figures.")
def _stats(pool: PoolArgument, catalog: CatalogOption = None, as_json: JsonOption = False) -> None:
    """Show a pool in figures: space, fragmentation, layout, owner, and the path that bytes take.

    Space is counted from the catalog at this moment; transfers are what the owner noted last, about every second.
    Ends with 1 if a file of the pool is missing or too short, or if its owner cannot use a tier.

    \b
    Examples:
      mmkv-inspect stats /mnt/kv
      mmkv-inspect stats /mnt/kv --json | jq '.used / .capacity'
    """
    from mmkv_inspect.usage import file_problems, space_use, tier_problems

    view = read_pool(pool, catalog)
    use, problems = space_use(view), [*file_problems(view), *tier_problems(view)]
    if as_json:
        from mmkv_inspect.records import print_json, stats_record

        print_json(stats_record(view, use, problems))
    else:
        from mmkv_inspect.tables import print_stats

        print_stats(view, use, problems)
    if problems:
        raise typer.Exit(1)


@app.command("top", cls=Command, short_help="Watch what a running engine does with its pool.")
def _top(
    pool: PoolArgument,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How long from one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    catalog: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch what a running engine does with its pool: tiers, rates, and each transfer under way.

    Reads what the engine notes of itself in the catalog, about once a second while it changes, and never makes it
    wait. GB/s counts bytes as they move. Says so if the engine is gone, or if it should have noted something and has
    not. Ends with Ctrl-C. Into a pipe, and with --json, it is one look, which has no rates.

    \b
    Examples:
      mmkv-inspect top /mnt/kv
      mmkv-inspect top /mnt/kv --interval 5
      mmkv-inspect top /mnt/kv --json | jq '.engine.under_way[] | {what, layers_done, bytes}'
    """
    from mmkv_inspect.sampling import read_sample

    if as_json:
        from mmkv_inspect.records import print_json
        from mmkv_inspect.top import sample_record

        print_json(sample_record(read_sample(pool, catalog)))
        return
    from mmkv_inspect.top import print_frame, watch

    if once or not sys.stdout.isatty():
        print_frame(read_sample(pool, catalog))
    else:
        watch(pool, catalog, interval)


@app.command("rm", cls=Command, short_help="Drop conversations.")
def _rm(
    pool: Annotated[Path, typer.Argument(metavar="POOL", readable=False, help="The pool's directory, always said.")],
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Conversations to drop.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="GLOB", help="All, if the pool is of a model that matches.")
    ] = None,
    older_than: _OlderThan = None,
    namespace: _Namespace = None,
    match: _Match = None,
    catalog: CatalogOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only print what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before dropping what options select.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="How long to wait for the engine.")
    ] = 5.0,
) -> None:
    """Drop conversations: those named, or all that meet every option given.

    Beside a running engine this is a request in the pool's catalog, which the engine carries out within a second.
    Where no engine has the pool open, it is opened for the moment. What is pinned goes, too. What a transfer still
    uses is freed when the transfer is done. An engine whose conversation is gone reads its prompt again.

    \b
    Examples:
      mmkv-inspect rm /mnt/kv chat-42 chat-43
      mmkv-inspect rm /mnt/kv --namespace tenant-7 --older-than 7d --dry-run
      mmkv-inspect rm /mnt/kv --older-than 30d --yes
      mmkv-inspect rm /mnt/kv --model 'old-model*' --yes

    Ends with 1 if an id is not there or is not gone at the end, with 0 if options select nothing.
    """
    by_options = any(option is not None for option in (model, older_than, namespace, match))
    if bool(ids) == by_options:
        raise typer.BadParameter("name conversations, or give --model, --older-than, --namespace or --match; not both")
    view = read_pool(pool, catalog)
    if ids:
        chosen, missing = _named(view, ids)
    else:
        chosen, missing = _selected(view, model, Selection(namespace=namespace, match=match, older_than=older_than)), []
    for name in missing:
        complain(f"{view.path} holds no conversation {name!r}")
    if dry_run:
        for name in chosen:
            print(f"would drop {visible(name)}")
    elif chosen:
        if by_options and not yes:
            _ask(view, chosen)
        missing += _drop(view, catalog, chosen, wait)
    if by_options and not chosen:
        print("nothing to drop")
    if missing:
        raise typer.Exit(1)


def _named(view: PoolView, ids: list[str]) -> tuple[list[str], list[str]]:
    present = {row.name for row in view.rows}
    names = list(dict.fromkeys(ids))
    return [name for name in names if name in present], [name for name in names if name not in present]


def _selected(view: PoolView, model: str | None, selection: Selection) -> list[str]:
    from fnmatch import fnmatchcase

    if model is not None and not fnmatchcase(view.description.layout.model, model):
        return []
    return [info.conversation for info in selection.chosen(view.infos(), view.now)]


def _ask(view: PoolView, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody to ask on this input: give --yes, or --dry-run to see what would go")
    chosen = set(names)
    size = sum(info.owned_bytes for info in view.infos() if info.conversation in chosen)
    pinned = sum(row.pinned for row in view.rows if row.name in chosen)
    for name in names:
        print(visible(name))
    of = count_text(len(view.rows), "conversation")
    typer.confirm(f"Drop these {len(names)} of {of} ({pinned} pinned, at least {size_text(size)})?", abort=True)


def _drop(view: PoolView, catalog: Path | None, names: list[str], wait: float) -> list[str]:
    """Drop, print what became of each, and return those that are still there."""
    from mmkv_inspect.removal import Outcome, remove

    outcomes = remove(view.path, catalog, names, wait)
    for name, outcome in outcomes.items():
        if outcome is Outcome.DROPPED:
            print(f"dropped {visible(name)}")
        elif outcome is Outcome.GONE:
            print(f"gone already {visible(name)}")
        elif outcome is Outcome.REFUSED:
            complain(f"{name!r} is still there, though the engine took the request: it was parked again, or refused")
        else:
            complain(f"{name!r} waits: the engine has not taken the request in {wait:g} s, and may do so later")
    return [name for name, outcome in outcomes.items() if outcome in (Outcome.REFUSED, Outcome.WAITING)]


@app.command("probe", cls=Command, short_help="Find out what this machine can do for a pool.")
def _probe(
    directory: Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="Where a pool is, or would be.")],
    as_json: JsonOption = False,
) -> None:
    """Find out what this machine can do for a pool in a directory: which path bytes would take, how fast, and why.

    Looks at the file system, free space, RAM, huge pages and limits; writes and reads at most 256 MB of the medium,
    copies some MB between the host and each GPU that CuPy sees, and page-locks a file if the directory is in RAM.
    Ends with what to change for a better path. Takes a few seconds, needs neither CuPy nor kvikio, and leaves nothing
    behind. DIR need not exist; then its nearest parent is measured. Beside a running engine it takes a share of the
    bus for that time.

    \b
    Examples:
      mmkv-inspect probe /dev/shm
      mmkv-inspect probe /mnt/kv --json | jq -r '.path.path, .advice[]'

    Ends with 1 if there can be no pool in DIR.
    """
    from mmkv_inspect.probe import print_probe, probe, probe_record

    found = probe(directory)
    if as_json:
        from mmkv_inspect.records import print_json

        print_json(probe_record(found))
    else:
        print_probe(found)
    if found.problems:
        raise typer.Exit(1)
