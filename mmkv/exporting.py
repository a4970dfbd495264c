"""Writing a conversation to a file of its own, beside the pool's owner or without one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.catalog import Catalog
from mmkv.check_files import expected_files
from mmkv.check_rows import Conversation, Rows, Version, read_rows
from mmkv.check_space import Numbers, check_versions
from mmkv.directory import Description, catalog_file, prepare, read_description
from mmkv.errors import ConversationCorrupt, ConversationNotFound, MmkvError, PoolCorrupt, PoolFull
from mmkv.geometry import ID_BYTES, Extent, Geometry
from mmkv.known import KnownUnits
from mmkv.portable import About, Part, parts_of
from mmkv.sizes import round_up
from mmkv.store.files import PoolFile
from mmkv.tensorfile import header_of
from mmkv.warming import is_of, read_claim, stored_hot

__all__ = ["export_conversation"]

_ATTEMPTS = 5
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Tier:
    """The files of one tier, opened where they are read."""

    path: Path
    geometry: Geometry
    files: dict[str, PoolFile]

    def file(self, name: str) -> PoolFile:
        if name not in self.files:
            size = expected_files(self.geometry)[name][1]
            self.files[name] = PoolFile(self.path / name, size, readonly=True)
        return self.files[name]

    def close(self) -> None:
        for file in self.files.values():
            file.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A version, and where its bytes are: at the path, save for what the path does not have yet."""

    conversation: Conversation
    version: Version
    dirty: dict[tuple[str, int], int]
    known: KnownUnits


def export_conversation(
    path: Path,
    conversation: str,
    file: Path,
    *,
    elsewhere: Path | None = None,
    namespace: str | None = None,
    replace: bool = False,
) -> int:
    """Write the newest version of a conversation to a safetensors file. Returns the file's size.

    The bytes are read without a lease, and are those of the version only if it is still there afterwards: else all is
    read again, a few times. The file has its name only when it is whole and on the medium.

    Parameters
    ----------
    path : Path
        The pool's directory.
    conversation : str
        The conversation.
    file : Path
        The file.
    elsewhere : Path, optional
        Where the pool's catalog lies, if not there.
    namespace : str, optional
        The namespace that it must be in.
    replace : bool
        Whether the file may exist.

    Raises
    ------
    ConversationNotFound
        There is none of that id.
    ConversationCorrupt
        Its bytes are not those that were parked.
    MmkvError, ValueError
        It cannot be read or written, or is parked again and again meanwhile.
    """
    if not replace and os.path.lexists(file):
        raise ValueError(f"{file} exists: choose another name, or replace it with --force")
    prepare(path, create=False)
    description = read_description(path)
    catalog = Catalog(catalog_file(path, description, elsewhere), readonly=True)
    try:
        catalog.require_of(path, description.uuid)
        for _ in range(_ATTEMPTS):
            source = _find(catalog, description, conversation, namespace)
            with _partial(file) as out:
                corrupt = _write(path, description, catalog, source, out)
                if _is_same(catalog, source):
                    if corrupt is not None:
                        raise corrupt
                    return _finish(out, file)
    finally:
        catalog.close()
    raise MmkvError(f"{conversation!r} was parked anew whenever it had been read: export it when its engine rests")


def _find(catalog: Catalog, description: Description, name: str, namespace: str | None) -> _Source:
    rows = read_rows(catalog)
    found = next((one for one in rows.conversations.values() if one.name == name), None)
    if found is None:
        raise ConversationNotFound(f"{catalog.path.parent} holds no conversation {name!r}")
    if namespace is not None and found.namespace != namespace:
        raise ConversationNotFound(f"{name!r} is in the namespace {found.namespace!r}, not in {namespace!r}")
    check_versions(rows, description.geometry)
    version = rows.versions.get(found.version)
    if version is None or not version.sound:
        raise ConversationCorrupt(f"{name!r} has blocks that cannot be its own: see mmkv-inspect check")
    known = KnownUnits(catalog, description, version.extents, [point.record for point in version.points])
    if known.is_bad:
        raise ConversationCorrupt(
            f"{name!r} has bytes in quarantine, which are not those that were parked: read its prompt again"
        )
    return _Source(found, version, _dirty(rows, version), known)


def _dirty(rows: Rows, version: Version) -> dict[tuple[str, int], int]:
    mine = {("blocks", number) for number in block_numbers(version.extents).tolist()}
    mine |= {("checkpoints", point.record) for point in version.points}
    return {(row.kind, row.number): row.hot for row in rows.residents if row.dirty and (row.kind, row.number) in mine}


def _is_same(catalog: Catalog, source: _Source) -> bool:
    """Whether the version was there all the time, and what was read from the hot tier did not leave it."""
    # Numbers of versions are never used again, and the path keeps what it has while a version lists it. In the hot
    # tier a place may have changed hands, but not while what lies there is nowhere else.
    rows = read_rows(catalog)
    version = rows.versions.get(source.version.id)
    return version is not None and source.dirty.items() <= _dirty(rows, version).items()


