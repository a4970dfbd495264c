"""The benchmark against RAM, at a small size: what it writes, and that a contender that fails stops nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import contenders, pool_vs_ram
from benchmarks.results import TARGETS
from benchmarks.tiers import MEASURES
from tests.benchmarks.conftest import SimulatedMemory


def run(*arguments: Any, code: int = 0) -> str:
    app = typer.Typer()
    app.command()(pool_vs_ram.main)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code != code:
        raise AssertionError(result.output) from result.exception
    return result.output


def small(path: Path, *more: Any) -> list[Any]:
    sizes = ["--layers", 3, "--tokens", 8192, "--row-bytes", 816, "--repeats", 2]
    return [*sizes, "--dir", path, "--disk-dir", path, "--json", path / "found.json", *more]


def test_the_host_keys_that_scripts_read(tmp_path: Path) -> None:
    run(*small(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["ram"]) == {"take_gbps", "park_gbps"}
    assert set(found["mmkv"]) == {"take_gbps", "park_gbps", "first_layer_ms", "path"}
    assert found["ratio"]["take"] == pytest.approx(found["mmkv"]["take_gbps"] / found["ram"]["take_gbps"])
    assert found["mmkv"]["path"] in ("posix", "posix-direct")
    assert found["machine"]["cores"]
    assert found["versions"]["mmkv"]
    assert found["date"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.slow
def test_every_figure_and_contender_on_a_device(simulated_memory: SimulatedMemory, ram_path: Path) -> None:
    run(*small(ram_path, "--device", "cuda:0"))
    found = json.loads((ram_path / "found.json").read_text())
    figures = found["figures"]
    # No Torch, no matmul and no second process on a simulated device.
    missing = {"decode", "decode_paged", "reopened_take"}
    assert {name for name, figure in figures.items() if figure["value"] is None} == missing
    others = {name for _, names in MEASURES.values() for name in names}
    others |= {name for name in TARGETS if name.startswith(("tax", "several_", "first_token")) or name.endswith("_ram")}
    assert set(figures) == set(TARGETS) - others
    assert all(figures[name]["reason"] for name in missing)
    assert figures["extents_take"]["extents"] >= 16
    assert figures["park_new_ms"]["tokens_written"] == 383
    assert figures["swap"]["path"] == "mapped"
    assert found["mmkv"]["path"] == "mapped"
    assert found["contenders"]["mmkv_direct"]["path"] == "kvikio-posix"
    assert found["contenders"]["mmkv_disk"]["path"] == "kvikio-posix"
    assert found["contenders"]["ram_pageable"]["rounds"] == 2
    assert "reason" in found["contenders"]["safetensors"]
    assert found["bus"]["both_gbps"] > 0
    assert not simulated_memory._owner.registered
    assert not simulated_memory._held


def test_parts_of_a_run_add_up(simulated_memory: SimulatedMemory, ram_path: Path) -> None:
    run(*small(ram_path, "--device", "cuda:0", "--only", "delta"))
    run(*small(ram_path, "--device", "cuda:0", "--only", "swap", "--add"))
    found = json.loads((ram_path / "found.json").read_text())
    assert set(found["figures"]) == {"park_new_ms", "swap"}


def test_wrong_bytes_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take = contenders.MmkvPool.take

    def spoil(self: contenders.MmkvPool, conversation: str) -> float | None:
        first = take(self, conversation)
        self._slot.arrays[1]["v"][5, 3] ^= 1
        return first

    monkeypatch.setattr(contenders.MmkvPool, "take", spoil)
    assert "other bytes" in run(*small(tmp_path), code=1)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    run(*small(tmp_path, "--only", "nothing"), code=1)


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["safetensors", "torch"])
def test_what_users_would_pick(saver: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    run(*small(tmp_path, "--only", saver, "--only", "ram_pageable"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["contenders"][saver]["take_gbps"] > 0, found["contenders"]
    assert found["contenders"]["ram_pageable"]["park_gbps"] > 0


def test_extents_and_heads_on_the_host(tmp_path: Path) -> None:
    run(*small(tmp_path, "--only", "extents", "--only", "heads"))
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figures["extents_park"]["value"] > 0, figures
    assert figures["heads_take"]["planes"] == 72
