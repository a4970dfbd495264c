from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv import device as cuda
from mmkv.castagnoli import multiply, power
from mmkv.checksum import Parts, crc32c, host_checksums
from mmkv.errors import MmkvError
from mmkv.store.digest import DigestKernel, Shape
from tests.lanes import COMPILER, compile_for_host
from tests.simulated import SimulatedCuda

PARAMETERS = "const word *, word, const unsigned *, unsigned *"
DATA = np.random.default_rng(11).integers(0, 256, 1 << 17, dtype=np.uint8)
SHAPES = [
    Shape(threads=64, blocks=3),
    Shape(digits=7, loads=2, chunk_bytes=2048, threads=64, blocks=5),
    Shape(digits=4, loads=1, chunk_bytes=4096, threads=32, blocks=1),
    Shape(digits=8, loads=8, chunk_bytes=8192, threads=128, blocks=2),
]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class HostKernel:
    """A kernel whose source runs on the processor, in a simulated stream."""

    def __init__(self, run: Any, owner: SimulatedCuda) -> None:
        self._run, self._owner = run, owner

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[np.int64, ...], *, stream: Any) -> None:
        assert stream.device_id == self._owner.getDevice()
        self._owner.enqueue(stream.ptr, lambda: self._run(*grid, *block, *arguments))


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.digits}-{shape.loads}-{shape.chunk_bytes}")
def host_digest(
    request: pytest.FixtureRequest, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> DigestKernel:
    def compile_kernel(source: str, name: str, device: int) -> HostKernel:
        parameters = PARAMETERS if name == "digest_parts" else "const word *, word *, word"
        return HostKernel(compile_for_host(source, name, parameters), simulated_cuda)

    monkeypatch.setattr(cuda, "compile_kernel", compile_kernel)
    kernel = DigestKernel(request.param)
    assert kernel.ready(0)
    return kernel


def digests(kernel: DigestKernel, parts: Parts, values: Any = None) -> list[int]:
    with cuda.current(0):
        stream = cuda.new_stream(0)
        digest = kernel.launch(parts, 0, stream, values)
        stream.synchronize()
    return list(map(int, digest.values()))


places = st.lists(
    st.tuples(
        st.integers(0, 70_000),
        st.integers(0, 100) | st.integers(0, 5000) | st.integers(0, 60_000) | st.sampled_from([512, 4096, 16384]),
        st.integers(0, 2),
    ),
    max_size=12,
)


@needs_compiler
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(places=places, before=st.integers(0, 2**32 - 1))
def test_same_as_on_the_host(host_digest: DigestKernel, places: list[tuple[int, int, int]], before: int) -> None:
    starts, sizes, steps = np.array(places, np.int64).reshape(-1, 3).T
    units = np.cumsum(steps)
    parts = Parts(DATA.ctypes.data + starts, sizes, units, int(units[-1]) + 2 if len(units) else 0)
    values = np.arange(parts.count, dtype=np.uint32) * 0x9E3779B1 ^ before
    assert digests(host_digest, parts, values) == host_checksums(parts, values).tolist()


@needs_compiler
def test_any_alignment(host_digest: DigestKernel) -> None:
    starts, sizes = (axis.ravel() for axis in np.meshgrid(np.arange(17), [1, 2, 15, 16, 17, 48, 511, 512, 513]))
    parts = Parts(DATA.ctypes.data + starts, sizes, np.arange(len(starts)), len(starts))
    assert digests(host_digest, parts) == host_checksums(parts).tolist()


@needs_compiler
def test_rows_in_pages(host_digest: DigestKernel) -> None:
    pages = np.random.default_rng(3).permutation(100)
    parts = Parts.cut(DATA.ctypes.data + 4 + pages * 1152, np.full(100, 768), 48 * 512, begun=48 * 7)
    assert parts.count == 4
    assert digests(host_digest, parts) == host_checksums(parts).tolist()


@needs_compiler
def test_nothing_to_do(host_digest: DigestKernel) -> None:
    none = np.zeros(0, np.int64)
    assert digests(host_digest, Parts(none, none, none, 0)) == []
    assert digests(host_digest, Parts(none, none, none, 3), [7, 8, 9]) == [7, 8, 9]


def test_large_distances() -> None:
    table = Shape().table(Parts(np.array([3, 5]), np.array([40, 1 << 35]), np.array([0, 0]), 1))
    assert table[4:6].tolist() == [1 << 35, 0]
    with pytest.raises(ValueError, match="is larger than"):
        Shape().table(Parts(np.array([0]), np.array([1 << 36]), np.array([0]), 1))


@needs_compiler
@pytest.mark.parametrize("distance", [1 << 20, (1 << 30) + 12345, (1 << 36) - 2000])
def test_far_from_the_end(distance: int) -> None:
    shape = SHAPES[0]
    data = DATA[3:1003]
    table = np.array([data.ctypes.data, len(data), distance, 0, 0, 1], np.int64)
    operators, values = shape.operators(), np.zeros(1, np.uint32)
    run = compile_for_host(shape.source(), "digest_parts", PARAMETERS)
    run(1, shape.threads, table.ctypes.data, 1, operators.ctypes.data, values.ctypes.data)
    # Without the inverted bits at the start and the end.
    remainder = crc32c(data) ^ crc32c(bytes(len(data)))
    assert int(values[0]) == multiply(remainder, power(8 * distance))


def test_no_compiler_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MmkvError("there is no NVRTC")

    monkeypatch.setattr(cuda, "compile_kernel", refuse)
    kernel = DigestKernel()
    assert not kernel.ready(0)
    assert not kernel.ready(0)
    assert kernel.refused == "there is no NVRTC"


@pytest.mark.gpu
def test_on_a_device() -> None:
    if not cuda.available():
        pytest.skip("no CUDA device")
    cupy = pytest.importorskip("cupy")
    data = np.random.default_rng(5).integers(0, 256, 40_000_001, dtype=np.uint8)
    there = cupy.asarray(data)
    rng = np.random.default_rng(6)
    sizes = np.concatenate((rng.integers(0, 2000, 3000), [1 << 20, 30_000_001, 1]))
    starts = rng.integers(0, len(data) - sizes + 1)
    units = np.arange(len(sizes)) // 3
    count = len(sizes) // 3
    on_host, on_device = (Parts(base + starts, sizes, units, count) for base in (data.ctypes.data, there.data.ptr))
    kernel = DigestKernel()
    assert kernel.ready(0)
    cupy.cuda.runtime.deviceSynchronize()
    assert digests(kernel, on_device) == host_checksums(on_host).tolist()
