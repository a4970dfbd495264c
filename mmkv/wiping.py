"""Zeros over what was dropped, before its place is used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmkv.buffer import allocate_host
from mmkv.geometry import ID_BYTES, Extent

if TYPE_CHECKING:
    from mmkv.space import Kind, Space
    from mmkv.store.files import PoolFile

__all__ = ["zero_run"]

_CHUNK = 1 << 20


def zero_run(space: Space, kind: Kind, run: Extent) -> None:
    """Overwrite blocks or records, which nobody holds, with zeros in all files of a tier.

    Writes them, and gives back no space: what a file system gives back, the medium still has.

    Raises
    ------
    MmkvError
        The medium refused.
    """
    zeros = allocate_host((_CHUNK,), "uint8").data
    for file, offset, size in _places(space, kind, run):
        for start in range(0, size, _CHUNK):
            file.write(zeros[: min(_CHUNK, size - start)], offset + start)


def _places(space: Space, kind: Kind, run: Extent) -> Iterator[tuple[PoolFile, int, int]]:
    geometry = space.geometry
    if kind == "checkpoints":
        for file, size in zip(space.states, geometry.layer_record_bytes, strict=True):
            if file is not None:
                yield file, run.first * size, run.blocks * size
        return
    runs = geometry.token_runs([run], 0, run.blocks * geometry.block_tokens)
    if space.has_ids:
        for offset, tokens in zip(geometry.id_offsets(runs).tolist(), runs.tokens.tolist(), strict=True):
            yield space.tokens, offset, tokens * ID_BYTES
    for layer, file in enumerate(space.planes):
        if file is None:
            continue
        for name, (_, token_bytes) in geometry.plane_regions[layer].items():
            offsets = geometry.plane_offsets(runs, layer, name)
            for offset, tokens in zip(offsets.tolist(), runs.tokens.tolist(), strict=True):
                yield file, offset, tokens * token_bytes
