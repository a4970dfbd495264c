"""Checksums of device arrays, on the simulated CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from mmkv import device as cuda
from mmkv.ahead import SummingAhead
from mmkv.slotsums import SlotSums
from mmkv.summing import Summing
from tests.computed import HYBRID, UNIFORM, Ids, assert_holds, computed, ids_of, make_slot
from tests.simulated import SimulatedCuda
from tests.test_checks import flip, matched


@pytest.fixture
def pool(ram_path: Path, simulated_cuda: SimulatedCuda) -> Iterator[mmkv.Pool]:
    with mmkv.Pool.open(ram_path / "pool", HYBRID, capacity="8MiB", verify="always") as opened:
        yield opened


def on_devices(layout: mmkv.Layout, cuda: SimulatedCuda, host: mmkv.Slot, devices: list[int | None]) -> mmkv.Slot:
    """A slot with the bytes of one on the host, each layer on a device or on the host."""

    def place(arrays: dict[str, Any], device: int | None) -> dict[str, Any]:
        return {n: a.copy() if device is None else cuda.array(a, device) for n, a in arrays.items()}

    arrays = [place(layer, devices[i % len(devices)]) for i, layer in enumerate(host.arrays)]
    state = [place(layer, devices[i % len(devices)]) for i, layer in enumerate(host.state)]
    slot = mmkv.Slot(layout, arrays, state)
    slot.arrays, slot.state = arrays, state
    return slot


def off_devices(slot: mmkv.Slot) -> mmkv.Slot:
    """A slot on the host that holds the same."""
    host = make_slot(slot.layout, slot.max_tokens or 1)
    for mine, theirs in ((host.arrays, slot.arrays), (host.state, slot.state)):
        for layer, other in zip(mine, theirs, strict=True):
            for name in layer:
                layer[name][...] = getattr(other[name], "values", other[name])
    return host


DEVICES = [[0], [0, 1], [0, None]]


def park(pool: mmkv.Pool, cuda: SimulatedCuda, ids: Ids, devices: list[int | None], name: str = "chat") -> mmkv.Receipt:
    slot = on_devices(pool.layout, cuda, computed(pool.layout, ids), devices)
    return pool.park(name, slot, ids).result(30)


def take(pool: mmkv.Pool, cuda: SimulatedCuda, ids: Ids, devices: list[int | None], **options: Any) -> mmkv.Receipt:
    slot = on_devices(pool.layout, cuda, make_slot(pool.layout, len(ids) + 3, fill=0xAA), devices)
    receipt = pool.take("chat", slot, **options).result(30)
    have = receipt.tokens - receipt.tokens_written
    assert_holds(off_devices(slot), ids[: receipt.tokens], have=have, fill=0xAA)
    return receipt


@pytest.mark.usefixtures("late_sums")
@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_an_engine_may_change_a_state_as_soon_as_its_layer_is_there(
    pool: mmkv.Pool, simulated_cuda: SimulatedCuda, devices: list[int | None]
) -> None:
    ids = ids_of((1, 900))
    park(pool, simulated_cuda, ids, devices)
    slot = on_devices(HYBRID, simulated_cuda, make_slot(HYBRID, 903), devices)
    transfer = pool.take("chat", slot)
    for layer, states in enumerate(slot.state):
        device = devices[layer % len(devices)]
        stream = None if device is None else cuda.new_stream(device)
        transfer.wait(layer, stream)
        if stream is not None:
            stream.synchronize()
        for state in states.values():
            getattr(state, "values", state).view(np.uint8)[...] ^= 0xFF
    transfer.result(30)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("compiler", [True, False])
def test_parks_and_takes(
    pool: mmkv.Pool, simulated_cuda: SimulatedCuda, devices: list[int | None], compiler: bool
) -> None:
    simulated_cuda.compiler_works = compiler
    ids = ids_of((1, 1300))
    for end in (700, 900, 1300):
        park(pool, simulated_cuda, ids[:end], devices)
        assert take(pool, simulated_cuda, ids[:end], devices).verified
    # What a device took is what the host takes.
    assert take(pool, simulated_cuda, ids, [None], have=1000).verified
    take(pool, simulated_cuda, ids, devices, have=1000)
    take(pool, simulated_cuda, ids, devices, tokens=900, have=100)
    flip(pool, "chat", 600, layer=0, plane="v")
    with pytest.raises(mmkv.ConversationCorrupt, match="layer 0, 'v', tokens 512 to 1023"):
        take(pool, simulated_cuda, ids, devices)
    assert matched(pool, ids) == 0, "there is no checkpoint before the bad block"
    park(pool, simulated_cuda, ids, devices)
    take(pool, simulated_cuda, ids, devices)
    park(pool, simulated_cuda, ids_of((3, 600)), [None], "host")


def test_checksums_of_a_park_are_taken_ahead(ram_path: Path, simulated_cuda: SimulatedCuda) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        pool._checks.digester._compile([0, 1])
        ids = ids_of((1, 1300))
        seen = []
        begin = SummingAhead.begin

        def begun(self: SummingAhead, after: Any) -> None:
            seen.append(self)
            begin(self, after)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SummingAhead, "begin", begun)
            park(pool, simulated_cuda, ids[:700], [0])
            park(pool, simulated_cuda, ids, [0, 1])
        assert len(seen) == 2
        assert take(pool, simulated_cuda, ids, [1]).verified == 1300 * UNIFORM.token_bytes


def test_they_wait_for_who_computes_the_slot(ram_path: Path, simulated_cuda: SimulatedCuda) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        pool._checks.digester._compile([0])
        ids = ids_of((1, 1300))
        right = computed(UNIFORM, ids)
        slot = on_devices(UNIFORM, simulated_cuda, make_slot(UNIFORM, 1300), [0])
        stream, gate = simulated_cuda.new_gated_stream(0)

        def compute() -> None:
            for mine, theirs in zip(slot.arrays, right.arrays, strict=True):
                for name in mine:
                    mine[name].values[...] = theirs[name]

        simulated_cuda.enqueue(stream, compute)
        transfer = pool.park("chat", slot, ids, stream=stream)
        assert not transfer.done()
        gate.set()
        transfer.result(30)
        assert take(pool, simulated_cuda, ids, [0]).verified


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_a_swap(ram_path: Path, simulated_cuda: SimulatedCuda, devices: list[int | None], compiled: bool) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        if compiled:
            pool._checks.digester._compile([0, 1])
        here, there = ids_of((1, 1300)), ids_of((2, 1300))
        park(pool, simulated_cuda, there, devices, "there")
        slot = on_devices(UNIFORM, simulated_cuda, computed(UNIFORM, here), devices)
        for _ in range(4):
            left, arrived = pool.swap(slot, leaving="chat", leaving_ids=here, arriving="there")
            left.result(30)
            assert arrived.result(30).verified
            assert_holds(off_devices(slot), there)
            assert take(pool, simulated_cuda, here, devices).verified
            left, arrived = pool.swap(slot, leaving="there", leaving_ids=there, arriving="chat")
            left.result(30)
            arrived.result(30)
            assert_holds(off_devices(slot), here)
            pool.drop("chat")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_launch_that_fails_fails_the_park(
    ram_path: Path, simulated_cuda: SimulatedCuda, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmkv.ahead._LAUNCH_BYTES", 1)
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        digester, ids, calls = pool._checks.digester, ids_of((1, 1300)), 0
        digester._compile([0])
        launch = digester.launch

        def fail(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == which + 1:
                raise RuntimeError("no launch")
            return launch(*arguments)

        monkeypatch.setattr(digester, "launch", fail)
        with pytest.raises(mmkv.TransferError, match="could not be taken: no launch"):
            park(pool, simulated_cuda, ids, [0])
        assert len(pool) == 0
        assert pool.stats().transfers == pool.stats().quarantined == 0
        park(pool, simulated_cuda, ids, [0])
        assert take(pool, simulated_cuda, ids, [0]).verified


def test_a_park_without_a_thread_for_them(
    ram_path: Path, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        pool._checks.digester._compile([0])
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            if self.name == "mmkv-checksums":
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        park(pool, simulated_cuda, ids_of((1, 1300)), [0])
        assert take(pool, simulated_cuda, ids_of((1, 1300)), [0]).verified


def test_layers_on_a_device_are_summed_some_at_once(simulated_cuda: SimulatedCuda) -> None:
    class Whole:
        stopped = False

        def __init__(self) -> None:
            self.told: list[int] = []

        def landed(self, layer: int) -> None:
            self.told.append(layer)

        submitted = moved = failed = released = landed

    class Sums(SlotSums):
        def __init__(self) -> None:
            self.taken: list[list[int]] = []

        def has_states(self, layer: int) -> bool:
            return False

        def device(self, layer: int) -> int | None:
            return None if layer == 4 else layer % 2

        def layer_bytes(self, layer: int) -> int:
            return 30 << 20

        def take(self, layers: Any) -> None:
            self.taken.append(list(layers))

    for first in (True, False):
        whole, sums = Whole(), Sums()
        summing = Summing(whole, (sums,), [1, 1, 2, 1, 1, 1, 1], first=first)
        for layer in (0, 1, 2, 3, 4):
            summing.landed(layer)
        assert sums.taken == [[4]]
        assert whole.told == ([2, 4] if first else [0, 1, 2, 3, 4])
        summing.landed(2)
        summing.landed(5)
        assert sums.taken == [[4], [1, 3, 5]]
        summing.landed(6)
        assert sums.taken == [[4], [1, 3, 5], [0, 2, 6]]
        assert sorted(whole.told) == [0, 1, 2, 2, 3, 4, 5, 6]
        assert np.all(np.bincount(whole.told) == [1, 1, 2, 1, 1, 1, 1])
