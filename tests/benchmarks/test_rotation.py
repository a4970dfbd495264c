"""The rotation and the page of figures, at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import report, rotation
from benchmarks.movers import MOVERS
from tests.benchmarks.conftest import SimulatedMemory


def run(command: Any, *arguments: Any, code: int = 0) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code != code:
        raise AssertionError(result.output) from result.exception
    return result.output


def rotate(path: Path, *more: Any, code: int = 0) -> dict[str, Any]:
    sizes = ["--layers", 2, "--tokens", 1500, "--row-bytes", 816, "--turns", 6, "--new-tokens", 300]
    run(rotation.main, *sizes, "--dir", path, "--json", path / "rotation.json", *more, code=code)
    found: dict[str, Any] = json.loads((path / "rotation.json").read_text())
    return found


def test_every_way_on_the_host(tmp_path: Path) -> None:
    found = rotate(tmp_path)
    assert set(found["contenders"]) == set(MOVERS)
    for way in found["contenders"].values():
        assert way["tax_ms"] > 0, way
    assert set(found["figures"]) == {"tax_report", "tax_everything", "tax_new", "tax_swap"}
    taxes = {name: way["tax_ms"] for name, way in found["contenders"].items()}
    assert found["figures"]["tax_report"]["value"] == pytest.approx(taxes["report"] / taxes["mmkv"])
    assert found["contenders"]["report"]["turns"] == 5


def test_every_way_on_a_device(
    simulated_memory: SimulatedMemory, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "memory_of", lambda device: simulated_memory)
    found = rotate(ram_path, "--device", "cuda:0")
    assert all("tax_ms" in way for way in found["contenders"].values()), found["contenders"]
    # What is not page-locked yet moves by the next best path.
    assert "mapped" in found["contenders"]["mmkv"]["path"].split("+")
    assert found["bus"]["to_device_gbps"] > 0
    assert not simulated_memory._owner.registered
    assert not simulated_memory._held


def test_a_way_that_gives_wrong_bytes_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = MOVERS["ram_new"].takes

    def spoil(self: Any, slot: int, *arguments: Any) -> None:
        takes(self, slot, *arguments)
        self._rows[slot][2].array[7] ^= 1

    monkeypatch.setattr(MOVERS["ram_new"], "takes", spoil)
    found = rotate(tmp_path, "--only", "ram_new", "--only", "ram_everything", code=1)
    assert "other bytes" in found["contenders"]["ram_new"]["reason"]
    assert found["contenders"]["ram_everything"]["tax_ms"] > 0


def test_more_conversations_than_slots(tmp_path: Path) -> None:
    run(rotation.main, "--slots", 5, "--dir", tmp_path, code=2)


def test_the_page_of_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rotate(tmp_path, "--plot", tmp_path / "rotation.png")
    assert (tmp_path / "rotation.png").stat().st_size > 10_000
    page = tmp_path / "performance.md"
    page.write_text(report.PAGE.read_text())
    run(report.main, "--results", tmp_path, "--page", page)
    text = page.read_text()
    assert "| turn tax: the report's way / mmkv |" in text
    assert "| mmkv, park and take |" in text
    run(report.main, "--results", tmp_path, "--page", page, "--check")
    (tmp_path / "rotation.json").unlink()
    run(report.main, "--results", tmp_path, "--page", page, "--check", code=1)


def test_the_page_in_the_repository_is_that_of_its_results() -> None:
    if not report.RESULTS.exists():
        pytest.skip("no results are kept here")
    run(report.main, "--check")
