"""What mmkv asks of CUDA: streams, events, memory; and that none of it is needed without a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from array import array
from typing import Any

import numpy as np
import pytest

from mmkv import device as cuda
from mmkv.buffer import buffer_of
from mmkv.errors import MmkvError
from mmkv.layout import Layer, Layout, Plane
from mmkv.slot import Slot
from tests.simulated import SimulatedCuda, forget_cuda, install_cuda


def test_importing_mmkv_imports_no_cupy_and_no_kvikio() -> None:
    code = "import sys, mmkv, mmkv.device, mmkv.store; print(sorted({'cupy', 'kvikio', 'torch'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_without_cupy_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not cuda.available()
    assert cuda.device_count() == 0
    with pytest.raises(MmkvError, match="install cupy"):
        cuda.current_ordinal()


def test_without_a_stream_and_without_devices_nothing_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cuda.producer_events((), None) == ()


class TorchStream:
    cuda_stream = 77
    device_index = 1


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 88


@pytest.mark.parametrize(
    ("stream", "handle"),
    [(0, 0), (np.int64(5), 5), (TorchStream(), 77), (ProtocolStream(), 88), (types.SimpleNamespace(ptr=99), 99)],
)
def test_handles_of_streams(stream: Any, handle: int) -> None:
    assert cuda.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["0", True, 1.5, -1, object(), [1]])
def test_what_is_no_stream_is_refused_with_its_value(stream: Any) -> None:
    with pytest.raises(TypeError, match="stream"):
        cuda.stream_handle(stream)


def test_an_event_fires_after_the_work_of_its_stream(simulated_cuda: SimulatedCuda) -> None:
    stream, gate = simulated_cuda.new_gated_stream(1)
    event = cuda.record(1, stream)
    assert not event.done()
    threading.Timer(0.05, gate.set).start()
    event.synchronize()
    assert event.done()
    assert event.device == 1
    assert simulated_cuda._contexts() == []


def test_a_stream_waits_for_an_event(simulated_cuda: SimulatedCuda) -> None:
    producer, gate = simulated_cuda.new_gated_stream(0)
    consumer = cuda.new_stream(0)
    cuda.record(0, producer).wait_on(consumer.ptr)
    after = cuda.record(0, consumer.ptr)
    assert not after.done()
    gate.set()
    after.synchronize()


def test_events_are_used_again_but_not_in_a_forked_child(simulated_cuda: SimulatedCuda) -> None:
    stream = cuda.new_stream(0)
    for _ in range(3):
        cuda.record(0, stream.ptr).synchronize()
    assert len(simulated_cuda._events) == 1
    inherited = cuda.record(0, stream.ptr)
    inherited._pid = -1
    del inherited
    cuda.record(0, stream.ptr).synchronize()
    assert len(simulated_cuda._events) == 2
    cuda.trim()
    assert len(simulated_cuda._events) == 1


def test_an_event_that_is_used_again_stands_for_the_new_work(simulated_cuda: SimulatedCuda) -> None:
    stream = cuda.new_stream(0)
    cuda.record(0, stream.ptr).synchronize()
    gated, gate = simulated_cuda.new_gated_stream(0)
    event = cuda.record(0, gated)
    assert not event.done()
    gate.set()
    event.synchronize()


def test_an_event_of_an_earlier_simulation_is_no_other_one() -> None:
    with pytest.MonkeyPatch.context() as patch:
        earlier = install_cuda(patch)
        left_over = cuda.record(0, earlier.new_gated_stream(0)[0])
        later = install_cuda(patch)
        gated, gate = later.new_gated_stream(0)
        waits = cuda.record(0, gated)
        del left_over
        # The left over one is this one now.
        cuda.record(0, cuda.new_stream(0).ptr).synchronize()
        assert not waits.done()
        gate.set()
        waits.synchronize()
        later.close()
    forget_cuda()


def test_the_current_device_nests(simulated_cuda: SimulatedCuda) -> None:
    with cuda.current(0):
        with cuda.current(0), cuda.current(1):
            assert cuda.current_ordinal() == 1
            with cuda.current(0):
                assert cuda.current_ordinal() == 0
            assert cuda.current_ordinal() == 1
        assert cuda.current_ordinal() == 0
    assert simulated_cuda._contexts() == []


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("to_device", [True, False])
def test_copies_are_given_in_batches_where_the_driver_takes_them(
    simulated_cuda: SimulatedCuda, batches: bool, to_device: bool
) -> None:
    simulated_cuda.takes_batches = batches
    array_on_device = simulated_cuda.array(np.arange(40, dtype=np.uint8))
    host = cuda.pinned(40)
    values = np.frombuffer(host, np.uint8)[:40]
    values[:] = np.arange(100, 140, dtype=np.uint8)
    address = buffer_of(array_on_device).address
    ends = ([address + 10 * i for i in range(4)], [host.ptr + 10 * (3 - i) for i in range(4)])
    stream = cuda.new_stream(0)
    with cuda.current(0):
        cuda.copy_all(*(ends if to_device else ends[::-1]), array("Q", [10] * 4), stream.ptr, to_device=to_device)
        stream.synchronize()
    assert simulated_cuda.batches == batches
    assert (array_on_device.get().reshape(4, 10) == values.reshape(4, 10)[::-1]).all()


def test_producer_events_of_one_stream(simulated_cuda: SimulatedCuda) -> None:
    stream, gate = simulated_cuda.new_gated_stream(1)
    (event,) = cuda.producer_events({1}, stream)
    assert event.device == 1
    assert not event.done()
    gate.set()


def test_a_stream_that_knows_its_device_leaves_the_others_to_the_host(simulated_cuda: SimulatedCuda) -> None:
    stream, gate = simulated_cuda.new_gated_stream(1)
    other, other_gate = simulated_cuda.new_gated_stream(0)
    threading.Timer(0.05, other_gate.set).start()
    known = types.SimpleNamespace(ptr=stream, device_id=1)
    (event,) = cuda.producer_events({0, 1}, known)
    assert event.device == 1
    assert other_gate.is_set()
    gate.set()
    assert cuda.record(0, other).device == 0


def test_a_bare_handle_for_several_devices_is_refused(simulated_cuda: SimulatedCuda) -> None:
    with pytest.raises(ValueError, match="mapping"):
        cuda.producer_events({0, 1}, 0)


def test_producer_events_of_a_mapping(simulated_cuda: SimulatedCuda) -> None:
    streams = {device: cuda.new_stream(device) for device in (0, 1)}
    events = cuda.producer_events([0, 1], streams)
    assert [event.device for event in events] == [0, 1]
    assert cuda.producer_events([1], {0: streams[0], 1: None}) == ()
    with pytest.raises(TypeError, match="'cuda:0'"):
        cuda.producer_events([0], {"cuda:0": streams[0]})


def test_without_a_stream_the_host_waits_for_the_device(simulated_cuda: SimulatedCuda) -> None:
    _, gate = simulated_cuda.new_gated_stream(0)
    threading.Timer(0.05, gate.set).start()
    assert cuda.producer_events({0}, None) == ()
    assert gate.is_set()


def test_a_state_is_copied_aside_in_the_order_of_the_producers_stream(simulated_cuda: SimulatedCuda) -> None:
    array = simulated_cuda.array(np.zeros(1000, np.uint8))
    stream, gate = simulated_cuda.new_gated_stream(0)
    simulated_cuda.enqueue(stream, lambda: array.values.fill(1))
    aside = cuda.copy_aside(buffer_of(array), stream)
    simulated_cuda.enqueue(stream, lambda: array.values.fill(2))
    event = cuda.record(0, stream)
    gate.set()
    event.synchronize()
    assert aside.device == 0
    assert (simulated_cuda.allocated[aside.address][2] == np.ones(1000, np.uint8)).all()
    assert (array.values == 2).all()


def test_a_state_is_copied_aside_without_a_stream(simulated_cuda: SimulatedCuda) -> None:
    array = simulated_cuda.array(np.arange(100, dtype=np.uint8), 1)
    aside = cuda.copy_aside(buffer_of(array), None)
    assert (simulated_cuda.allocated[aside.address][2] == np.arange(100, dtype=np.uint8)).all()
    with pytest.raises(ValueError, match="host"):
        cuda.copy_aside(buffer_of(np.zeros(3)), None)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", "float16"), ("bfloat16", "uint16"), ("float8_e5m2", "uint8")]
)
def test_arrays_are_allocated_on_a_device(simulated_cuda: SimulatedCuda, dtype: str, expected: str) -> None:
    array = cuda.allocate((3, 4), dtype, 1)
    assert (array.device.id, array.dtype.name) == (1, expected)
    assert cuda.device_of_pointer(buffer_of(array).address) == 1


@pytest.mark.parametrize("taught", [False, True])
def test_words_stand_for_bfloat16_whatever_numpy_was_taught(simulated_cuda: SimulatedCuda, taught: bool) -> None:
    layout = Layout(layers=[Layer(planes={"k": Plane("bfloat16", (4,))})], model="m")
    if taught:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        Slot(layout, [{"k": np.zeros((3, 4), ml_dtypes.bfloat16)}])
        Slot(layout, [{"k": simulated_cuda.array(np.zeros((3, 4), ml_dtypes.bfloat16))}])
    array_on_device = cuda.allocate((3, 4), "bfloat16", 0)
    assert array_on_device.dtype == np.uint16
    for array_of_words in (array_on_device, np.zeros((3, 4), np.uint16)):
        assert Slot(layout, [{"k": array_of_words}]).max_tokens == 3
    assert Slot.allocate(layout, 3, device=0).max_tokens == 3


# --- on a real device -------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Any:
    if not cuda.available():
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


@pytest.mark.gpu
def test_real_streams_of_cupy_and_torch(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    assert cuda.stream_handle(stream) == stream.ptr
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    assert cuda.stream_handle(side) == side.cuda_stream
    for one in (stream, side, torch.cuda.current_stream(), cupy.cuda.Stream.null):
        for event in cuda.producer_events({0}, one):
            event.synchronize()
            assert event.done()


@pytest.mark.gpu
def test_the_device_and_stream_of_the_caller_stay(cupy: Any) -> None:
    before = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    with cuda.current(0):
        assert cuda.current_ordinal() == 0
        cupy.zeros(3)
    assert (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr) == before


@pytest.mark.gpu
def test_a_real_copy_aside_is_in_the_streams_order(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.zeros(1 << 20, cupy.uint8)
        matrix = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(30):
            matrix = matrix @ matrix * 1e-4
        array.fill(1)
        aside = cuda.copy_aside(buffer_of(array), stream)
        array.fill(2)
    for event in cuda.producer_events({0}, stream):
        event.synchronize()
    view = cupy.ndarray(1 << 20, cupy.uint8, aside.owner)
    assert bool((view == 1).all())
    again = cuda.copy_aside(buffer_of(array), None)
    assert bool((cupy.ndarray(1 << 20, cupy.uint8, again.owner) == 2).all())
    del view, aside, again
    cuda.trim()


@pytest.mark.gpu
def test_a_refused_registration_leaves_no_error_behind(cupy: Any) -> None:
    with pytest.raises(MmkvError, match="cudaHostRegister"), cuda.current(0):
        cuda.register_host(4096, 4096)
    assert int(cupy.arange(10).sum()) == 45
    torch = pytest.importorskip("torch")
    assert int(torch.arange(10, device="cuda").sum()) == 45


@pytest.mark.gpu
def test_an_event_does_not_hold_the_interpreters_lock(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        matrix = cupy.ones((8192, 8192), cupy.float32)
        for _ in range(40):
            matrix = matrix @ matrix * 1e-4
        event = cuda.record(0, stream.ptr)
    turns = 0
    waiter = threading.Thread(target=event.synchronize)
    waiter.start()
    while waiter.is_alive():
        turns += 1
        waiter.join(0.0005)
    assert turns > 5


@pytest.mark.gpu
def test_dlpack_and_foreign_dtypes(cupy: Any) -> None:
    words = cuda.allocate((2, 3), "bfloat16", 0)
    assert words.dtype == cupy.uint16
    assert cuda.from_dlpack(words).data.ptr == words.data.ptr
    assert cuda.device_of_pointer(words.data.ptr) == 0
