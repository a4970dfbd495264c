"""Checking a pool: catalog, blocks, files and tiers against each other; and repairing what needs no guess."""

from __future__ import annotations

import sqlite3
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmkv.catalog import Catalog
from mmkv.check_files import check_capacity, check_files, check_hot, check_names, expected_files
from mmkv.check_rows import Rows, read_rows
from mmkv.check_space import check_ids, check_sharing, check_versions
from mmkv.check_units import check_units
from mmkv.directory import Description, OwnerLock, catalog_file, owner_pid, prepare, read_description
from mmkv.errors import MmkvError, PoolCorrupt, PoolLocked
from mmkv.findings import Finding, Repair, Statement
from mmkv.medium import boot_id
from mmkv.store.files import PoolFile

__all__ = ["Action", "Check", "check_pool", "repair_pool"]

_LOOKS = 3
_ROUNDS = 3
_FATAL = ("error", "warning")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a repair."""

    text: str
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and what a repair would do.

    Attributes
    ----------
    conversations, versions : int
        How many were looked at.
    findings : tuple of Finding
        What is not as it should be.
    actions : tuple of Action
        What `repair_pool` would do.
    trims : bool
        Whether it would cut the files, too.
    """

    conversations: int
    versions: int
    findings: tuple[Finding, ...]
    actions: tuple[Action, ...]
    trims: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing but notes."""
        return not any(finding.severity in _FATAL for finding in self.findings)


def check_pool(path: Path, elsewhere: Path | None = None) -> Check:
    """Check a pool, beside its owner or without one. Writes nothing, and no lock is held while it reads.

    Costs a pass over the catalog and over the file of ids. What the owner changed while the files were read is looked
    at again.

    Parameters
    ----------
    path : Path
        The pool's directory.
    elsewhere : Path, optional
        Where its catalog lies, if not there.

    Raises
    ------
    MmkvError, ValueError
        There is no pool, or it may not be read.
    """
    prepare(path, create=False)
    try:
        description = read_description(path)
        file = catalog_file(path, description, elsewhere)
        catalog = Catalog(file, readonly=True)
    except PoolCorrupt as error:
        advice = "restore it from a copy, or empty the directory to start anew: every prompt is read again"
        return Check(0, 0, (Finding("error", "pool-unreadable", str(error), advice),), ())
    try:
        owned = owner_pid(path) is not None
        check = _look(path, description, catalog, owned=owned)
        for _ in range(_LOOKS - 1):
            owned = owned or owner_pid(path) is not None
            if not check.findings or not owned:
                break
            # The owner may have changed the files after the rows were read: what stays is so.
            check = _both(check, _look(path, description, catalog, owned=True))
    finally:
        catalog.close()
    return check


def _both(first: Check, second: Check) -> Check:
    seen = set(first.findings)
    findings = tuple(finding for finding in second.findings if finding in seen)
    return Check(second.conversations, second.versions, findings, second.actions if findings else (), second.trims)


def _look(path: Path, description: Description, catalog: Catalog, *, owned: bool) -> Check:
    try:
        damage = catalog.damage()
        rows = read_rows(catalog) if not damage else Rows()
        uuid = catalog.get_property("uuid")
    except PoolCorrupt as error:
        damage, rows, uuid = [str(error)], Rows(), None
    if damage:
        advice = "restore it from a copy, or empty the directory to start anew: every prompt is read again"
        return Check(0, 0, tuple(Finding("error", "catalog-broken", text, advice) for text in damage), ())
    geometry = description.geometry
    if uuid != description.uuid:
        text = f"{catalog.path} belongs to another pool than {path / 'pool.json'}"
        rows.found("error", "catalog-foreign", text, "put the catalog of this pool back")
        return _result(rows)
    check_versions(rows, geometry)
    readable = check_files(rows, path, geometry, tier=0, owned=owned)
    fitting: dict[int, int] = {}
    if readable:
        try:
            tokens = PoolFile(path / "tokens.kv", geometry.tokens_segment_bytes, readonly=True)
        except MmkvError as error:
            rows.found("error", "ids-unreadable", str(error), "see the file's permissions")
        else:
            try:
                fitting = check_ids(rows, geometry, tokens)
            finally:
                tokens.close()
    check_sharing(rows, fitting)
    check_names(rows, path, catalog.path, geometry)
    _guarded(rows, lambda: check_capacity(rows, catalog, geometry))
    _guarded(rows, lambda: check_units(rows, catalog, geometry))
    _guarded(rows, lambda: check_hot(rows, path, description, catalog, owned=owned))
    if not owned:
        _check_boots(rows)
    return _result(rows)


def _guarded(rows: Rows, check: Callable[[], None]) -> None:
    try:
        check()
    except PoolCorrupt as error:
        rows.found("error", "property-invalid", str(error), "restore the catalog from a copy")


def _check_boots(rows: Rows) -> None:
    """What was not synced may never have reached the medium before another boot."""
    for conversation, version in list(rows.held()):
        if version.id == conversation.version and not version.synced and version.boot != boot_id():
            rows.found(
                "warning",
                "version-unsynced",
                f"{rows.name_of(version)} was parked in another boot, and not synced",
                "nothing: the next opening goes back to the version before it, or drops it",
                Repair(condemned=(version.id,)),
            )


def _result(rows: Rows) -> Check:
    repairs = [finding.repair for finding in rows.findings if finding.repair is not None]
    actions = [
        Action(repair.text, repair.statements) for repair in dict.fromkeys(repairs) if repair.text and repair.statements
    ]
    actions += _condemned(rows, {version for repair in repairs for version in repair.condemned})
    trims = any(repair.trim for repair in repairs)
    if trims:
        actions.append(Action("cut the files to what the catalog lists"))
    return Check(len(rows.conversations), len(rows.versions), tuple(rows.findings), tuple(actions), trims)


def _condemned(rows: Rows, condemned: set[int]) -> list[Action]:
    """What becomes of conversations whose versions must not be served."""
    actions = []
    own = defaultdict(list)
    for version in rows.versions.values():
        own[version.conversation].append(version)
    for conversation in rows.conversations.values():
        if conversation.version not in condemned:
            continue
        good = [v for v in own[conversation.id] if v.sound and v.synced and v.id not in condemned]
        name = repr(conversation.name[:80])
        if good:
            newest = max(good, key=lambda version: version.id)
            text = f"go back to version {newest.id} of {name}, of {newest.tokens} tokens"
            change: Statement = ("UPDATE conversations SET version = ? WHERE id = ?", (newest.id, conversation.id))
        else:
            text, change = f"drop {name}", ("DELETE FROM conversations WHERE id = ?", (conversation.id,))
            condemned |= {version.id for version in own[conversation.id]}
        actions.append(Action(text, (change,)))
    for version_id in sorted(condemned):
        known = rows.versions.get(version_id)
        name = f"version {version_id}" if known is None else rows.name_of(known)
        changes = tuple(
            (f"DELETE FROM {table} WHERE {column} = ?", (version_id,))
            for table, column in (("extents", "version"), ("checkpoints", "version"), ("versions", "id"))
        )
        actions.append(Action(f"delete {name}", changes))
    return actions


def repair_pool(path: Path, elsewhere: Path | None = None) -> tuple[list[Action], Check]:
    """Repair what needs no guess, as the pool's owner, and check again.

    Dangling rows go, versions whose blocks cannot be theirs are replaced by the one before, or dropped, and files are
    cut to what the catalog lists. Nothing is written to a layer file.

    Returns
    -------
    list of Action, Check
        What was done; what is left.

    Raises
    ------
    PoolLocked
        A process owns the pool.
    MmkvError, ValueError
        There is no pool, or it may not be written.
    """
    prepare(path, create=False)
    try:
        lock = OwnerLock(path)
    except PoolLocked as error:
        raise PoolLocked(
            f"process {error.pid} owns the pool at {path}: end it before a repair, which nothing may come between",
            error.pid,
        ) from None
    done: list[Action] = []
    try:
        for _ in range(_ROUNDS):
            check = _unowned(path, elsewhere)
            if not check.actions:
                break
            _carry_out(path, elsewhere, check)
            done += check.actions
        return done, _unowned(path, elsewhere)
    finally:
        lock.release()


def _unowned(path: Path, elsewhere: Path | None) -> Check:
    description = read_description(path)
    catalog = Catalog(catalog_file(path, description, elsewhere))
    try:
        return _look(path, description, catalog, owned=False)
    finally:
        catalog.close()


def _carry_out(path: Path, elsewhere: Path | None, check: Check) -> None:
    description = read_description(path)
    catalog = Catalog(catalog_file(path, description, elsewhere))
    try:
        catalog.write(partial(_execute, check.actions), synced=True, needed=True)
        if check.trims:
            _trim(path, description, catalog)
    finally:
        catalog.close()


def _execute(actions: Sequence[Action], db: sqlite3.Connection) -> None:
    for action in actions:
        for statement, values in action.statements:
            db.execute(statement, values)


def _trim(path: Path, description: Description, catalog: Catalog) -> None:
    segments = {kind: catalog.segments(kind) for kind in ("blocks", "checkpoints")}
    for name, (kind, size) in expected_files(description.geometry).items():
        if not stat.S_ISREG((path / name).lstat().st_mode):
            raise PoolCorrupt(f"{path / name} is not a plain file")
        file = PoolFile(path / name, size)
        try:
            file.trim(segments[kind])
        finally:
            file.close()
