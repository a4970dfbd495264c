"""What `--json` prints: plain values, sizes in bytes, times in seconds since the epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmkv.directory import FORMAT
from mmkv.info import ConversationInfo
from mmkv.rows import ConversationRow, VersionRow
from mmkv_inspect.reading import PoolView
from mmkv_inspect.usage import SpaceUse

__all__ = ["conversation_record", "list_record", "print_json", "stats_record"]


def print_json(value: Any) -> None:
    """Print one JSON document, in ASCII: what is no printable character of ASCII is escaped."""
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def list_record(infos: Sequence[ConversationInfo]) -> list[dict[str, Any]]:
    """The conversations, with the names of `mmkv.ConversationInfo`."""
    return [_info_record(info) for info in infos]


def _info_record(info: ConversationInfo) -> dict[str, Any]:
    # asdict would copy the tuple of checkpoints element by element.
    return {name: getattr(info, name) for name in ConversationInfo.__slots__}


def conversation_record(row: ConversationRow, info: ConversationInfo) -> dict[str, Any]:
    """One conversation with its versions, their extents and checkpoints."""
    return {
        **_info_record(info),
        "version": _version_record(row.version),
        "fallback": None if row.fallback is None else _version_record(row.fallback),
    }


def _version_record(version: VersionRow) -> dict[str, Any]:
    return {
        "id": version.id,
        "tokens": version.tokens,
        "created": version.created,
        "boot": version.boot,
        "synced": version.synced,
        "extents": [extent._asdict() for extent in version.extents],
        "checkpoints": [point._asdict() for point in version.checkpoints],
    }


def stats_record(view: PoolView, use: SpaceUse, problems: Sequence[str]) -> dict[str, Any]:
    """The pool in figures."""
    description, geometry = view.description, view.description.geometry
    layout = description.layout
    return {
        "pool": str(view.path),
        "catalog": str(view.catalog),
        "medium": {
            "fs_type": view.medium.fs_type,
            "shared": view.medium.shared,
            "locks_across_hosts": view.medium.locks_across_hosts,
        },
        "uuid": description.uuid,
        "format": FORMAT,
        "model": layout.model,
        "fingerprint": layout.fingerprint,
        "layers": len(layout.layers),
        "token_bytes": layout.token_bytes,
        "state_bytes": layout.state_bytes,
        **geometry.to_json(),
        "block_bytes": geometry.block_bytes,
        "segment_bytes": geometry.segment_bytes,
        "conversations": len(view.rows),
        "pinned": sum(row.pinned for row in view.rows),
        "tokens": sum(row.version.tokens for row in view.rows),
        "capacity": view.capacity,
        **asdict(use),
        "owner": asdict(view.owner),
        "requests": view.requests,
        "engine": None if view.stats is None else asdict(view.stats),
        "corrupt": [bad._asdict() for bad in view.bad],
        "problems": list(problems),
    }
