"""The probe: with no GPU, on the simulated one, on media that are in the way, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmkv.errors import MmkvError
from mmkv.medium import Medium
from mmkv_inspect import medium_speed, probe
from mmkv_inspect.advice import advice, problems
from mmkv_inspect.bus_speed import BusSpeed, PathHere, measure_bus, path_here
from mmkv_inspect.surroundings import Surroundings, surroundings_of
from tests.simulated import SimulatedCuda, install_kvikio
from tests.tools.conftest import Result

Inspect = Callable[..., Result]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_speed, "_BYTES", 16 << 20)
    monkeypatch.setattr("mmkv_inspect.bus_speed._BYTES", 1 << 20)


def test_a_disk_and_what_is_left_behind(inspect: Inspect, tmp_path: Path) -> None:
    result = inspect("probe", tmp_path)
    assert result.code == 0, result.err
    assert "Free space" in result.out
    assert "GB/s" in result.out
    assert not list(tmp_path.iterdir())


def test_json_has_every_part(inspect: Inspect, ram_path: Path) -> None:
    result = inspect("probe", ram_path, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["medium"]["fs_type"] == "tmpfs"
    assert found["medium"]["free"] > 0
    assert found["ram"]["total"] >= found["ram"]["available"] > 0
    assert found["speed"]["write_gbps"] > 0
    assert found["speed"]["read_gbps"] > 0
    assert found["speed"]["fresh_gbps"] > 0
    assert found["speed"]["how"] == "tmpfs copies"
    assert set(found["limits"]) == {"locked_bytes", "open_files", "max_maps"}
    assert found["problems"] == []
    assert not list(ram_path.iterdir())


def test_a_directory_that_is_not_there_yet(inspect: Inspect, tmp_path: Path) -> None:
    result = inspect("probe", tmp_path / "new" / "pool")
    assert result.code == 0
    assert "not there yet" in result.out
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_directory(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = inspect("probe", tmp_path / "file")
    assert result.code == 1
    assert "not a directory" in result.err


def test_a_name_cannot_reach_the_terminal(inspect: Inspect, tmp_path: Path) -> None:
    assert "\x1b" not in inspect("probe", tmp_path / "\x1b[31mred").out


def test_help_and_usage(inspect: Inspect) -> None:
    assert "leaves nothing" in inspect("probe", "--help").out
    assert inspect("probe").code == 2


def test_what_others_may_write_is_a_problem(inspect: Inspect, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    result = inspect("probe", tmp_path)
    assert result.code == 1
    assert "others may write" in result.out
    tmp_path.chmod(0o1777)
    result = inspect("probe", tmp_path)
    assert result.code == 0
    assert "below it" in result.out


def test_a_full_medium_is_said(inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Medium, "free_bytes", lambda self: 4096)
    result = inspect("probe", tmp_path)
    assert result.code == 0
    assert "too little space" in result.out


def test_no_o_direct_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_speed, "_set_direct", lambda file: False)
    here = surroundings_of(tmp_path)
    assert medium_speed.measure_medium(here.medium).how == "page cache, synced"


def test_without_unnamed_files(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    here = surroundings_of(ram_path)
    assert medium_speed.measure_medium(here.medium).write_gbps > 0
    assert not list(ram_path.iterdir())


def test_a_slow_medium_ends_in_time(tmp_path: Path) -> None:
    here = surroundings_of(tmp_path)
    speed = medium_speed.measure_medium(here.medium, seconds=0.0)
    assert speed.bytes == speed.files * (4 << 20)


def test_the_bus_and_the_path_in_ram(simulated_cuda: SimulatedCuda, inspect: Inspect, ram_path: Path) -> None:
    result = inspect("probe", ram_path, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [device["device"] for device in found["devices"]] == [0, 1]
    for device in found["devices"]:
        assert device["to_device_gbps"] > 0
        assert device["map_from_device_gbps"] > 0
    assert found["path"]["path"] == "mapped"
    assert not simulated_cuda.registered
    assert "Bus, device 1" in inspect("probe", ram_path).out
    assert not list(ram_path.iterdir())


def test_a_map_that_cannot_be_page_locked(simulated_cuda: SimulatedCuda, inspect: Inspect, ram_path: Path) -> None:
    simulated_cuda.refuse = lambda address, size: "operation not permitted"
    found = json.loads(inspect("probe", ram_path, "--json").out)
    assert "not permitted" in found["devices"][0]["reason"]
    assert found["devices"][0]["map_to_device_gbps"] is None
    assert any("ulimit -l" in line for line in found["advice"])


def test_kvikio_on_a_disk(
    simulated_cuda: SimulatedCuda, inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_kvikio(monkeypatch)
    found = json.loads(inspect("probe", tmp_path, "--json").out)
    assert found["path"]["path"] == "kvikio-posix"
    assert found["path"]["reason"]
    assert any("GPUDirect" in line for line in found["advice"])
    assert any("huge=always" in line for line in found["advice"])
    assert found["devices"][0]["map_to_device_gbps"] is None
    assert not list(tmp_path.iterdir())


def test_a_bus_that_fails_is_said(inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(medium: Medium) -> list[BusSpeed]:
        raise MmkvError("out of memory")

    monkeypatch.setattr(probe, "measure_bus", fail)
    result = inspect("probe", tmp_path)
    assert result.code == 0
    assert "out of memory" in result.out


def test_no_device_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    medium = surroundings_of(tmp_path).medium
    assert measure_bus(medium) == []
    assert path_here(medium).path == "posix"


def _here(tmp_path: Path, **changes: Any) -> Surroundings:
    here = surroundings_of(tmp_path)
    medium = replace(here.medium, **{name: changes.pop(name) for name in ("fs_type", "options") if name in changes})
    limits = replace(here.limits, **{name: changes.pop(name) for name in ("open_files",) if name in changes})
    return replace(here, medium=medium, limits=limits, **changes)


_PATH = PathHere("mapped", None, {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fs_type": "hugetlbfs"}, "cannot hold"),
        ({"options": ("ro",)}, "read-only"),
        ({"writable": False}, "may not write"),
    ],
)
def test_problems(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    assert any(text in line for line in problems(_here(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fs_type": "tmpfs", "options": ("rw",)}, "huge=always"),
        ({"fs_type": "tmpfs", "free_bytes": 64 << 20}, "--shm-size"),
        ({"fs_type": "overlay"}, "volume"),
        ({"fs_type": "nfs4"}, "one machine"),
        ({"open_files": 64}, "ulimit -n"),
        ({"driver": True}, "CuPy sees no device"),
    ],
)
def test_advice(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    here = _here(tmp_path, **changes)
    here = replace(here, huge_pages=replace(here.huge_pages, shmem_enabled="never"))
    assert any(text in line for line in advice(here, _PATH, []))


def test_a_slow_map_is_bound_to_the_wrong_node(tmp_path: Path) -> None:
    bus = BusSpeed(0, "GPU", 55.0, 55.0, 30.0, 30.0, None)
    assert any("mpol=bind" in line for line in advice(_here(tmp_path), _PATH, [bus]))
