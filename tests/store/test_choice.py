"""Which store a pool takes for device arrays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmkv import device as cuda
from mmkv.errors import MmkvError
from mmkv.medium import Medium
from mmkv.store import open_device_store
from tests import simulated


def medium(fs_type: str, path: Path) -> Medium:
    return Medium(path, fs_type, path, (), 4096)


@pytest.fixture
def kvikio(simulated_cuda: simulated.SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install_kvikio(monkeypatch)


@pytest.fixture
def no_kvikio(simulated_cuda: simulated.SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)


def describe(fs_type: str, path: Path, choice: str = "auto") -> dict[str, object]:
    store = open_device_store(medium(fs_type, path), choice=choice, threads=2, directory=path)
    try:
        return store.describe()
    finally:
        store.close()


def test_files_in_ram_are_page_locked(kvikio: None, tmp_path: Path) -> None:
    description = describe("tmpfs", tmp_path)
    assert description["path"] == "mapped"
    assert description["fallback"] == {"path": "posix", "threads": 2}


def test_files_in_ram_need_no_kvikio(no_kvikio: None, tmp_path: Path) -> None:
    assert describe("tmpfs", tmp_path)["path"] == "mapped"


def test_hugetlbfs_has_no_fallback(kvikio: None, tmp_path: Path) -> None:
    assert describe("hugetlbfs", tmp_path)["fallback"] is None


def test_disks_take_kvikio(kvikio: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert describe("ext4", tmp_path)["path"] == "kvikio-posix"
    assert caplog.records == []


def test_disks_without_kvikio_take_posix_and_warn_once(
    no_kvikio: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    description = describe("xfs", tmp_path)
    assert description["path"] == "posix"
    assert "kvikio" in str(description["reason"])
    assert len(caplog.records) == 1
    assert "kvikio" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("fs_type", "choice", "path"),
    [
        ("tmpfs", "mapped", "mapped"), ("tmpfs", "direct", "kvikio-posix"), ("tmpfs", "posix", "posix"),
        ("ext4", "direct", "kvikio-posix"), ("ext4", "posix", "posix"),
    ],
)  # fmt: skip
def test_a_choice_can_be_forced(kvikio: None, tmp_path: Path, fs_type: str, choice: str, path: str) -> None:
    assert describe(fs_type, tmp_path, choice)["path"] == path


@pytest.mark.parametrize(
    ("fs_type", "choice", "text"),
    [
        ("ext4", "mapped", "files in RAM"), ("hugetlbfs", "direct", "hugetlbfs"), ("hugetlbfs", "posix", "hugetlbfs"),
        ("ext4", "direct", "install kvikio"),
    ],
)  # fmt: skip
def test_a_choice_that_is_not_possible_says_why(
    no_kvikio: None, tmp_path: Path, fs_type: str, choice: str, text: str
) -> None:
    with pytest.raises(MmkvError, match=text):
        describe(fs_type, tmp_path, choice)


def test_an_unknown_choice_is_named(kvikio: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fast'"):
        describe("tmpfs", tmp_path, "fast")


def test_without_a_device_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: False)
    with pytest.raises(MmkvError, match="CUDA device"):
        describe("tmpfs", tmp_path)
