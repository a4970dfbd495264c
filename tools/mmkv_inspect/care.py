"""The commands that look after a pool: check, verify, export, import."""

# ruff: noqa: D301 - the \b in a help text keeps its lines apart

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.errors import MmkvError
from mmkv_inspect.commands import VARIABLE, CatalogOption, Command, JsonOption, PoolArgument, app
from mmkv_inspect.text import count_text, size_text, visible

if TYPE_CHECKING:
    from mmkv.audit import Audit
    from mmkv.checking import Action, Check

__all__ = ["app"]


@app.command("check", cls=Command, short_help="Check a pool, and repair it.")
def _check(
    pool: PoolArgument,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what needs no guess; no engine may run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only print what --fix would do.")] = False,
    catalog: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a pool: its catalog, blocks, files and tiers against each other.

    Finds what no conversation accounts for, blocks that two conversations hold and cannot share, ids that are not
    those of a conversation's blocks, files that are missing or too short, and a hot tier that is not the pool's.
    Works beside a running engine, by one snapshot of the catalog. The bytes of keys and values are not read.

    --fix deletes rows that nothing needs, goes back to the version before, or drops a conversation, where blocks
    cannot be its own, and cuts files to what the catalog lists. It writes into no layer file, and prints all it does.

    \b
    Examples:
      mmkv-inspect check /mnt/kv
      mmkv-inspect check /mnt/kv --dry-run
      mmkv-inspect check /mnt/kv --fix
      mmkv-inspect check /mnt/kv --json | jq -r '.findings[].code'

    Ends with 1 if there are errors or warnings, after --fix if some are left; notes alone are fine.
    """
    from mmkv.checking import check_pool, repair_pool

    if fix and dry_run:
        raise typer.BadParameter("give --fix or --dry-run, not both")
    done: list[Action] = []
    try:
        if fix:
            done, found = repair_pool(pool, catalog)
        else:
            found = check_pool(pool, catalog)
    except ValueError as error:
        raise MmkvError(str(error)) from error
    if as_json:
        from mmkv_inspect.records import print_json

        print_json(_record(pool, found, done, dry_run=dry_run))
    else:
        _print(found, done, dry_run=dry_run)
    if not found.is_fine:
        raise typer.Exit(1)


def _record(pool: Path, found: Check, done: list[Action], *, dry_run: bool) -> dict[str, Any]:
    findings = [asdict(finding) for finding in found.findings]
    for finding in findings:
        finding["repairable"] = finding.pop("repair") is not None
    return {
        "pool": str(pool),
        "fine": found.is_fine,
        "conversations": found.conversations,
        "versions": found.versions,
        "findings": findings,
        "done": [action.text for action in done],
        **({"would_do": [action.text for action in found.actions]} if dry_run else {}),
    }


def _print(found: Check, done: list[Action], *, dry_run: bool) -> None:
    for action in done:
        print(f"done: {visible(action.text)}")
    for finding in found.findings:
        print(f"{finding.severity}: {finding.code}: {visible(finding.text)}; {visible(finding.advice)}")
    for action in found.actions if dry_run else ():
        print(f"would {visible(action.text)}")
    seen = f"{count_text(found.conversations, 'conversation')}, {count_text(found.versions, 'version')}"
    print(f"{seen}: {_summary(found)}")


def _summary(found: Check) -> str:
    counts = [
        (sum(finding.severity == severity for finding in found.findings), severity)
        for severity in ("error", "warning", "note")
    ]
    return ", ".join(count_text(count, name) for count, name in counts if count) or "fine"


@app.command("verify", cls=Command, short_help="Read all back, and compare it with its checksums.")
def _verify(
    pool: Annotated[
        str | None, typer.Argument(metavar="POOL", help=f"The pool's directory; left out, {VARIABLE} names it.")
    ] = None,
    conversations: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Conversations, in full.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All conversations.")] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Put what differs into quarantine; no engine may run.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="How many read at once; as many as cores, on a disk 16.")
    ] = None,
    catalog: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read parked bytes back, all of every block, and compare them with the checksums that were parked with them.

    Reads at the speed of the disk, past the page cache, or of the memory; in a hot tier what lies there, too. Works
    beside a running engine, which does not wait: what it changed meanwhile is looked at again. What was parked
    without checksums is counted.

    What differs is bad for all conversations that hold it. An engine notices when it takes it; --quarantine lets it
    know before: those conversations then end before it, and a park writes it anew.

    \b
    Examples:
      mmkv-inspect verify /mnt/kv --all
      mmkv-inspect verify /mnt/kv chat-42
      mmkv-inspect verify /mnt/kv --all --quarantine
      mmkv-inspect verify /mnt/kv --all --json | jq '.corrupt[].conversations'

    Ends with 1 if something differs, is in quarantine or is lost.
    """
    from mmkv.audit import audit_pool
    from mmkv_inspect.progress import Meter

    names = list(conversations or ())
    if pool is not None and not names and not everything:
        # One argument is the id: typer fills from the left.
        names, pool = [pool], None
    where = pool or os.environ.get(VARIABLE, "")
    if not where or bool(names) == everything:
        raise typer.BadParameter("give POOL and either IDs or --all" + ("" if where else f"; {VARIABLE} names no pool"))
    with Meter("read") as meter:
        try:
            found = audit_pool(
                Path(where),
                None if everything else names,
                elsewhere=catalog,
                threads=threads,
                quarantine=quarantine,
                progress=meter.show,
            )
        except ValueError as error:
            raise MmkvError(str(error)) from error
    if as_json:
        from mmkv_inspect.records import print_json

        print_json({"pool": where, **asdict(found), "gbps": found.gbps})
    else:
        _print_audit(found, quarantine=quarantine)
    if found.corrupt or found.quarantined or found.lost:
        raise typer.Exit(1)


def _print_audit(found: Audit, *, quarantine: bool) -> None:
    for one in found.corrupt:
        names = ", ".join(repr(name) for name in one.conversations)
        first, end = one.tokens
        print(
            f"corrupt: {visible(names)}: layer {one.layer}, {visible(repr(one.plane))}, tokens {first} to {end - 1} "
            f"({one.kind} {one.number}, {one.tier})"
        )
    now = ", now in quarantine" if quarantine else ""
    unit, units = "block or checkpoint", "blocks or checkpoints"
    notes = [
        (len(found.corrupt), f"unit differs{now}", f"units differ{now}"),
        (found.quarantined, f"{unit} was in quarantine", f"{units} were in quarantine"),
        (found.lost, f"{unit} was in a hot tier that is gone", f"{units} were in a hot tier that is gone"),
        (found.unverified, f"{unit} has no checksums", f"{units} have no checksums"),
    ]
    told = [count_text(*note) for note in notes if note[0]]
    speed = f"{size_text(found.bytes)} in {found.seconds:.1f} s, {found.gbps:.2f} GB/s"
    print(f"{count_text(found.conversations, 'conversation')}, {speed}: {'; '.join(told) or 'fine'}")


@app.command("export", cls=Command, short_help="Write one conversation to a file.")
def _export(
    pool: Annotated[str, typer.Argument(metavar="POOL", help=f"The pool's directory; left out, {VARIABLE} names it.")],
    conversation: Annotated[str, typer.Argument(metavar="ID", help="The conversation's id, in full.")],
    file: Annotated[Path | None, typer.Argument(metavar="FILE", readable=False, help="The file to write.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NS", help="Refuse it if it is in another namespace.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace FILE if it exists.")] = False,
    catalog: CatalogOption = None,
) -> None:
    """Write one conversation to a safetensors file, which import takes into any pool of the same layout.

    Planes come as planes.LAYER.NAME of shape (tokens, ...), states as states.TOKENS.LAYER.NAME for each checkpoint,
    the ids as token_ids; all else stands in the metadata. Works beside a running engine, which does not wait: what it
    parks anew meanwhile is read again. FILE has its name only when it is whole. It is its user's text: mode 0600.

    \b
    Examples:
      mmkv-inspect export /mnt/kv chat-42 chat-42.safetensors
      MMKV_POOL=/mnt/kv mmkv-inspect export chat-42 chat-42.safetensors
    """
    from mmkv.exporting import export_conversation

    if file is None:
        # Two arguments are the id and the file: typer fills from the left.
        pool, conversation, file = os.environ.get(VARIABLE, ""), pool, Path(conversation)
        if not pool:
            raise typer.BadParameter(f"POOL, ID and FILE are needed, for {VARIABLE} names no pool")
    try:
        size = export_conversation(
            Path(pool), conversation, file, elsewhere=catalog, namespace=namespace, replace=force
        )
    except ValueError as error:
        raise MmkvError(str(error)) from error
    print(f"wrote {visible(conversation)} to {visible(str(file))}, {size_text(size)}")


@app.command("import", cls=Command, short_help="Take one conversation in from a file.")
def _import(
    pool: Annotated[Path, typer.Argument(metavar="POOL", readable=False, help="The pool's directory, always said.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", readable=False, help="What export wrote.")],
    conversation: Annotated[str | None, typer.Argument(metavar="ID", help="Its id here, if not the same.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NS", help="Its namespace here, if not the same.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a conversation of that id.")] = False,
    catalog: CatalogOption = None,
) -> None:
    """Take one conversation in from a file that export wrote, into a pool that no engine has open.

    The file must be of the pool's layout; type, shape and place of every tensor are checked before a byte moves. The
    conversation is there as a whole, on the medium, or not at all; others may be dropped to make room. Conversations
    of its namespace will share its bytes, so import only what you trust as much as your engine, or into a namespace of
    its own.

    \b
    Examples:
      mmkv-inspect import /mnt/kv chat-42.safetensors
      mmkv-inspect import /mnt/kv chat-42.safetensors copy-of-42 --namespace guests
    """
    # The whole library, which commands that only read do without.
    from mmkv.pool import Pool

    try:
        # Nothing here may look for a GPU.
        with Pool.open(pool, catalog=catalog, store="posix", threads=1) as opened:
            receipt = opened.import_file(file, conversation, namespace=namespace, replace=replace)
    except ValueError as error:
        raise MmkvError(str(error)) from error
    print(f"imported {visible(str(file))}: {receipt.tokens} tokens, {size_text(receipt.bytes)}")
