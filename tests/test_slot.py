"""Slots: arrays as the layout wants them, referenced and not copied, or an error that names the layer and the plane."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv.slot import Slot
from tests.computed import HYBRID, UNIFORM, make_slot

LAYOUT = mmkv.Layout(
    [
        mmkv.Layer({"k": mmkv.Plane("float16", (2, 4)), "v": mmkv.Plane("bfloat16", (8,))}),
        mmkv.Layer({}, {"s": mmkv.State("float32", (3, 5))}),
    ],
    model="m",
)


def arrays(xp: Any = np, tokens: int = 10) -> list[dict[str, Any]]:
    return [{"k": xp.zeros((tokens, 2, 4), dtype="float16"), "v": xp.zeros((tokens, 8), dtype="uint16")}, {}]


def state(xp: Any = np) -> list[dict[str, Any]]:
    return [{}, {"s": xp.zeros((3, 5), dtype="float32")}]


def test_a_slot_refers_to_its_arrays(xp: ModuleType) -> None:
    given = arrays(xp)
    slot = Slot(LAYOUT, given, state(xp))
    assert slot.max_tokens == 10
    pointer = given[0]["k"].ctypes.data if xp is np else given[0]["k"].data.ptr
    assert slot.memory.planes[0]["k"].address == pointer
    assert slot.memory.planes[0]["k"].bytes == given[0]["k"].nbytes


def test_torch_tensors_are_referred_to_as_well() -> None:
    torch = pytest.importorskip("torch")
    k, v = torch.zeros((10, 2, 4), dtype=torch.float16), torch.zeros((10, 8), dtype=torch.bfloat16)
    slot = Slot(LAYOUT, [{"k": k, "v": v}, {}], [{}, {"s": torch.zeros((3, 5))}])
    assert slot.memory.planes[0]["v"].address == v.data_ptr()
    with pytest.raises(ValueError, match=r"layer 0, plane 'k'.*not C-contiguous"):
        Slot(LAYOUT, [{"k": torch.zeros((4, 2, 10), dtype=torch.float16).transpose(0, 1), "v": v}, {}], state())


class _SpeaksDlpack:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class _SpeaksArrayInterface:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


@pytest.mark.parametrize("wrap", [_SpeaksDlpack, _SpeaksArrayInterface])
def test_whatever_shows_its_memory_will_do(wrap: Any) -> None:
    given = arrays()
    slot = Slot(LAYOUT, [{name: wrap(array) for name, array in given[0].items()}, {}], state())
    assert slot.memory.planes[0]["k"].address == given[0]["k"].ctypes.data


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda p, s: p[0].pop("v"), ValueError, "layer 0, plane 'v': its array is missing"),
        (lambda p, s: p[0].update(w=p[0]["v"]), ValueError, "layer 0 has no plane 'w'"),
        (lambda p, s: p[1].update(k=p[0]["k"]), ValueError, "layer 1 has no plane 'k'"),
        (lambda p, s: p[0].update(k=p[0]["k"][:, :1]), ValueError, "layer 0, plane 'k'.*not C-contiguous"),
        (lambda p, s: p[0].update(k=p[0]["k"][::2]), ValueError, "layer 0, plane 'k'.*not C-contiguous"),
        (lambda p, s: p[0].update(k=np.zeros((10, 4, 2), "f2")), ValueError, r"\(10, 4, 2\), not \(max_tokens, 2, 4\)"),
        (lambda p, s: p[0].update(k=np.zeros((), "f2")), ValueError, r"layer 0, plane 'k'.*\(\), not"),
        (lambda p, s: p[0].update(k=np.zeros((10, 2, 4), "f4")), ValueError, "of float32, not of float16"),
        (lambda p, s: p[0].update(k=np.zeros((10, 2, 4), "u2")), ValueError, "of uint16, not of float16"),
        (lambda p, s: p[0].update(v=np.zeros((10, 8), "i2")), ValueError, "of int16, not of bfloat16"),
        (lambda p, s: p[0].update(v=np.zeros((9, 8), "u2")), ValueError, "'v' holds 9 tokens, but layer 0, plane 'k'"),
        (lambda p, s: p[0].update(v=[[0] * 8] * 10), TypeError, "layer 0, plane 'v': 'list' is no array"),
        (lambda p, s: s[1].update(s=np.zeros((15,), "f4")), ValueError, r"layer 1, state 's'.*not \(3, 5\)"),
        (lambda p, s: s[1].clear(), ValueError, "layer 1, state 's': its array is missing"),
        (lambda p, s: p.pop(), ValueError, "arrays has 1 layers, the layout 2"),
        (lambda p, s: p.__setitem__(0, 3), TypeError, "layer 0: its planes must be a mapping"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(change: Any, error: type[Exception], text: str) -> None:
    planes, states = arrays(), state()
    change(planes, states)
    with pytest.raises(error, match=text):
        Slot(LAYOUT, planes, states)


def test_states_are_needed_where_the_layout_has_them() -> None:
    with pytest.raises(ValueError, match="states: give their arrays as state="):
        Slot(LAYOUT, arrays())


def test_a_layout_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="layout must be a Layout"):
        Slot("layout", [])  # type: ignore[arg-type]


def test_bytes_stand_for_types_that_numpy_lacks_and_for_no_other() -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("float8_e4m3fn", (4,))})], "m")
    for dtype in ("uint8", "V1"):
        assert Slot(layout, [{"k": np.zeros((3, 4), dtype)}]).max_tokens == 3
    with pytest.raises(ValueError, match="of int8, not of float8_e4m3fn"):
        Slot(layout, [{"k": np.zeros((3, 4), "int8")}])


def test_types_that_another_library_taught_numpy_are_taken_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = arrays()
    given[0]["v"] = given[0]["v"].view(ml_dtypes.bfloat16)
    assert Slot(LAYOUT, given, state()).memory.planes[0]["v"].dtype == "bfloat16"
    assert Slot(LAYOUT, arrays(), state()).memory.planes[0]["v"].dtype == "uint16"


def test_a_read_only_array_is_refused_for_writing_alone() -> None:
    given = arrays()
    given[0]["k"].flags.writeable = False
    slot = Slot(LAYOUT, given, state())
    with pytest.raises(ValueError, match="layer 0, plane 'k': the array is read-only"):
        slot.memory.require_writable()


def test_an_allocated_slot_is_zeroed_and_starts_at_pages(xp: ModuleType) -> None:
    slot = make_slot(HYBRID, 7, xp)
    assert slot.max_tokens == 7
    assert slot.arrays[0]["k"].shape == (7, 4)
    assert slot.state[3]["window"].shape == (5, 7)
    assert slot.state[3]["window"].dtype == np.uint16, "bytes, where NumPy lacks the type"
    assert not slot.arrays[0]["k"].any()
    if xp is np:
        assert all(buffer.address % 4096 == 0 for layer in slot.memory.planes for buffer in layer.values())


@pytest.mark.parametrize(
    ("tokens", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)]
)
def test_a_slot_of_no_tokens_is_refused(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_tokens must be"):
        Slot.allocate(UNIFORM, tokens)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", -1, True, None])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="is unknown: use 'cpu', 'cuda'"):
        Slot.allocate(UNIFORM, 4, device)
