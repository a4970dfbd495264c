"""How a pool's space is used, from its catalog, and whether the files are as long as it says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmkv.geometry import Extent, extent_blocks
from mmkv.info import union_extents
from mmkv_inspect.reading import PoolView

__all__ = ["SpaceUse", "file_problems", "space_use", "tier_problems"]


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """Space of a pool in bytes, as its catalog tells it.

    Attributes
    ----------
    allocated : int
        Bytes of all segments that the files have.
    used : int
        Bytes of the blocks and checkpoints that some conversation holds, shared ones once.
    free : int or None
        Bytes of the blocks that are free and of those that the capacity lets the files grow by; `None` where the
        capacity is not known.
    free_runs, largest_free_run : int
        Runs of consecutive free blocks in the segments, and the bytes of the longest.
    fragmentation : float
        1 - largest free run / free blocks; 0 where one run holds all.
    """

    allocated: int
    used: int
    free: int | None
    free_runs: int
    largest_free_run: int
    fragmentation: float


def space_use(view: PoolView) -> SpaceUse:
    """The use of a pool's space. Costs one pass over the extents."""
    geometry = view.description.geometry
    versions = view.versions()
    held = union_extents(extent for version in versions for extent in version.extents)
    records = {point.record for version in versions for point in version.checkpoints}
    segments = union_extents(Extent(s * geometry.segment_blocks, geometry.segment_blocks) for s in view.block_segments)
    free_runs = [extent.blocks for extent in _gaps(segments, held)]
    largest, free_blocks = max(free_runs, default=0), sum(free_runs)
    allocated = len(view.block_segments) * geometry.segment_bytes
    allocated += len(view.checkpoint_segments) * geometry.state_segment_bytes
    free: int | None = None
    if view.capacity is not None:
        growth = max(0, view.capacity - allocated) // geometry.segment_bytes
        free = (free_blocks + growth * geometry.segment_blocks) * geometry.block_bytes
    return SpaceUse(
        allocated=allocated,
        used=extent_blocks(held) * geometry.block_bytes + len(records) * geometry.checkpoint_bytes,
        free=free,
        free_runs=len(free_runs),
        largest_free_run=largest * geometry.block_bytes,
        fragmentation=1 - largest / free_blocks if free_blocks else 0.0,
    )


def _gaps(spans: list[Extent], held: list[Extent]) -> Iterator[Extent]:
    """What `held`, sorted and all of it inside, leaves of `spans`."""
    at = 0
    for first, count in spans:
        start, end = first, first + count
        while at < len(held) and held[at].first < end:
            if held[at].first > start:
                yield Extent(start, held[at].first - start)
            start = held[at].first + held[at].blocks
            at += 1
        if start < end:
            yield Extent(start, end - start)


def tier_problems(view: PoolView) -> list[str]:
    """What the owner says of tiers that it cannot use or write to, as far as it is alive to say so."""
    tiers = view.stats.tiers if view.stats is not None and view.owner.alive else ()
    return [f"the tier {tier.name!r}: {tier.trouble}" for tier in tiers if tier.trouble]


def file_problems(view: PoolView) -> list[str]:
    """What is wrong with the pool's files, one sentence each: those missing, cut, or not plain. Opens none of them."""
    geometry = view.description.geometry
    blocks_end = max(view.block_segments, default=-1) + 1
    records_end = max(view.checkpoint_segments, default=-1) + 1
    expected = [("tokens.kv", blocks_end * geometry.tokens_segment_bytes)]
    sizes = zip(geometry.layer_segment_bytes, geometry.layer_state_segment_bytes, strict=True)
    for layer, (plane_bytes, state_bytes) in enumerate(sizes):
        if plane_bytes:
            expected.append((f"layers/{layer:04d}.kv", blocks_end * plane_bytes))
        if state_bytes:
            expected.append((f"layers/{layer:04d}.state", records_end * state_bytes))
    problems = (_file_problem(view.path / name, size) for name, size in expected)
    return [problem for problem in problems if problem is not None]


def _file_problem(file: Path, size: int) -> str | None:
    try:
        status = os.lstat(file)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is not a plain file"
    if status.st_size < size:
        return f"{file} is truncated: it has {status.st_size} bytes and must have {size}"
    return None
