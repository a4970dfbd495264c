"""The benchmark of several devices, with host memory in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import multi_gpu


def run(ram_path: Path, *options: str, code: int = 0) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(multi_gpu.main)
    result = ram_path / "several.json"
    small = ["--layers", "4", "--tokens", "1500", "--repeats", "1", "--dir", str(ram_path), "--json", str(result)]
    done = CliRunner().invoke(app, [*small, *options], catch_exceptions=False)
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(result.read_text())["figures"]
    return found


def test_two_halves_of_a_host(ram_path: Path) -> None:
    found = run(ram_path, "--device", "cpu", "--device", "cpu")
    assert found["several_splits_wrong"]["value"] == 0
    assert found["several_splits_wrong"]["takes"] == 16
    assert found["several_ranks_wrong"]["value"] == 0
    assert len(found["several_take"]["each_gbps"]) == 2
    assert all(found[name]["value"] > 0 for name in ("several_take", "several_park", "several_swap", "several_ranks"))
    assert "NUMA" in found["several_numa"].get("reason", "NUMA")


def test_other_bytes_are_counted(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_gpu, "measure_ranks", lambda bench, row_bytes: None)
    monkeypatch.setattr(multi_gpu, "measure_all", lambda bench: None)
    is_of = multi_gpu.Spread.is_of

    def spoiled(self: multi_gpu.Spread, name: str) -> bool:
        if name == "in turns":
            self.parts[-1].rows[0].array[7] ^= 1
        return is_of(self, name)

    monkeypatch.setattr(multi_gpu.Spread, "is_of", spoiled)
    assert run(ram_path, "--device", "cpu", "--device", "cpu", code=1)["several_splits_wrong"]["value"] == 4


def test_a_part_that_fails_fails_the_run(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("it broke")

    for name in ("measure_all", "measure_splits", "measure_numa"):
        monkeypatch.setattr(multi_gpu, name, lambda *_: None)
    monkeypatch.setattr(multi_gpu, "measure_ranks", fail)
    found = run(ram_path, "--device", "cpu", code=1)
    assert found["several_ranks"]["reason"] == "RuntimeError: it broke"
