"""The page-locked map, on a simulated CUDA: what is registered when, what refuses, and what moves by which path."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mmkv import device as cuda
from mmkv.buffer import buffer_of
from mmkv.errors import MmkvError, TransferError
from mmkv.store import Copy, LayerCopies, MappedStore, PoolFile, StagedStore, Store, locked
from tests.simulated import CUDARuntimeError, SimulatedCuda
from tests.store.rig import SEGMENT_BYTES, SEGMENTS, Case, Recorder, Rig, make_case
from tests.store.test_stores import check_all_equal, expect_in_arrays, round_trip

MakeRig = Callable[[Store], Rig]


@pytest.fixture
def make_rig(simulated_cuda: SimulatedCuda, ram_path: Path, no_threads_left: None) -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(store: Store) -> Rig:
        made.append(Rig(store, {"mapped", "posix"}, simulated_cuda.array, lambda array: array.values, ram_path, []))
        return made[-1]

    yield make
    for rig in made:
        rig.store.close()
        for file in rig.files:
            file.close()


def refuse_all(_address: int, _size: int) -> str:
    return "cudaErrorNotPermitted: operation not permitted"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def prepare_all(rig: Rig, case: Case) -> None:
    files = list(dict.fromkeys(copy.file for copy, _ in case.arrays))
    rig.store.prepare(files, range(SEGMENTS))
    assert isinstance(rig.store, MappedStore)
    wait_until(lambda: rig.store.describe()["locked_bytes"] == len(files) * SEGMENTS * SEGMENT_BYTES)


def test_a_segment_is_page_locked_once(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    rng = np.random.default_rng(0)
    case = make_case(rig, rng, [[[2_000_000], [1000] * 20]] * 3)
    for _ in range(3):
        round_trip(rig, rng, case)
    assert simulated_cuda.registrations == len(simulated_cuda.registered) <= 3 * SEGMENTS


def test_what_is_page_locked_is_submitted_before_read_returns(make_rig: MakeRig) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(1), [[[500_000], [100] * 30]] * 4)
    prepare_all(rig, case)
    recorder = rig.read(case.layers)
    assert [layer for layer, _ in recorder.submissions] == [0, 1, 2, 3]
    recorder.ok()
    assert recorder.bytes == {"mapped": case.bytes}


def test_many_short_runs_take_one_launch_a_layer_and_long_ones_a_copy_each(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda
) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(2), [[[700] * 1000, [900_000]], [[4 << 20]], [[10, 20]]])
    prepare_all(rig, case)
    rig.read(case.layers).ok()
    assert simulated_cuda.launches == 1
    # The table, and the runs of the other layers.
    assert simulated_cuda.copies == 1 + 1 + 2
    assert simulated_cuda.batches == 0


def test_few_runs_are_given_in_one_batch_a_layer(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    rng = np.random.default_rng(20)
    case = make_case(rig, rng, [[[70_000], [900, 900], [90]]] * 3)
    prepare_all(rig, case)
    round_trip(rig, rng, case)
    assert simulated_cuda.batches == 2 * 3
    simulated_cuda.takes_batches = False
    round_trip(rig, rng, case)
    assert simulated_cuda.batches == 2 * 3


def test_without_a_compiler_every_run_is_copied(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    simulated_cuda.compiler_works = False
    rig = make_rig(MappedStore(None))
    rng = np.random.default_rng(3)
    case = make_case(rig, rng, [[[700] * 30, [50] * 40]] * 2)
    round_trip(rig, rng, case)
    assert simulated_cuda.launches == 0
    assert [record.name for record in caplog.records] == ["mmkv"]
    assert "NVRTC" in rig.store.describe()["reason"]


def test_a_refused_registration_moves_by_the_fallback_with_one_warning(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    simulated_cuda.refuse = refuse_all
    rig = make_rig(MappedStore(StagedStore(2)))
    rng = np.random.default_rng(4)
    case = make_case(rig, rng, [[[2_000_000]], [], [[1_500_000]]])
    round_trip(rig, rng, case)
    attempts = simulated_cuda.registrations
    round_trip(rig, rng, case)
    recorder = rig.write(case.layers).ok()
    assert recorder.bytes == {"posix": case.bytes}
    assert simulated_cuda.registrations == attempts
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "not permitted" in warnings[0].getMessage()
    assert "not permitted" in rig.store.describe()["reason"]
    assert maps_of(rig.directory) == 0


def test_a_refused_registration_without_a_fallback_is_an_error(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda
) -> None:
    simulated_cuda.refuse = refuse_all
    rig = make_rig(MappedStore(None))
    recorder = rig.read(make_case(rig, np.random.default_rng(5), [[], [[1000]]]).layers)
    recorder.wait()
    error = recorder.errors[0]
    assert isinstance(error, TransferError)
    assert error.layer == 1
    assert "not permitted" in str(error)


def test_a_transfer_may_take_both_paths(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(StagedStore(2)))
    rng = np.random.default_rng(6)
    case = make_case(rig, rng, [[[3_000_000]], [[3_000_000]], [[3_000_000]], [[20_000] * 100]])
    turns = iter(range(100))
    simulated_cuda.refuse = lambda _address, _size: "cudaErrorMemoryAllocation" if next(turns) % 2 else None
    round_trip(rig, rng, case)
    recorder = rig.read(case.layers).ok()
    assert set(recorder.bytes) == {"mapped", "posix"}
    assert sorted(recorder.landings) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1000, 2_000_000])
def test_a_transfer_waits_for_no_registration(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(locked, "_PATIENCE_SECONDS", 30)
    rig = make_rig(MappedStore(StagedStore(2)))
    case = make_case(rig, np.random.default_rng(7), [[[size]]])
    stream, gate = simulated_cuda.new_gated_stream(0)
    recorder = rig.read(case.layers, cuda.producer_events({0}, {0: stream}))
    time.sleep(0.05)
    assert simulated_cuda.registrations == 0
    gate.set()
    assert recorder.ok().bytes == {"posix": size}
    prepare_all(rig, case)
    assert rig.read(case.layers).ok().bytes == {"mapped": size}


def test_the_background_gives_way_to_transfers(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "_PATIENCE_SECONDS", 30)
    rig = make_rig(MappedStore(StagedStore(2)))
    case = make_case(rig, np.random.default_rng(8), [[[1000]], [[3_000_000]]])
    stream, gate = simulated_cuda.new_gated_stream(0)
    recorder = rig.read(case.layers[:1], cuda.producer_events({0}, {0: stream}))
    rig.store.prepare([case.layers[1].copies[0].file], range(SEGMENTS))
    time.sleep(0.1)
    assert simulated_cuda.registrations == 0
    gate.set()
    recorder.ok()
    # What the transfer lacked, and what was asked for.
    wait_until(lambda: simulated_cuda.registrations == 1 + SEGMENTS)


def test_what_a_transfer_lacked_is_page_locked_first(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "_PATIENCE_SECONDS", 30)
    monkeypatch.setattr(locked, "_WORKERS", 1)
    store = MappedStore(StagedStore(2))
    rig = make_rig(store)
    case = make_case(rig, np.random.default_rng(18), [[[1000]], [[2000]], [[3000]]])
    files = [layer.copies[0].file for layer in case.layers]
    locking: list[tuple[int, int]] = []
    lock = store._locked.lock

    def watched(file: PoolFile, segment: int, device: int) -> None:
        locking.append((files.index(file), segment))
        lock(file, segment, device)

    monkeypatch.setattr(store._locked, "lock", watched)
    stream, gate = simulated_cuda.new_gated_stream(0)
    first = rig.read(case.layers[:1], cuda.producer_events({0}, {0: stream}))
    store.prepare(files, range(SEGMENTS))
    last = rig.read(case.layers[2:])
    segment = int(case.layers[2].copies[0].file_offsets[0]) // SEGMENT_BYTES
    gate.set()
    first.ok()
    last.ok()
    wait_until(lambda: len(locking) == 3 * SEGMENTS)
    assert locking[0] == (2, segment)
    assert len(set(locking)) == len(locking)


def test_layers_alike_share_a_table(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(19), [[[700] * 100, [30] * 100]] * 8)
    first = case.layers[0].copies
    alike = Case([], case.arrays)
    for layer in case.layers:
        copies = [
            Copy(copy.name, copy.file, copy.buffer, like.file_offsets, like.buffer_offsets, like.sizes)
            for copy, like in zip(layer.copies, first, strict=True)
        ]
        alike.layers.append(LayerCopies(layer.layer, tuple(copies)))
    everything = np.zeros(100 * 740, np.uint8)
    arrays = [[rig.array_of(everything) for _ in layer.copies] for layer in alike.layers]
    alike.arrays = []
    for layer, row in zip(list(alike.layers), arrays, strict=True):
        copies = [
            Copy(copy.name, copy.file, buffer_of(array), copy.file_offsets, copy.buffer_offsets, copy.sizes)
            for copy, array in zip(layer.copies, row, strict=True)
        ]
        alike.layers[layer.layer] = LayerCopies(layer.layer, tuple(copies))
        alike.arrays += zip(copies, row, strict=True)
    prepare_all(rig, alike)
    expected = expect_in_arrays(rig, alike)
    before = simulated_cuda.copies
    rig.read(alike.layers).ok()
    check_all_equal([array.values for _, array in alike.arrays], expected)
    assert simulated_cuda.launches == 8
    # One table; and addresses for one layer, then two, four and one more.
    assert simulated_cuda.copies - before == 4


def test_closing_unlocks_everything_and_nothing_leaks(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rng = np.random.default_rng(9)
    for number in range(5):
        store = MappedStore(None)
        rig = make_rig(store)
        case = make_case(rig, rng, [[[100_000], [64] * 40]] * 2, tag=f"{number}-")
        prepare_all(rig, case)
        round_trip(rig, rng, case)
        assert maps_of(rig.directory) > 0
        store.close()
        store.close()
        assert simulated_cuda.registered == {}
        assert maps_of(rig.directory) == 0


def test_closing_waits_for_the_background(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    def slowly(_address: int, _size: int) -> None:
        time.sleep(0.05)

    simulated_cuda.refuse = slowly
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(10), [[[1000]]] * 8)
    rig.store.prepare([copy.file for copy, _ in case.arrays], range(SEGMENTS))
    time.sleep(0.02)
    rig.store.close()
    assert simulated_cuda.registered == {}


def test_forgetting_unlocks_one_segment(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(11), [[[1000]]])
    prepare_all(rig, case)
    rig.store.forget(case.arrays[0][0].file, 0)
    assert len(simulated_cuda.registered) == SEGMENTS - 1
    rig.store.forget(case.arrays[0][0].file, 0)


def test_a_refusal_is_forgotten_with_its_segment(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.refuse = refuse_all
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(12), [[[1000]]])
    rig.read(case.layers).wait()
    simulated_cuda.refuse = lambda _address, _size: None
    for segment in range(SEGMENTS):
        rig.store.forget(case.arrays[0][0].file, segment)
    rig.read(case.layers).ok()


def test_layers_on_several_devices(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    rng = np.random.default_rng(13)
    devices = iter(range(100))
    rig.array_of = lambda values: simulated_cuda.array(values, next(devices) % 2)
    case = make_case(rig, rng, [[[300_000]], [[200_000], [40] * 50], [[700] * 20], [[600_000], [500_000], [9]]])
    assert {copy.buffer.device for copy in case.layers[3].copies} == {0, 1}
    round_trip(rig, rng, case)
    # From one split onto another.
    devices = iter(range(1, 100))
    other = Case([], [])
    for layer in case.layers:
        copies = []
        for copy in layer.copies:
            array = rig.array_of(np.zeros(copy.buffer.bytes, np.uint8))
            moved = Copy(copy.name, copy.file, buffer_of(array), copy.file_offsets, copy.buffer_offsets, copy.sizes)
            copies.append(moved)
            other.arrays.append((moved, array))
        other.layers.append(LayerCopies(layer.layer, tuple(copies)))
    expected = expect_in_arrays(rig, other)
    rig.read(other.layers).ok()
    check_all_equal([array.values for _, array in other.arrays], expected)


def test_the_callers_device_stays_current(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    rig.array_of = lambda values: simulated_cuda.array(values, 1)
    rng = np.random.default_rng(14)
    round_trip(rig, rng, make_case(rig, rng, [[[1000], [64] * 9]]))
    assert simulated_cuda._contexts() == []


def test_a_copy_that_cannot_be_submitted_fails_and_releases_when_the_device_is_idle(
    make_rig: MakeRig, simulated_cuda: SimulatedCuda
) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(15), [[[300_000]], [[100_000], [200_000]], [[5]]])
    prepare_all(rig, case)
    copy_async = simulated_cuda.runtime.memcpyAsync
    slow = threading.Event()

    def refuse(target: int, source: int, size: int, kind: int, stream: int) -> None:
        if size == 200_000:
            raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
        copy_async(target, source, size, kind, stream)
        simulated_cuda.enqueue(stream, lambda: slow.wait(0.2) and None)

    simulated_cuda.runtime.memcpyAsync = refuse
    recorder = rig.read(case.layers)
    recorder.wait()
    assert [layer for layer, _ in recorder.submissions] == [0]
    assert isinstance(recorder.errors[0], TransferError)
    assert "invalid argument" in str(recorder.errors[0])
    assert recorder.landings == [0]


def test_a_copy_that_fails_on_the_device_names_its_layer(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(16), [[[1000]], [[2000]]])
    prepare_all(rig, case)

    def fail() -> None:
        raise ValueError("an illegal access")

    stream, gate = simulated_cuda.new_gated_stream(0)
    recorder = Recorder()
    rig.store.read(case.layers, recorder, cuda.producer_events({0}, {0: stream}))
    copying = next(queue for handle, queue in simulated_cuda._streams.items() if handle > 0 and handle != stream)
    copying.jobs.put(fail)
    copying.error = ValueError("an illegal access")
    gate.set()
    recorder.wait()
    assert isinstance(recorder.errors[0], TransferError)
    assert recorder.errors[0].layer == 0
    copying.error = None


def test_pages_that_the_file_lacks_are_not_page_locked(make_rig: MakeRig, simulated_cuda: SimulatedCuda) -> None:
    rig = make_rig(MappedStore(None))
    case = make_case(rig, np.random.default_rng(17), [[[1000]]])
    file = case.arrays[0][0].file
    with pytest.raises(MmkvError, match="truncated"):
        rig.store._locked.lock(file, SEGMENTS, 0)  # type: ignore[attr-defined]
    assert simulated_cuda.registrations == 0