@contextlib.contextmanager
def _partial(file: Path) -> Iterator[BinaryIO]:
    """A file beside the one that is to be, removed unless it is renamed."""
    partial = _partial_name(file)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise MmkvError(f"cannot write {partial}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb", buffering=0) as out:
            yield out
    except OSError as error:
        kind = PoolFull if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else MmkvError
        raise kind(f"cannot write {file}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _finish(out: BinaryIO, file: Path) -> int:
    os.fsync(out.fileno())
    size = os.fstat(out.fileno()).st_size
    _partial_name(file).rename(file)
    return size


def _partial_name(file: Path) -> Path:
    return file.with_name(f".{file.name[:100]}.{os.getpid()}.partial")


def _write(
    path: Path, description: Description, catalog: Catalog, source: _Source, out: BinaryIO
) -> ConversationCorrupt | None:
    """Write everything. Gives what was found not to be what was parked."""
    layout, version = description.layout, source.version
    points = tuple((point.tokens, point.boundary) for point in version.points)
    about = About(source.conversation.name, source.conversation.namespace, version.tokens, points, layout.fingerprint)
    parts = parts_of(layout, version.tokens, [tokens for tokens, _ in points])
    _put(out, header_of([part.tensor for part in parts], about.metadata(layout)))
    tiers = [_Tier(path, description.geometry, {})]
    try:
        if source.dirty:
            tiers.append(_hot_tier(path, description, catalog, source))
        buffer = memoryview(bytearray(_CHUNK))
        corrupt = None
        for part in parts:
            sums, behind = source.known.stream(part.layer, part.name, part.checkpoint, version.tokens)
            runs = list(_runs(tiers, source, part))
            for file, offset, size in runs:
                for at in range(0, size, _CHUNK):
                    view = buffer[: min(_CHUNK, size - at)]
                    file.read(view, offset + at)
                    sums.add(view)
                    _put(out, view)
            # Of a block that this version has only some rows of, the checksum covers more.
            file, offset, size = runs[-1]
            for at in range(0, behind, _CHUNK):
                view = buffer[: min(_CHUNK, behind - at)]
                file.read(view, offset + size + at)
                sums.add(view)
            corrupt = corrupt or source.known.compare(
                repr(source.conversation.name), part.layer, part.name, part.checkpoint, sums.values()
            )
        return corrupt
    finally:
        for tier in tiers:
            tier.close()


def _put(out: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]


def _hot_tier(path: Path, description: Description, catalog: Catalog, source: _Source) -> _Tier:
    stored = stored_hot(catalog)
    claim = None if stored is None else read_claim(stored[0])
    if stored is None or claim is None or not is_of(claim, path, description) or (stored[0] / "layers").is_symlink():
        raise ConversationCorrupt(
            f"{source.conversation.name!r} has bytes in a hot tier that is gone: see mmkv-inspect check"
        )
    geometry = Geometry.from_json(description.layout, claim.sizes)
    lengths = {"blocks": geometry.segment_blocks, "checkpoints": geometry.segment_checkpoints}
    allocated = {kind: Numbers(catalog.segments(kind, 1), lengths[kind]) for kind in lengths}
    if not all(allocated[kind].holds(Extent(hot, 1)) for (kind, _), hot in source.dirty.items()):
        raise PoolCorrupt(f"the catalog {catalog.path} is damaged: it lists what the hot tier does not have")
    return _Tier(stored[0], geometry, {})


def _runs(tiers: list[_Tier], source: _Source, part: Part) -> Iterator[tuple[PoolFile, int, int]]:
    """The file, offset and size of each run of a tensor, in order."""
    version, geometry = source.version, tiers[0].geometry
    if part.checkpoint is not None:
        record = version.points[part.checkpoint].record
        hot = source.dirty.get(("checkpoints", record))
        tier, number = (tiers[0], record) if hot is None else (tiers[1], hot)
        file = tier.file(f"layers/{part.layer:04d}.state")
        yield file, tier.geometry.state_offset(part.layer, part.name, number), part.tensor.bytes
        return
    if part.layer < 0:
        runs = geometry.token_runs(version.extents, 0, version.tokens)
        for offset, tokens in zip(geometry.id_offsets(runs).tolist(), runs.tokens.tolist(), strict=True):
            yield tiers[0].file("tokens.kv"), offset, tokens * ID_BYTES
        return
    rows = round_up(version.tokens, geometry.layout.granule)
    token_bytes = geometry.plane_regions[part.layer][part.name][1]
    numbers = block_numbers(version.extents)
    places = np.array([source.dirty.get(("blocks", number), -1) for number in numbers.tolist()], dtype=np.int64)
    pieces: list[tuple[int, PoolFile, int, int]] = []
    for tier, here, own in ((tiers[0], places < 0, numbers), (tiers[-1], places >= 0, places)):
        if not here.any():
            continue
        positions: npt.NDArray[np.int64] = np.flatnonzero(here)
        found = tier.geometry.block_runs(positions, own[positions], 0, rows)
        file = tier.file(f"layers/{part.layer:04d}.kv")
        offsets = tier.geometry.plane_offsets(found, part.layer, part.name).tolist()
        sizes = (found.tokens * token_bytes).tolist()
        pieces += zip(found.token.tolist(), [file] * len(sizes), offsets, sizes, strict=True)
    for _, file, offset, size in sorted(pieces, key=lambda piece: piece[0]):
        yield file, offset, size
