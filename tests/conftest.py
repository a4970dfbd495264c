"""Fixtures that every test may use."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import smollm2
from mmkv import device as cuda
from mmkv.slotsums import SlotSums
from tests import simulated
from tests.tiered import Moves


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """NumPy always, and CuPy where there is a device."""
    if request.param == "numpy":
        return np
    if not cuda.available():
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs, or one on a disk where there is no tmpfs."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="mmkv-test-", dir=shm))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Where a pool with two tiers has its path."""
    return tmp_path / "pool"


@pytest.fixture
def hot(ram_path: Path) -> Path:
    """Where it has its hot tier."""
    return ram_path / "hot"


@pytest.fixture
def moves(base: Path, monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Counts, holds up or breaks what moves in and out of the files at the path."""
    return Moves(base, monkeypatch)


@pytest.fixture
def late_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums of a layer take their time."""
    take = SlotSums.take

    def late(self: SlotSums, layers: Any) -> None:
        time.sleep(0.02)
        take(self, layers)

    monkeypatch.setattr(SlotSums, "take", late)


@pytest.fixture(scope="session")
def unpacked_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the unpacked SmolLM2 and its tokenizer."""
    path = tmp_path_factory.mktemp("smollm2") / "model.pt"
    smollm2.load(path)
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models compute with one thread each, here and in other processes: small ones are no faster with several."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)


@pytest.fixture
def simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.SimulatedCuda]:
    """A CUDA of two devices on host memory in the place of CuPy."""
    installed = simulated.install_cuda(monkeypatch)
    yield installed
    monkeypatch.undo()
    installed.close()
    simulated.forget_cuda()


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """Fails if threads of mmkv are left behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5

    def left() -> list[threading.Thread]:
        return [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("mmkv")]

    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


@pytest.fixture(params=["ram", "disk"])
def pool_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory for a pool: on tmpfs, where rows are appended in place, and on a disk, where they are not."""
    if request.param == "disk":
        return tmp_path / "pool"
    directory: Path = request.getfixturevalue("ram_path")
    return directory / "pool"
