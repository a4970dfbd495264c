"""The store that uses kvikio, on a simulated one: its errors, its handles, and which path it says it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.errors import MmkvError, TransferError
from mmkv.store import DirectStore, direct
from tests import simulated
from tests.store.rig import Rig, make_case, make_paged_case
from tests.store.test_stores import round_trip


@pytest.fixture
def rig_of(simulated_cuda: simulated.SimulatedCuda, tmp_path: Path, no_threads_left: None) -> Any:
    made: list[Rig] = []

    def make(store: DirectStore) -> Rig:
        made.append(Rig(store, {store.path}, simulated_cuda.array, lambda array: array.values, tmp_path, []))
        return made[-1]

    yield make
    for rig in made:
        rig.store.close()
        for file in rig.files:
            file.close()


def test_compatibility_mode_is_said_to_be_kvikios_posix_path(
    rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.install_kvikio(monkeypatch)
    store = rig_of(DirectStore(tmp_path, 2)).store
    assert store.path == "kvikio-posix"
    assert store.describe()["reason"]


def test_cufile_without_nvidia_fs_is_said_to_be_compatible(
    rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.install_kvikio(monkeypatch, compatible=False)
    monkeypatch.setattr(direct, "_NVIDIA_FS", tmp_path / "missing")
    store = rig_of(DirectStore(tmp_path, 2)).store
    assert store.path == "cufile-compat"
    assert "nvidia-fs" in store.describe()["reason"]
    assert list(tmp_path.iterdir()) == []


STATISTICS = """GDS Version: 1.13.1.3
NVFS statistics(ver: 4.0)
IO stats: Disabled, peer IO stats: Disabled
Batches : n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads : n=0 ok=0 err=0 readMiB=0 io_state_err=0
Reads : Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Writes : n=0 ok=0 err=0 writeMiB=0 io_state_err=0
Mmap : n={mmap} ok=0 err=0 munmap=0
Bar1-map : n={mmap} ok=0 err=0 free=0 callbacks=0 active=0 delay-frees=0
Ops : Read={reads} Write=0 BatchIO=0
"""


@pytest.mark.parametrize(("mmap", "reads", "path"), [(0, 0, "cufile-compat"), (1, 0, "gds"), (0, 1, "gds")])
def test_gds_is_what_nvidia_fs_has_counted(
    rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: int, reads: int, path: str
) -> None:
    kvikio = simulated.install_kvikio(monkeypatch, compatible=False)
    statistics = tmp_path / "stats"
    statistics.write_text(STATISTICS.format(mmap=0, reads=0))
    monkeypatch.setattr(direct, "_NVIDIA_FS", statistics)
    raw_read = kvikio.CuFile.raw_read

    def counted(self: Any, *arguments: Any) -> int:
        statistics.write_text(STATISTICS.format(mmap=mmap, reads=reads))
        return int(raw_read(self, *arguments))

    kvikio.CuFile.raw_read = counted
    store = rig_of(DirectStore(tmp_path, 2)).store
    assert store.path == path
    assert ("reason" in store.describe()) == (path != "gds")


def test_a_cufile_that_gives_back_other_bytes_is_refused(
    simulated_cuda: simulated.SimulatedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.install_kvikio(monkeypatch, compatible=False, corrupt=True)
    with pytest.raises(MmkvError, match="other bytes"):
        DirectStore(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_without_kvikio_it_says_what_to_install(
    simulated_cuda: simulated.SimulatedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvikio", None)
    direct._cufile_class.cache_clear()
    with pytest.raises(MmkvError, match="install kvikio"):
        DirectStore(tmp_path, 2)


def test_handles_are_kept_and_closed(rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio = simulated.install_kvikio(monkeypatch)
    rig = rig_of(DirectStore(tmp_path, 2))
    rng = np.random.default_rng(0)
    case = make_case(rig, rng, [[[100_000]]] * 3)
    for _ in range(3):
        round_trip(rig, rng, case)
    assert kvikio.CuFile.opened == 3
    rig.store.close()
    assert kvikio.CuFile.opened == 0


@pytest.mark.parametrize("compiler_works", [True, False])
def test_pages_move_together_through_a_bounce_buffer(
    rig_of: Any,
    simulated_cuda: simulated.SimulatedCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler_works: bool,
) -> None:
    kvikio = simulated.install_kvikio(monkeypatch)
    simulated_cuda.compiler_works = compiler_works
    rig = rig_of(DirectStore(tmp_path, 2))
    rng = np.random.default_rng(4)
    case = make_paged_case(rig, rng, 3, (1024, 512), 500)
    calls: list[int] = []
    raw_read = kvikio.CuFile.raw_read

    def counted(self: Any, buffer: Any, size: int, *arguments: Any) -> int:
        calls.append(size)
        return int(raw_read(self, buffer, size, *arguments))

    kvikio.CuFile.raw_read = counted
    allocated = len(simulated_cuda.allocated)
    round_trip(rig, rng, case)
    assert sum(calls) == case.bytes
    if compiler_works:
        assert len(calls) == 3 * 2
        assert simulated_cuda.launches == 2 * 3 * 2
        bounces = [size for size, _, _ in list(simulated_cuda.allocated.values())[allocated:] if size == 4 << 20]
        assert len(bounces) <= 2


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("error at: file.cpp:10: No space left on device", "no space is left"),
        ("error at: file.cpp:10: Disk quota exceeded", "no space is left"),
        ("error at: file.cpp:10: Input/output error", "Input/output error"),
    ],
)
def test_errors_of_kvikio_name_layer_and_plane(
    rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, expected: str
) -> None:
    kvikio = simulated.install_kvikio(monkeypatch)
    rig = rig_of(DirectStore(tmp_path, 2))
    case = make_case(rig, np.random.default_rng(1), [[], [[1000], [2000]]])

    def fail(self: Any, *arguments: Any) -> int:
        raise RuntimeError(message)

    kvikio.CuFile.raw_write = fail
    recorder = rig.write(case.layers)
    recorder.wait()
    error = recorder.errors[0]
    assert isinstance(error, TransferError)
    assert (error.layer, error.plane) == (1, "plane0")
    assert expected in str(error)


def test_a_replaced_file_is_refused(rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install_kvikio(monkeypatch)
    rig = rig_of(DirectStore(tmp_path, 2))
    case = make_case(rig, np.random.default_rng(2), [[[1000]]])
    path = case.arrays[0][0].file.path
    path.rename(tmp_path / "moved")
    path.write_bytes(b"another file")
    recorder = rig.write(case.layers)
    recorder.wait()
    assert "replaced" in str(recorder.errors[0])
    assert path.read_bytes() == b"another file"


def test_too_many_open_files_says_what_to_raise(rig_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio = simulated.install_kvikio(monkeypatch)
    rig = rig_of(DirectStore(tmp_path, 2))
    case = make_case(rig, np.random.default_rng(3), [[[1000]]])

    def fail(self: Any, path: Any, flags: str) -> None:
        raise RuntimeError("Unable to open file. error at: file_utils.cpp:160: Too many open files")

    kvikio.CuFile.__init__ = fail
    recorder = rig.read(case.layers)
    recorder.wait()
    assert "ulimit -n" in str(recorder.errors[0])
