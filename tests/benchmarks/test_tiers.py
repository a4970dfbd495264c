"""The benchmark of two tiers, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import tiers
from benchmarks.results import Unmeasurable
from mmkv.medium import medium_of

app = typer.Typer()
app.command()(tiers.main)


def small(tmp_path: Path, ram_path: Path, *more: str) -> list[str]:
    return [
        *("--layers", "4", "--tokens", "20000", "--row-bytes", "816", "--repeats", "1"),
        *("--dir", str(tmp_path), "--hot", str(ram_path), "--json", str(tmp_path / "found.json"), *more),
    ]


def test_every_figure_of_a_host(tmp_path: Path, ram_path: Path) -> None:
    if medium_of(tmp_path).in_ram or not medium_of(ram_path).in_ram:
        pytest.skip("there is no disk, or no tmpfs")
    result = CliRunner().invoke(app, small(tmp_path, ram_path, "--plot", str(tmp_path / "plot.png")))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    measured = {name for name, figure in figures.items() if figure["value"] is not None}
    # What is so small may be written before anybody is beside it.
    wanted = {name for key, (_, names) in tiers.MEASURES.items() if key not in ("beside", "kvikio") for name in names}
    assert measured >= wanted, {name: figures[name].get("reason") for name in wanted - measured}
    assert figures["tiers_wrong"]["value"] == 0
    assert figures["reboot_lost"]["value"] == 0
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert not list(ram_path.iterdir())
    # So small a size says nothing of speeds; a wrong byte is one at any size.
    assert figures["cold_take"]["met"] is None
    assert "at least" not in result.output
    assert figures["tiers_wrong"]["met"] is True


def test_a_part_that_fails_fails_the_run(tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if medium_of(tmp_path).in_ram or not medium_of(ram_path).in_ram:
        pytest.skip("there is no disk, or no tmpfs")
    errors: list[Exception] = [RuntimeError("it broke"), Unmeasurable("it is too small")]

    def fail(bench: tiers.Bench) -> None:
        raise errors[0]

    monkeypatch.setitem(tiers.MEASURES, "spill", (fail, ("spill",)))
    result = CliRunner().invoke(app, small(tmp_path, ram_path, "--only", "spill"))
    assert result.exit_code == 1
    assert "spill: RuntimeError: it broke" in result.stderr
    errors.pop(0)
    assert CliRunner().invoke(app, small(tmp_path, ram_path, "--only", "spill", "--add")).exit_code == 0
    figure = json.loads((tmp_path / "found.json").read_text())["figures"]["spill"]
    assert figure["reason"] == "Unmeasurable: it is too small"


def test_what_cannot_be_is_said(tmp_path: Path, ram_path: Path) -> None:
    result = CliRunner().invoke(app, [*small(tmp_path, ram_path), "--only", "everything"])
    assert result.exit_code == 1
    assert "everything is unknown" in result.stderr
    if medium_of(ram_path).in_ram:
        result = CliRunner().invoke(app, small(ram_path, ram_path))
        assert "must lie on a disk" in result.stderr
