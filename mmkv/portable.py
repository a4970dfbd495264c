"""A conversation as tensors: their names, types and shapes in a file, and what its metadata say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkv.layout import Layout, dtype_bytes
from mmkv.sizes import round_up
from mmkv.tensorfile import Tensor, safetensors_dtype

__all__ = ["IDS", "About", "Part", "parts_of"]

IDS = "token_ids"
_FORMAT = 1
_MAX_TOKENS = 1 << 48
_MAX_CHECKPOINTS = 4096
_MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor, and which array of the conversation it is.

    Attributes
    ----------
    tensor : Tensor
        How it lies in the file.
    layer : int
        The layer; -1 for the ids.
    name : str
        The plane or the state.
    checkpoint : int or None
        Of a state, the place of its checkpoint among them.
    """

    tensor: Tensor
    layer: int
    name: str
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What the metadata of a file say of its conversation.

    Attributes
    ----------
    conversation, namespace : str
        Its id and its namespace.
    tokens : int
        Its tokens.
    checkpoints : tuple of (int, bool)
        The token count of each checkpoint, and whether it is the end of a prompt.
    fingerprint : str
        The layout's.
    """

    conversation: str
    namespace: str
    tokens: int
    checkpoints: tuple[tuple[int, bool], ...]
    fingerprint: str

    def metadata(self, layout: Layout) -> dict[str, str]:
        """The same as texts, with the whole layout for who has none."""
        return {
            "format": "mmkv",
            "mmkv_format": str(_FORMAT),
            "conversation": self.conversation,
            "namespace": self.namespace,
            "tokens": str(self.tokens),
            "checkpoints": json.dumps(self.checkpoints),
            "fingerprint": self.fingerprint,
            "layout": json.dumps(layout.to_json()),
        }

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> About:
        """What some metadata say.

        Raises
        ------
        ValueError
            They are not those of a conversation, or of a newer format.
        """
        if metadata.get("format") != "mmkv":
            raise ValueError("it holds no conversation: its metadata do not have the format 'mmkv'")
        version = _number(metadata, "mmkv_format", _MAX_TOKENS)
        if version > _FORMAT:
            raise ValueError(f"it is of format {version}, newer than {_FORMAT}")
        name, namespace = metadata.get("conversation", ""), metadata.get("namespace", "")
        if not 1 <= len(name) <= _MAX_TEXT or len(namespace) > _MAX_TEXT:
            raise ValueError("its conversation's id has not 1 to 512 characters, or its namespace more")
        tokens = _number(metadata, "tokens", _MAX_TOKENS)
        points = _checkpoints(metadata.get("checkpoints", ""), tokens)
        return cls(name, namespace, tokens, points, metadata.get("fingerprint", ""))


def _number(metadata: Mapping[str, str], key: str, most: int) -> int:
    text = metadata.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
        raise ValueError(f"its {key} are {text[:40]!r}")
    return int(text)


def _checkpoints(text: str, tokens: int) -> tuple[tuple[int, bool], ...]:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or len(value) > _MAX_CHECKPOINTS:
        raise ValueError(f"its checkpoints are {text[:40]!r}")
    last = 0
    for point in value:
        match point:
            case [int(at), bool()] if type(at) is int and last < at <= tokens:
                last = at
            case _:
                raise ValueError(f"one of its checkpoints is {str(point)[:40]}")
    return tuple((at, boundary) for at, boundary in value)


def parts_of(layout: Layout, tokens: int, checkpoints: Sequence[int]) -> list[Part]:
    """The tensors of a conversation, in the order of the file: the largest elements first, so that all are aligned."""
    # Of an opaque page that is not full, only the engine knows which bytes are used.
    rows = round_up(tokens, layout.granule)
    parts = [(8, Part(Tensor(IDS, "I64", (tokens,)), -1, IDS))]
    for index, layer in enumerate(layout.layers):
        for name, plane in layer.planes.items():
            size = dtype_bytes(plane.dtype)
            dtype, shape = safetensors_dtype(plane.dtype, (rows, *plane.shape), size)
            parts.append((size, Part(Tensor(f"planes.{index}.{name}", dtype, shape), index, name)))
    for place, at in enumerate(checkpoints):
        for index, layer in enumerate(layout.layers):
            for name, state in layer.state.items():
                size = dtype_bytes(state.dtype)
                dtype, shape = safetensors_dtype(state.dtype, state.shape, size)
                parts.append((size, Part(Tensor(f"states.{at}.{index}.{name}", dtype, shape), index, name, place)))
    parts.sort(key=lambda pair: -pair[0])
    return [part for _, part in parts]
