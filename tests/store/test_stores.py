"""What every store promises, for every kind of memory. Files are read and written around the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv import device as cuda
from mmkv.errors import MmkvError, TransferError
from mmkv.store import DirectStore, LayerCopies, MappedStore, PosixStore, StagedStore, Store
from tests import simulated
from tests.store.rig import SEGMENT_BYTES, SEGMENTS, Case, Recorder, Rig, make_case, make_paged_case, runs_of

KINDS = {
    "posix": (lambda _: PosixStore(3), {"posix"}),
    "mapped": (lambda _: MappedStore(None), {"mapped"}),
    "mapped-or-staged": (lambda _: MappedStore(StagedStore(3)), {"mapped", "posix"}),
    "direct": (lambda directory: DirectStore(directory, 3), {"kvikio-posix", "cufile-compat", "gds"}),
    "staged": (lambda _: StagedStore(3), {"posix"}),
}
DEVICE_KINDS = [kind for kind in KINDS if kind != "posix"]
PARAMS = [
    ("posix", "host"),
    *[(kind, "simulated") for kind in DEVICE_KINDS],
    *[pytest.param((kind, "cupy"), marks=pytest.mark.gpu, id=f"{kind}-cupy") for kind in DEVICE_KINDS],
]


@pytest.fixture(params=PARAMS, ids="-".join)
def rig(
    request: pytest.FixtureRequest, ram_path: Path, monkeypatch: pytest.MonkeyPatch, no_threads_left: None
) -> Iterator[Rig]:
    kind, memory = request.param
    array_of: Callable[[np.ndarray[Any, Any]], Any] = np.array
    bytes_of: Callable[[Any], np.ndarray[Any, Any]] = np.asarray
    if memory == "simulated":
        installed = request.getfixturevalue("simulated_cuda")
        simulated.install_kvikio(monkeypatch)
        array_of, bytes_of = installed.array, simulated.SimulatedArray.get
    elif memory == "cupy":
        if not cuda.available():
            pytest.skip("no CUDA device")
        cupy = pytest.importorskip("cupy")
        if kind == "direct":
            pytest.importorskip("kvikio")
        array_of, bytes_of = cupy.asarray, cupy.asnumpy
    open_store, paths = KINDS[kind]
    store: Store = open_store(ram_path)
    made = Rig(store, paths, array_of, bytes_of, ram_path, [])
    yield made
    store.close()
    for file in made.files:
        file.close()


def expect_in_files(rig: Rig, case: Case, before: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    expected = {copy.file: content for (copy, _), content in zip(case.arrays, before, strict=True)}
    for copy, array in case.arrays:
        values = rig.bytes_of(array)
        for file_offset, buffer_offset, size in runs_of(copy):
            expected[copy.file][file_offset : file_offset + size] = values[buffer_offset : buffer_offset + size]
    return [expected[copy.file] for copy, _ in case.arrays]


def expect_in_arrays(rig: Rig, case: Case) -> list[np.ndarray[Any, Any]]:
    expected = []
    for (copy, array), content in zip(case.arrays, case.in_files(), strict=True):
        values = rig.bytes_of(array).copy()
        for file_offset, buffer_offset, size in runs_of(copy):
            values[buffer_offset : buffer_offset + size] = content[file_offset : file_offset + size]
        expected.append(values)
    return expected


def check_all_equal(found: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def check_told(rig: Rig, case: Case, recorder: Recorder) -> None:
    assert sorted(recorder.landings) == list(range(len(case.layers)))
    assert sum(recorder.bytes.values()) == case.bytes
    assert set(recorder.bytes) <= rig.paths


def round_trip(rig: Rig, rng: np.random.Generator, case: Case) -> None:
    expected = expect_in_files(rig, case, case.in_files())
    check_told(rig, case, rig.write(case.layers).ok())
    check_all_equal(case.in_files(), expected)
    case.scatter(rng)
    expected = expect_in_arrays(rig, case)
    check_told(rig, case, rig.read(case.layers).ok())
    check_all_equal([rig.bytes_of(array) for _, array in case.arrays], expected)


@pytest.mark.parametrize("size", [1, 4096, 65_537, (4 << 20) + 5])
@pytest.mark.parametrize("shift", [0, 1])
def test_one_run(rig: Rig, size: int, shift: int) -> None:
    rng = np.random.default_rng(size + shift)
    round_trip(rig, rng, make_case(rig, rng, [[[size]]], shift=shift))


def test_several_planes_and_layers_and_an_empty_one(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    sizes = [[[70_000, 3], [1 << 20]], [], [[512] * 5, [48], [9, 7]], [[], [5]], [[(4 << 20) + 1]]]
    round_trip(rig, rng, make_case(rig, rng, sizes))


def test_many_short_runs(rig: Rig) -> None:
    rng = np.random.default_rng(2)
    sizes = [[rng.integers(1, 5000, 400).tolist(), [24] * 300], [[33_000] * 40]]
    round_trip(rig, rng, make_case(rig, rng, sizes, shift=3))


@pytest.mark.parametrize("page_bytes", [(512, 96), (3000,), (20_000, 7)])
def test_pages_that_lie_together_in_the_file(rig: Rig, page_bytes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(page_bytes))
    round_trip(rig, rng, make_paged_case(rig, rng, 3, page_bytes, 200))


def test_more_pages_than_one_call_takes(rig: Rig) -> None:
    rng = np.random.default_rng(14)
    round_trip(rig, rng, make_paged_case(rig, rng, 2, (16, 24), 3000))


def test_no_layer_at_all(rig: Rig) -> None:
    recorder = rig.read([]).ok()
    assert recorder.landings == []


def test_only_empty_layers(rig: Rig) -> None:
    recorder = rig.write([LayerCopies(0, ()), LayerCopies(1, ())]).ok()
    assert sorted(recorder.landings) == [0, 1]


def test_layers_of_a_read_land_in_order_of_submission(rig: Rig) -> None:
    rng = np.random.default_rng(3)
    case = make_case(rig, rng, [[[100_000]]] * 6)
    recorder = rig.read(case.layers).ok()
    assert sorted(recorder.landings) == list(range(6))
    submitted = [layer for layer, _ in recorder.submissions]
    assert submitted == sorted(submitted)
    assert all(event.done() for _, event in recorder.submissions)


def test_transfers_from_several_threads(rig: Rig) -> None:
    cases = [
        make_case(rig, np.random.default_rng(number), [[[200_000] * 3, [1000] * 50], [[70_000]]], tag=f"{number}-")
        for number in range(4)
    ]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(2):
                round_trip(rig, np.random.default_rng(number), cases[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_stopped_transfer_moves_nothing_more_and_is_released(rig: Rig) -> None:
    rng = np.random.default_rng(4)
    case = make_case(rig, rng, [[[500_000]], [[3000] * 30]])
    before = case.in_files()
    recorder = Recorder(stopped=True)
    rig.store.write(case.layers, recorder)
    recorder.wait()
    assert recorder.errors == []
    check_all_equal(case.in_files(), before)


def test_a_transfer_stopped_in_its_middle_is_released_once(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    case = make_case(rig, rng, [[[2_000_000]]] * 8)
    for layers in range(1, 4):
        recorder = Recorder()
        landed = recorder.landed

        def stop(
            layer: int, *, at: int = layers, landed: Callable[[int], None] = landed, of: Recorder = recorder
        ) -> None:
            landed(layer)
            if len(of.landings) == at:
                of.stop()

        recorder.landed = stop  # type: ignore[method-assign]
        rig.store.read(case.layers, recorder)
        recorder.wait()
        assert recorder.errors == []


def test_reading_a_truncated_file_is_an_error_that_names_layer_and_plane(rig: Rig) -> None:
    rng = np.random.default_rng(6)
    case = make_case(rig, rng, [[[1000]], [[1000], [2_000_000]]])
    rig.read(case.layers).ok()
    os.truncate(case.layers[1].copies[0].file.path, 0)
    recorder = rig.read(case.layers)
    recorder.wait()
    error = recorder.errors[0]
    assert isinstance(error, TransferError)
    assert error.layer == 1
    assert error.plane in ("plane0", "plane1")
    assert "truncated" in str(error)
    assert "0001.kv" in str(error)


def test_a_closed_file_is_an_error_and_releases(rig: Rig) -> None:
    rng = np.random.default_rng(7)
    case = make_case(rig, rng, [[[1000]]])
    case.layers[0].copies[0].file.close()
    recorder = rig.write(case.layers)
    recorder.wait()
    assert recorder.errors or recorder.landings == [0]


def test_the_producers_event_is_waited_for(rig: Rig, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(8)
    case = make_case(rig, rng, [[[300_000]], [[2000] * 20]])
    if case.layers[0].copies[0].buffer.device is None:
        pytest.skip("host arrays have no stream")
    arrays = [array for _, array in case.arrays]
    if isinstance(arrays[0], simulated.SimulatedArray):
        installed = request.getfixturevalue("simulated_cuda")
        stream, gate = installed.new_gated_stream(0)
        for array in arrays:
            installed.enqueue(stream, lambda array=array: array.values.fill(7))
        threading.Timer(0.2, gate.set).start()
    else:
        cupy = pytest.importorskip("cupy")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            matrix = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(60):
                matrix = matrix @ matrix * 1e-4
            for array in arrays:
                array.fill(7)
    recorder = rig.write(case.layers, cuda.producer_events({0}, stream)).ok()
    check_told(rig, case, recorder)
    for content, (copy, _) in zip(case.in_files(), case.arrays, strict=True):
        for file_offset, _, size in runs_of(copy):
            assert (content[file_offset : file_offset + size] == 7).all()


def test_a_segment_that_is_forgotten_can_be_used_again(rig: Rig) -> None:
    rng = np.random.default_rng(9)
    case = make_case(rig, rng, [[[1000] * 30, [2_000_000]]])
    round_trip(rig, rng, case)
    file = case.layers[0].copies[0].file
    for segment in range(SEGMENTS):
        rig.store.forget(file, segment)
        file.give_back(segment)
    assert not any(os.pread(file.fd, SEGMENT_BYTES, 0))
    for segment in range(SEGMENTS):
        file.allocate(segment)
    rig.store.prepare([file], range(SEGMENTS))
    round_trip(rig, rng, case)


def test_it_describes_itself(rig: Rig) -> None:
    description = rig.store.describe()
    assert description["path"] in rig.paths


def test_host_memory_is_refused_by_stores_of_device_memory(rig: Rig) -> None:
    if isinstance(rig.store, PosixStore):
        pytest.skip("a store of host memory")
    host = Rig(rig.store, rig.paths, np.array, np.asarray, rig.directory, rig.files)
    case = make_case(host, np.random.default_rng(10), [[[5000]]])
    recorder = host.write(case.layers)
    recorder.wait()
    assert isinstance(recorder.errors[0], MmkvError)


def test_a_gate_holds_a_layer_back(rig: Rig) -> None:
    rng = np.random.default_rng(11)
    case = make_case(rig, rng, [[[200_000]], [], [[3000] * 30], [[100_000]]])
    case.scatter(rng)
    before = [rig.bytes_of(array).copy() for _, array in case.arrays]
    expected = expect_in_arrays(rig, case)
    opened = threading.Event()

    def gate(layer: int) -> None:
        if layer >= 2:
            assert opened.wait(30)

    recorder = rig.read(case.layers, (), gate)
    deadline = time.monotonic() + 30
    while 0 not in recorder.landings and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.05)
    check_all_equal([rig.bytes_of(array) for _, array in case.arrays], [expected[0], *before[1:]])
    opened.set()
    check_told(rig, case, recorder.ok())
    check_all_equal([rig.bytes_of(array) for _, array in case.arrays], expected)


def test_a_gate_that_stays_shut_fails_the_transfer(rig: Rig) -> None:
    rng = np.random.default_rng(12)
    case = make_case(rig, rng, [[[200_000]], [[3000] * 30]])
    case.scatter(rng)
    before = [rig.bytes_of(array).copy() for _, array in case.arrays]

    def gate(layer: int) -> None:
        if layer == 1:
            raise MmkvError("the park failed")

    recorder = rig.read(case.layers, (), gate)
    recorder.wait()
    assert "the park failed" in str(recorder.errors[0])
    np.testing.assert_array_equal(rig.bytes_of(case.arrays[1][1]), before[1])


def test_a_gates_event_is_waited_for(rig: Rig, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(13)
    case = make_case(rig, rng, [[[200_000]], [[3000] * 30]])
    array = case.arrays[0][1]
    if not isinstance(array, simulated.SimulatedArray):
        pytest.skip("needs a stream that waits")
    installed = request.getfixturevalue("simulated_cuda")
    case.scatter(rng)
    before = array.values.copy()
    expected = expect_in_arrays(rig, case)
    stream, opened = installed.new_gated_stream(0)
    event = cuda.record(0, stream)
    recorder = rig.read(case.layers, (), lambda layer: event if layer == 0 else None)
    time.sleep(0.05)
    np.testing.assert_array_equal(array.values, before)
    opened.set()
    recorder.ok()
    check_all_equal([array.values for _, array in case.arrays], expected)
