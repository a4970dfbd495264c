"""Whose blocks and records the versions of a catalog list: within the files, once each, and with the ids they say."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.check_rows import Conversation, Rows, Version
from mmkv.errors import MmkvError
from mmkv.findings import Repair
from mmkv.geometry import ID_BYTES, Extent, Geometry, extent_blocks
from mmkv.info import union_extents
from mmkv.prefix import continued_hashes, first_seed
from mmkv.store.files import PoolFile

__all__ = ["Numbers", "check_ids", "check_residents", "check_sharing", "check_versions"]

_STEP_BLOCKS = 1024


class Numbers:
    """The numbers of allocated segments; asking costs the same whatever the numbers are."""

    def __init__(self, segments: Iterable[int], length: int) -> None:
        self._spans = union_extents([Extent(segment * length, length) for segment in segments] if length else [])
        self._firsts = [span.first for span in self._spans]

    def holds(self, extent: Extent) -> bool:
        """Whether all of a run is allocated."""
        at = bisect_right(self._firsts, extent.first) - 1
        return at >= 0 and extent.first + extent.blocks <= self._spans[at].first + self._spans[at].blocks


def check_versions(rows: Rows, geometry: Geometry) -> None:
    """Each version by itself: enough blocks and hashes, each block and record once, within the segments."""
    blocks = Numbers(rows.segments.get((0, "blocks"), ()), geometry.segment_blocks)
    records = Numbers(rows.segments.get((0, "checkpoints"), ()), geometry.segment_checkpoints)
    for version in rows.versions.values():
        if version.sound:
            found = next(_version_problems(version, geometry, blocks, records), None)
            if found is not None:
                rows.condemn(found[0], version, found[1])


def _version_problems(
    version: Version, geometry: Geometry, blocks: Numbers, records: Numbers
) -> Iterator[tuple[str, str]]:
    """What is wrong with a version, the first of which is enough: what follows relies on it."""
    listed, needed = extent_blocks(version.extents), geometry.blocks_for(version.tokens)
    if listed != needed:
        yield "blocks-count", f"has {version.tokens} tokens, which take {needed} blocks, and lists {listed}"
    hashes = version.tokens // geometry.block_tokens
    if len(version.hashes) != hashes:
        yield "hashes-count", f"has {version.tokens} tokens, which make {hashes} hashes, and {len(version.hashes)}"
    for extent in version.extents:
        if not blocks.holds(extent):
            yield "extent-outside", f"lists {_run(extent)}, not all of which are in allocated segments"
    if extent_blocks(union_extents(version.extents)) != listed:
        yield "extents-overlap", "lists a block twice"
    points = [point.tokens for point in version.points]
    if points and points[-1] > version.tokens:
        yield "checkpoint-behind", f"has {version.tokens} tokens, and a checkpoint at {points[-1]}"
    if geometry.layout.state_bytes and version.tokens not in points:
        yield "checkpoint-missing", f"has no checkpoint at its end, at {version.tokens} tokens"
    used = [point.record for point in version.points]
    if not all(records.holds(Extent(record, 1)) for record in used):
        yield "record-outside", "lists a record that is in no allocated segment"
    if len(set(used)) < len(used):
        yield "record-twice", "lists one record for two checkpoints"


def _run(extent: Extent) -> str:
    return f"blocks {extent.first} to {extent.first + extent.blocks - 1}"


def check_ids(rows: Rows, geometry: Geometry, tokens: PoolFile) -> dict[int, int]:
    """Whether the ids in the file are those that the hashes were made of. Returns how many blocks fit, by version."""
    fitting: dict[int, int] = {}
    for conversation, version in list(rows.held()):
        try:
            fitting[version.id] = fit = _fitting_blocks(conversation, version, geometry, tokens)
        except MmkvError as error:
            rows.condemn("ids-unreadable", version, f"has ids that cannot be read: {error}")
            continue
        if fit < len(version.hashes):
            first = fit * geometry.block_tokens
            text = (
                f"has ids at tokens {first} to {first + geometry.block_tokens - 1} that are not those of its hashes: "
                "these blocks are not its own"
            )
            rows.condemn("hash-mismatch", version, text)
    return fitting


def _fitting_blocks(conversation: Conversation, version: Version, geometry: Geometry, tokens: PoolFile) -> int:
    seed = first_seed(conversation.namespace)
    count = len(version.hashes)
    for start in range(0, count, _STEP_BLOCKS):
        stop = min(start + _STEP_BLOCKS, count)
        ids = np.empty((stop - start) * geometry.block_tokens, dtype=np.int64)
        view = ids.data.cast("B")
        runs = geometry.token_runs(version.extents, start * geometry.block_tokens, stop * geometry.block_tokens)
        at = 0
        for offset, length in zip(geometry.id_offsets(runs).tolist(), runs.tokens.tolist(), strict=True):
            tokens.read(view[at : at + length * ID_BYTES], offset)
            at += length * ID_BYTES
        hashes = continued_hashes(ids, seed, geometry.block_tokens)
        differing = np.flatnonzero(np.array(hashes, dtype=np.uint64) != version.hashes[start:stop])
        if len(differing):
            return start + int(differing[0])
        seed = hashes[-1]
    return count


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """Every block of every version that is held: which number, by which version, and after which ids."""

    number: npt.NDArray[np.int64]
    version: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    # The hash before the block; that after it, where it is whole.
    before: npt.NDArray[np.uint64]
    after: npt.NDArray[np.uint64]
    whole: npt.NDArray[np.bool_]


def _uses(held: Sequence[tuple[Conversation, Version]]) -> _Uses:
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    for conversation, version in held:
        numbers = block_numbers(version.extents)
        count, whole = len(numbers), len(version.hashes)
        seeds = np.concatenate([np.array([first_seed(conversation.namespace)], dtype=np.uint64), version.hashes])
        after = np.zeros(count, dtype=np.uint64)
        after[:whole] = version.hashes
        positions = np.arange(count)
        parts.append((numbers, np.full(count, version.id), positions, seeds[:count], after, positions < whole))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    # Of each number the whole uses come first: what the others are measured by.
    order = np.lexsort((~columns[5], columns[0]))
    return _Uses(*(column[order] for column in columns))


def check_sharing(rows: Rows, fitting: dict[int, int]) -> None:
    """Whether two versions hold a block, or a record, that they cannot share: one that stands for different ids."""
    held = list(rows.held())
    if not held:
        return
    uses = _uses(held)
    first = np.flatnonzero(np.append(True, np.diff(uses.number) != 0))
    head = np.repeat(first, np.diff(np.append(first, len(uses.number))))
    alike = (uses.position == uses.position[head]) & (uses.before == uses.before[head])
    alike &= ~(uses.whole & uses.whole[head]) | (uses.after == uses.after[head])
    for number in np.unique(uses.number[~alike])[:100].tolist():
        at = np.flatnonzero(uses.number == number)
        # Of these the ids say that the block is theirs.
        proven = [i for i in at if uses.whole[i] and uses.position[i] < fitting.get(int(uses.version[i]), 0)]
        kinds = {(int(uses.position[i]), int(uses.before[i])) for i in proven}
        guilty = _guilty(rows, uses.version[at].tolist(), uses.version[proven].tolist()) if len(kinds) < 2 else ()
        names = ", ".join(rows.name_of(rows.versions[v]) for v in uses.version[at][:4].tolist())
        rows.found(
            "error",
            "block-twice",
            f"block {number} is held by {names}, at tokens that are not the same",
            "drop with --fix those whose ids it does not hold" if guilty else "drop one of them with rm",
            Repair(condemned=guilty) if guilty else None,
        )
    _check_records(rows, held)


def _guilty(rows: Rows, holders: Sequence[int], proven: Sequence[int]) -> tuple[int, ...]:
    """The versions whose bytes are not in the block; where no ids tell, that may be any of them."""
    guilty = tuple(version for version in dict.fromkeys(holders) if version not in proven)
    for version in guilty:
        rows.versions[version].sound = False
    return guilty


def _check_records(rows: Rows, held: Sequence[tuple[Conversation, Version]]) -> None:
    users = defaultdict(list)
    for conversation, version in held:
        if version.sound:
            for point in version.points:
                users[point.record].append((conversation, version, point.tokens))
    for record, found in users.items():
        if len({(conversation.namespace, tokens) for conversation, _, tokens in found}) > 1:
            for _, version, _ in found:
                version.sound = False
            names = ", ".join(f"{rows.name_of(version)} at {tokens}" for _, version, tokens in found[:4])
            rows.found(
                "error",
                "record-twice",
                f"record {record} is the checkpoint of {names} tokens",
                "drop them with --fix: nothing tells whose states it holds",
                Repair(condemned=tuple(dict.fromkeys(version.id for _, version, _ in found))),
            )


def check_residents(rows: Rows, hot_lengths: dict[str, int] | None) -> None:
    """What the catalog lists in the hot tier: of held numbers, at allocated ones, and not of synced versions if dirty.

    `hot_lengths` are the numbers of a segment by kind, where the hot tier's sizes are known.
    """
    held: dict[tuple[str, int], list[Version]] = defaultdict(list)
    resident = {(row.kind, row.number): row for row in rows.residents}
    for _, version in rows.held() if resident else ():
        for key in _keys(version, resident):
            held[key].append(version)
    unheld = [key for key in resident if key not in held]
    if unheld:
        rows.found(
            "note",
            "resident-unheld",
            f"{len(unheld)} residents of the hot tier are of numbers that no version holds, such as "
            f"{unheld[0][0]} {unheld[0][1]}",
            "nothing: they are passed over, and replaced when the number is used again",
            Repair(
                f"delete {len(unheld)} residents that no version holds",
                tuple(("DELETE FROM residents WHERE kind = ? AND number = ?", key) for key in unheld),
            ),
        )
    synced = {v.id: v for key, versions in held.items() if resident[key].dirty for v in versions if v.synced}
    for version in synced.values():
        rows.found(
            "error",
            "synced-dirty",
            f"{rows.name_of(version)} is noted as synced, and the path lacks some of its bytes",
            "let --fix clear the note: they are written again",
            Repair(
                f"note {rows.name_of(version)} as not synced",
                (("UPDATE versions SET synced = 0 WHERE id = ?", (version.id,)),),
            ),
        )
    _check_hot_numbers(rows, held, hot_lengths)


def _keys(version: Version, resident: Container[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    yield from (("blocks", n) for n in block_numbers(version.extents).tolist() if ("blocks", n) in resident)
    yield from (("checkpoints", p.record) for p in version.points if ("checkpoints", p.record) in resident)


def _check_hot_numbers(
    rows: Rows, held: dict[tuple[str, int], list[Version]], hot_lengths: dict[str, int] | None
) -> None:
    allocated = {
        kind: Numbers(rows.segments.get((1, kind), ()), length) for kind, length in (hot_lengths or {}).items()
    }
    at_hot = defaultdict(list)
    for row in rows.residents:
        if (row.kind, row.number) not in held:
            continue
        at_hot[row.kind, row.hot].append(row)
        if row.kind in allocated and not allocated[row.kind].holds(Extent(row.hot, 1)):
            _blame(rows, "resident-outside", [row.kind], [row.number], row.hot, "is in no allocated segment", held)
    for (kind, hot), found in at_hot.items():
        # Rows that were appended belong to a newer version only, whose block has a number of its own at the path.
        owners = [{version.conversation for version in held[kind, row.number]} for row in found]
        if len(found) > 1 and not set.intersection(*owners):
            _blame(
                rows,
                "hot-twice",
                [kind] * len(found),
                [row.number for row in found],
                hot,
                "stands for all of them",
                held,
            )


def _blame(
    rows: Rows,
    code: str,
    kinds: list[str],
    numbers: list[int],
    hot: int,
    why: str,
    held: dict[tuple[str, int], list[Version]],
) -> None:
    """Residents whose hot number cannot hold them: those that the path has lose nothing by going."""
    dirty = {(row.kind, row.number) for row in rows.residents if row.dirty}
    keys = list(zip(kinds, numbers, strict=True))
    lost = {version.id for key in keys if key in dirty for version in held[key]}
    for version in lost:
        rows.versions[version].sound = False
    shown = ", ".join(map(str, numbers[:4]))
    rows.found(
        "error",
        code,
        f"{kinds[0]} {shown} of the path lie in the hot tier at number {hot}, which {why}",
        "let --fix forget it there, and drop what the path does not have",
        Repair(
            f"forget that {kinds[0]} {shown} lie in the hot tier",
            tuple(("DELETE FROM residents WHERE kind = ? AND number = ?", key) for key in keys),
            tuple(sorted(lost)),
        ),
    )
