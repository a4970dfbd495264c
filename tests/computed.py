"""What a model would compute: bytes that are a function of the token ids, so that a test knows every byte of a take.

The row of a token depends on all ids up to it, as a KV cache's does, and on nothing else: conversations that begin
alike have equal rows, and any others do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import mmkv

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

UNIFORM = mmkv.Layout(
    [mmkv.Layer({"k": mmkv.Plane("int8", (4, 2)), "scale": mmkv.Plane("float16", (4,))})] * 3, model="uniform"
)
HYBRID = mmkv.Layout(
    [
        mmkv.Layer({"k": mmkv.Plane("float16", (4,)), "v": mmkv.Plane("float16", (12,))}),
        mmkv.Layer({}, {"state": mmkv.State("float32", (33,)), "cursor": mmkv.State("int64", (1,))}),
        mmkv.Layer(),
        mmkv.Layer({"k": mmkv.Plane("uint8", (8,))}, {"window": mmkv.State("bfloat16", (5, 7))}),
    ],
    model="hybrid",
)
ONLY_STATES = mmkv.Layout([mmkv.Layer({}, {"s": mmkv.State("float32", (100,))})] * 2, model="recurrent")

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def prefix_words(ids: Ids, salt: str = "") -> npt.NDArray[np.uint64]:
    """A word for each token that depends on it and on all before it; uint64, shape (tokens,)."""
    start = np.uint64(int.from_bytes(salt.encode()[:8].ljust(8, b"\0"), "little"))
    powers = np.cumprod(np.full(len(ids), _FACTOR, dtype=np.uint64))
    return _mixed(np.cumsum(_mixed(ids.view(np.uint64) + _FACTOR) * powers) + start)


def _expand(words: npt.NDArray[np.uint64], place: str, size: int) -> Bytes:
    """Bytes of a place in a layer for each word; uint8, shape (words, size)."""
    seed = np.uint64(int.from_bytes(place.encode()[:8].rjust(8, b"\1"), "little"))
    columns = _mixed(np.arange(-(-size // 8), dtype=np.uint64) * _FACTOR + seed)
    expanded: Bytes = _mixed(words[:, None] + columns).view(np.uint8)[:, :size]
    return expanded


def plane_rows(words: npt.NDArray[np.uint64], layer: int, name: str, plane: mmkv.Plane) -> Bytes:
    """The rows of one plane; uint8, shape (tokens, plane.token_bytes)."""
    return _expand(words, f"{layer}p{name}", plane.token_bytes)


def state_bytes(words: npt.NDArray[np.uint64], layer: int, name: str, state: mmkv.State) -> Bytes:
    """A state after the last token; uint8, shape (state.bytes,)."""
    expanded: Bytes = _expand(words[-1:], f"{layer}s{name}", state.bytes)[0]
    return expanded


def ids_of(*parts: tuple[int, int]) -> Ids:
    """Ids from runs `(seed, length)`; two runs of one seed begin alike."""
    return np.concatenate([np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, length) for seed, length in parts])


def rows(slot: mmkv.Slot) -> Iterator[tuple[int, str, mmkv.Plane, Any]]:
    """Every plane of an allocated slot: layer, name, plane and its bytes, shape (max_tokens, token_bytes)."""
    for layer, spec in enumerate(slot.layout.layers):
        for name, plane in spec.planes.items():
            array = slot.arrays[layer][name]
            yield layer, name, plane, array.reshape(len(array), -1).view(np.uint8)


def states(slot: mmkv.Slot) -> Iterator[tuple[int, str, mmkv.State, Any]]:
    """Every state of an allocated slot: layer, name, state and its bytes."""
    for layer, spec in enumerate(slot.layout.layers):
        for name, state in spec.state.items():
            yield layer, name, state, slot.state[layer][name].reshape(-1).view(np.uint8)


def _as(like: Any, array: Bytes) -> Any:
    if isinstance(like, np.ndarray):
        return array
    import cupy

    return cupy.asarray(array)


def _host(array: Any) -> Bytes:
    host: Bytes = array if isinstance(array, np.ndarray) else array.get()
    return host


def make_slot(layout: mmkv.Layout, max_tokens: int, xp: Any = np, fill: int = 0) -> mmkv.Slot:
    """A slot on NumPy's or CuPy's memory, every byte `fill`."""
    slot = mmkv.Slot.allocate(layout, max_tokens, "cpu" if xp is np else "cuda")
    if fill:
        for *_, array in (*rows(slot), *states(slot)):
            array[...] = fill
    return slot


def compute(slot: mmkv.Slot, ids: Ids, salt: str = "") -> mmkv.Slot:
    """Let a slot hold what the model computes for `ids`."""
    words = prefix_words(ids, salt)
    for layer, name, plane, array in rows(slot):
        array[: len(ids)] = _as(array, plane_rows(words, layer, name, plane))
    for layer, name, state, array in states(slot):
        array[...] = _as(array, state_bytes(words, layer, name, state))
    return slot


def computed(layout: mmkv.Layout, ids: Ids, xp: Any = np, salt: str = "") -> mmkv.Slot:
    """A slot that just holds what the model computes for `ids`."""
    return compute(make_slot(layout, max(1, len(ids)), xp), ids, salt)


def assert_holds(slot: mmkv.Slot, ids: Ids, *, have: int = 0, fill: int = 0, salt: str = "") -> None:
    """Every byte of a slot that was `fill` before a take of `ids`: rows from `have` on, states, and none else."""
    words = prefix_words(ids, salt)
    for layer, name, plane, array in rows(slot):
        found = _host(array)
        expected = np.full(found.shape, fill, dtype=np.uint8)
        expected[have : len(ids)] = plane_rows(words, layer, name, plane)[have:]
        differing = np.flatnonzero((found != expected).any(axis=1))
        assert not len(differing), f"layer {layer}, {name!r}: rows {differing[:3]} of {len(differing)} differ"
    for layer, name, state, array in states(slot):
        assert (_host(array) == state_bytes(words, layer, name, state)).all(), f"layer {layer}, {name!r}"


def assert_untouched(slot: mmkv.Slot, fill: int = 0) -> None:
    """Every byte of a slot is `fill`."""
    for layer, name, _, array in (*rows(slot), *states(slot)):
        assert (_host(array) == fill).all(), f"layer {layer}, {name!r}"


def park(pool: mmkv.Pool, name: str, ids: Ids, *, xp: Any = np, salt: str = "", **options: Any) -> mmkv.Receipt:
    """Compute a conversation, park it and wait."""
    return pool.park(name, computed(pool.layout, ids, xp, salt), ids, **options).result(30)


def assert_parked(pool: mmkv.Pool, name: str, ids: Ids, *, xp: Any = np, salt: str = "") -> None:
    """A conversation gives exactly what was computed for `ids`."""
    slot = make_slot(pool.layout, len(ids) + 3, xp, fill=0xAA)
    assert pool.take(name, slot).result(30).tokens == len(ids)
    assert_holds(slot, ids, fill=0xAA, salt=salt)
