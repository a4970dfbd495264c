"""Layouts: their sizes, their names for types, and the fingerprint that guards every pool."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from mmkv import Layer, Layout, Plane, State
from mmkv.layout import difference

K = Plane("int8", (4, 128))
REPORTED = Layer({"k": K, "v": Plane("uint8", (4, 64)), "scale": Plane("float16", (24,))})


def test_the_layout_of_the_report_has_816_bytes_a_token_and_layer() -> None:
    layout = Layout([REPORTED] * 48, model="m")
    assert REPORTED.token_bytes == 816
    assert layout.token_bytes == 48 * 816
    assert layout.state_bytes == 0


def test_states_do_not_count_as_token_bytes() -> None:
    layout = Layout([Layer({"k": K}), Layer({}, {"s": State("float32", (16, 16)), "cursor": State("int64", ())})], "m")
    assert layout.token_bytes == 512
    assert layout.state_bytes == 16 * 16 * 4 + 8


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("float64", 8), ("bool", 1), ("complex64", 8)],
)
def test_a_dtype_counts_its_bytes(dtype: str, size: int) -> None:
    assert Plane(dtype, (3,)).token_bytes == 3 * size


def test_a_numpy_dtype_is_kept_by_its_name() -> None:
    assert Plane(np.float16, (2,)) == Plane("<f2", (2,)) == Plane("float16", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int4", "float7", "", "O", "U8", "datetime64[ns]", "f2,f2"])
def test_an_unknown_dtype_is_refused_by_its_name(dtype: str) -> None:
    with pytest.raises(ValueError, match="is unknown: use a NumPy name") as caught:
        Plane(dtype, (1,))
    assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "error"),
    [((0,), ValueError), ((4, -1), ValueError), ((1.5,), TypeError), ((True,), TypeError), ("12", TypeError)],
)
def test_a_shape_of_anything_but_positive_integers_is_refused(shape: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="shape"):
        Plane("int8", shape)


def test_names_are_unique_within_a_layer() -> None:
    with pytest.raises(ValueError, match=r"\['k'\] name both a plane and a state"):
        Layer({"k": K}, {"k": State("int8", (1,))})


@pytest.mark.parametrize("name", ["", "n" * 257, 3])
def test_a_plane_needs_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match="names are strings"):
        Layer({name: K})


def test_a_plane_is_no_state() -> None:
    with pytest.raises(TypeError, match="must be a State"):
        Layer({}, {"k": K})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("layers", "model", "error"),
    [
        ([], "m", ValueError),
        ([Layer()], "m", ValueError),
        ([K], "m", TypeError),
        ([Layer({"k": K})], None, TypeError),
        ([Layer({"k": K})] * 10_001, "m", ValueError),
    ],
)
def test_a_layout_without_sense_is_refused(layers: Any, model: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Layout(layers, model)


BASE = Layout([REPORTED, Layer({"k": K}, {"s": State("float32", (2,))})], "m")


@pytest.mark.parametrize(
    "other",
    [
        Layout(BASE.layers, "n"),
        Layout(BASE.layers[::-1], "m"),
        Layout(BASE.layers[:1], "m"),
        Layout([REPORTED, Layer({"k": K}, {"s": State("int32", (2,))})], "m"),
        Layout([REPORTED, Layer({"k": K}, {"s": State("float32", (1, 2))})], "m"),
        Layout([REPORTED, Layer({"k": K}, {"t": State("float32", (2,))})], "m"),
        Layout([Layer(dict(reversed(REPORTED.planes.items()))), BASE.layers[1]], "m"),
    ],
    ids=["model", "order", "count", "dtype", "shape", "name", "order of planes"],
)
def test_every_difference_changes_the_fingerprint(other: Layout) -> None:
    assert other.fingerprint != BASE.fingerprint


def test_the_fingerprint_is_the_same_on_every_machine() -> None:
    layout = Layout([Layer({"k": Plane("float16", (8,))})], "Müller 7B")
    assert layout.fingerprint == "44872347651cece979927173eaf6abb838d0b3ec94ecdcebd7720896d07ef99e"


def test_a_layout_survives_json_and_pickle() -> None:
    assert Layout.from_json(BASE.to_json()) == BASE
    assert pickle.loads(pickle.dumps(BASE)) == BASE
    assert hash(pickle.loads(pickle.dumps(BASE))) == hash(BASE)


@pytest.mark.parametrize("value", [None, [], {}, {"model": "m", "layers": [{}]}, {"model": "m", "layers": 3}])
def test_json_that_is_no_layout_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout.from_json(value)


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.model = "n"  # type: ignore[misc]
    with pytest.raises(TypeError):
        BASE.layers[0].planes["k"] = K  # type: ignore[index]


def test_the_opaque_pages_are_a_difference() -> None:
    layer = [Layer({"k": Plane("int8", (4,))})]
    assert difference(Layout(layer, "m", 64), Layout(layer, "m")) == "its opaque_page_tokens is 64, not None"
