"""The rows of a catalog as they are, those that make no sense among them, and what is wrong with each by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv.catalog import Catalog, Resident
from mmkv.distrust import bounded_rows
from mmkv.findings import Finding, Repair, Severity
from mmkv.geometry import Extent
from mmkv.rows import Checkpoint

__all__ = ["Conversation", "Rows", "Version", "read_rows"]

_MOST = 1 << 60
_LATE_USE = 1 << 59
_MAX_TIME = 1e11
_KINDS = ("blocks", "checkpoints")


@dataclass(slots=True, eq=False)
class Version:
    """A row of `versions` with its extents and checkpoints; `sound` is cleared where they cannot be served."""

    id: int
    conversation: int
    tokens: int
    boot: str
    synced: bool
    hashes: npt.NDArray[np.uint64]
    extents: list[Extent] = field(default_factory=list)
    points: list[Checkpoint] = field(default_factory=list)
    sound: bool = True


@dataclass(slots=True, eq=False)
class Conversation:
    """A row of `conversations`."""

    id: int
    name: str
    namespace: str
    version: int
    used: int


@dataclass(slots=True, eq=False)
class Rows:
    """What a catalog holds at one moment.

    Attributes
    ----------
    conversations, versions : dict
        By id; those that make sense.
    segments : dict
        By tier and kind, the numbers in order.
    findings : list of Finding
        What makes no sense by itself.
    """

    conversations: dict[int, Conversation] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    segments: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    residents: list[Resident] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def linked(self, conversation: Conversation) -> tuple[Version | None, Version | None]:
        """The newest version of a conversation, and the one that is kept until it is on the medium."""
        own = [version for version in self.versions.values() if version.conversation == conversation.id]
        newest = next((version for version in own if version.id == conversation.version), None)
        older = [version for version in own if version is not newest and version.synced]
        return newest, max(older, key=lambda version: version.id, default=None)

    def held(self) -> Iterator[tuple[Conversation, Version]]:
        """The versions that a pool would hold the blocks of, those that are not sound left out."""
        own = defaultdict(list)
        for version in self.versions.values():
            own[version.conversation].append(version)
        for conversation in self.conversations.values():
            mine = own[conversation.id]
            older = [version for version in mine if version.id != conversation.version and version.synced]
            fallback = max(older, key=lambda version: version.id, default=None)
            for version in mine:
                if version.sound and (version.id == conversation.version or version is fallback):
                    yield conversation, version

    def name_of(self, version: Version) -> str:
        """A version as one reads of it."""
        owner = self.conversations.get(version.conversation)
        return f"version {version.id}" + ("" if owner is None else f" of {owner.name[:80]!r}")

    def found(self, severity: Severity, code: str, text: str, advice: str, repair: Repair | None = None) -> None:
        """Note a finding."""
        self.findings.append(Finding(severity, code, text, advice, repair))

    def condemn(self, code: str, version: Version, text: str) -> None:
        """Note that a version cannot be served."""
        version.sound = False
        advice = "drop it with --fix: its prompt is read again, or the version before it is served"
        self.found("error", code, f"{self.name_of(version)} {text}", advice, Repair(condemned=(version.id,)))


def read_rows(catalog: Catalog) -> Rows:
    """All rows of a catalog, read in one short transaction.

    Raises
    ------
    MmkvError
        SQLite cannot read them.
    """
    # Text is read as bytes: SQLite takes any for text, and Python does not.
    queries = {
        "conversations": "SELECT id, CAST(name AS BLOB), typeof(name), CAST(namespace AS BLOB), typeof(namespace), "
        "version, created, parked, taken, used FROM conversations",
        "versions": "SELECT id, conversation, tokens, created, CAST(boot AS BLOB), synced, CAST(hashes AS BLOB) "
        "FROM versions",
        "extents": "SELECT version, tier, ordinal, first, count FROM extents",
        "checkpoints": "SELECT version, tier, tokens, record, boundary FROM checkpoints",
        "segments": "SELECT tier, CAST(kind AS BLOB), number FROM segments",
        "residents": "SELECT CAST(kind AS BLOB), number, hot, dirty FROM residents",
    }
    if not catalog.has_residents:
        del queries["residents"]
    with catalog.snapshot() as db:
        tables = {name: bounded_rows(db, catalog.path, query) for name, query in queries.items()}
    rows = Rows()
    for row in tables["conversations"]:
        _take_conversation(rows, row)
    for row in tables["versions"]:
        _take_version(rows, row)
    for row in tables["segments"]:
        _take_segment(rows, row)
    for row in tables.get("residents", ()):
        _take_resident(rows, row)
    _take_extents(rows, tables["extents"])
    _take_checkpoints(rows, tables["checkpoints"])
    _check_links(rows)
    return rows


def _is_count(value: Any, least: int = 0, most: int = _MOST) -> bool:
    return type(value) is int and least <= value <= most


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_TIME


def _text(value: Any, kind: str = "text") -> str | None:
    try:
        return value.decode() if kind == "text" and isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _take_conversation(rows: Rows, row: tuple[Any, ...]) -> None:
    number, raw, kind, raw_namespace, namespace_kind, version, created, parked, taken, used = row
    name, namespace = _text(raw, kind), _text(raw_namespace, namespace_kind)
    wrong = {
        "name": None if name is not None else raw,
        "namespace": None if namespace is not None else raw_namespace,
        "version": None if _is_count(version) else version,
        "created": None if _is_time(created) else created,
        "parked": None if _is_time(parked) else parked,
        "taken": None if taken is None or _is_time(taken) else taken,
        "used": None if _is_count(used) else used,
    }
    bad = {key: value for key, value in wrong.items() if value is not None}
    if bad or name is None or namespace is None or version is None or created is None or parked is None or used is None:
        values = ", ".join(f"{key} {_shown(value)}" for key, value in bad.items()) or "a value that is missing"
        what = f"conversation {number}" + ("" if name is None else f", {name[:80]!r},")
        rows.found(
            "error",
            "row-invalid",
            f"{what} has {values}",
            "drop it with --fix",
            Repair(f"drop {what.rstrip(',')}", (("DELETE FROM conversations WHERE id = ?", (number,)),)),
        )
        return
    if used > _LATE_USE:
        rows.found(
            "warning",
            "counter-high",
            f"{name[:80]!r} has been used {used} times, by its counter, which ends at {_MOST}",
            "let --fix set the counter back: the order of use is lost",
            Repair("set the order of use back", (("UPDATE conversations SET used = id", ()),)),
        )
    rows.conversations[number] = Conversation(number, name, namespace, version, used)


def _take_version(rows: Rows, row: tuple[Any, ...]) -> None:
    number, conversation, tokens, created, boot, synced, hashes = row
    text = _text(boot)
    whole = isinstance(hashes, bytes) and len(hashes) % 8 == 0
    if not (_is_count(conversation) and _is_count(tokens, 1) and _is_time(created) and whole) or text is None:
        rows.found(
            "error",
            "row-invalid",
            f"version {number} has conversation {_shown(conversation)}, {_shown(tokens)} tokens, time "
            f"{_shown(created)}, and hashes of {len(hashes) if isinstance(hashes, bytes) else 'no'} bytes",
            "drop it with --fix",
            Repair(condemned=(number,)),
        )
        return
    rows.versions[number] = Version(
        number, conversation, tokens, text, bool(synced), np.frombuffer(hashes, dtype=np.uint64)
    )


def _take_segment(rows: Rows, row: tuple[Any, ...]) -> None:
    tier, kind, number = row
    name = _text(kind)
    if tier not in (0, 1) or name not in _KINDS or not _is_count(number, most=1 << 40):
        rows.found(
            "error",
            "row-invalid",
            f"a segment is number {_shown(number)} of {_shown(kind)} in tier {_shown(tier)}",
            "delete the row with --fix",
            _delete("segments", "tier IS ? AND CAST(kind AS BLOB) IS ? AND number IS ?", row),
        )
        return
    rows.segments.setdefault((tier, name), []).append(number)


def _take_resident(rows: Rows, row: tuple[Any, ...]) -> None:
    kind, number, hot, dirty = row
    name = _text(kind)
    if name not in _KINDS or not _is_count(number) or not _is_count(hot, most=1 << 40) or dirty not in (0, 1):
        rows.found(
            "error",
            "row-invalid",
            f"a resident of the hot tier is {_shown(kind)} {_shown(number)} at {_shown(hot)}",
            "delete the row with --fix",
            _delete("residents", "CAST(kind AS BLOB) IS ? AND number IS ?", row[:2]),
        )
        return
    rows.residents.append(Resident(name, number, hot, bool(dirty)))


def _delete(table: str, where: str, values: tuple[Any, ...]) -> Repair:
    return Repair(f"delete a row of {table}", ((f"DELETE FROM {table} WHERE {where}", values),))


def _take_extents(rows: Rows, table: list[tuple[Any, ...]]) -> None:
    lost: dict[Any, int] = defaultdict(int)
    good = []
    for version, tier, ordinal, first, count in table:
        if tier != 0 or version not in rows.versions:
            lost[version] += 1
        elif not (_is_count(ordinal) and _is_count(first) and _is_count(count, 1)):
            rows.condemn("row-invalid", rows.versions[version], f"lists {_shown(count)} blocks from {_shown(first)} on")
        else:
            good.append((version, ordinal, Extent(first, count)))
    for version, _, extent in sorted(good):
        rows.versions[version].extents.append(extent)
    _dangling(rows, "extents", lost)


def _take_checkpoints(rows: Rows, table: list[tuple[Any, ...]]) -> None:
    lost: dict[Any, int] = defaultdict(int)
    for version, tier, tokens, record, boundary in table:
        if tier != 0 or version not in rows.versions:
            lost[version] += 1
        elif not (_is_count(tokens) and _is_count(record)):
            rows.condemn("row-invalid", rows.versions[version], f"has a checkpoint at {_shown(tokens)} tokens")
        else:
            rows.versions[version].points.append(Checkpoint(tokens, record, bool(boundary)))
    for version in rows.versions.values():
        version.points.sort()
    _dangling(rows, "checkpoints", lost)


def _dangling(rows: Rows, table: str, lost: dict[Any, int]) -> None:
    code = "extent-without-version" if table == "extents" else "checkpoint-without-version"
    for version, count in lost.items():
        gone = "" if version in rows.versions else ", which is not there"
        rows.found(
            "warning",
            code,
            f"{count} rows of {table} are of version {_shown(version)}{gone}",
            "delete them with --fix: they hold nothing",
            Repair(
                f"delete {count} {table} of version {_shown(version)}",
                ((f"DELETE FROM {table} WHERE version IS ? AND (tier != 0 OR ?)", (version, bool(gone))),),
            ),
        )


def _check_links(rows: Rows) -> None:
    """Versions without a conversation, conversations without a version, and versions that nobody needs any more."""
    own = defaultdict(list)
    for version in rows.versions.values():
        own[version.conversation].append(version)
    for number, versions in own.items():
        owner = rows.conversations.get(number)
        newest, fallback = (None, None) if owner is None else rows.linked(owner)
        for version in versions:
            if owner is None:
                code, why = "version-without-conversation", f"is of conversation {number}, which is not there"
            elif version is not newest and version is not fallback and newest is not None:
                code, why = "version-superseded", f"was followed by version {newest.id}"
            else:
                continue
            version.sound = False
            rows.found(
                "warning",
                code,
                f"{rows.name_of(version)} {why}",
                "delete it with --fix: nothing can reach it",
                Repair(condemned=(version.id,)),
            )
    for conversation in rows.conversations.values():
        if all(version.id != conversation.version for version in own.get(conversation.id, ())):
            rows.found(
                "error",
                "conversation-without-version",
                f"{conversation.name[:80]!r} has no version {conversation.version}, which is to be its newest",
                "let --fix go back to a version that is on the medium, or drop the conversation",
                Repair(condemned=(conversation.version,)),
            )
