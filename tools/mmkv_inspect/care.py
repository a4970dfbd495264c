"""The commands that look after a pool: check, export, import."""

# ruff: noqa: D301 - the \b in a help text keeps its lines apart

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.errors import MmkvError
from mmkv_inspect.commands import CatalogOption, Command, JsonOption, PoolArgument, app
from mmkv_inspect.text import visible

if TYPE_CHECKING:
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
    print(f"{found.conversations} conversations, {found.versions} versions: {_summary(found)}")


def _summary(found: Check) -> str:
    counts = [
        (sum(finding.severity == severity for finding in found.findings), severity)
        for severity in ("error", "warning", "note")
    ]
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count) or "fine"
