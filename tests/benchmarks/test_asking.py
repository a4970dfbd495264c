"""What a benchmark is asked for and cannot be had is said at once, and what fails is told by the exit code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import pool_vs_ram, rotation, tiers
from benchmarks.asking import fail_if_parts_did
from benchmarks.results import Output, Unmeasurable, said


def run(command: Any, *arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def no_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused at once is refused before anything is measured."""
    for module, name in ((tiers, "MEASURES"), (rotation, "Rotation"), (pool_vs_ram, "make_rig")):
        monkeypatch.setattr(module, name, None)


@pytest.mark.parametrize("command", [tiers.main, rotation.main])
@pytest.mark.usefixtures("no_measures")
def test_a_plot_without_matplotlib_is_refused_at_once(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = run(command, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 1
    assert "--plot needs Matplotlib, which is not installed: pip install '.[bench]'" in result.stderr


@pytest.mark.parametrize("command", [tiers.main, rotation.main, pool_vs_ram.main])
@pytest.mark.usefixtures("no_measures")
def test_a_device_that_cannot_be_used_is_refused(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for device, text in (
        ("cuda:0", "--device cuda:0 needs CuPy, which is not installed: pip install '.[cu13]'"),
        ("gpu", "--device gpu is unknown: it is cpu, or cuda:0 and so on"),
    ):
        result = run(command, "--device", device, "--layers", 1, "--tokens", 8)
        assert result.exit_code == 1
        assert text in result.stderr


def test_targets_are_for_sizes_that_mean_something() -> None:
    output = Output(None)
    output.update({"work": {"bytes": 1 << 20}})
    assert said("take", 0.5, output.figure("take", 0.5)) == "take of a whole conversation / RAM only: 0.5"
    assert output.data["figures"]["take"]["target"] == 0.98
    output.update({"work": {"bytes": 1 << 30}})
    assert said("take", 0.5, output.figure("take", 0.5)).endswith("0.5 (at least 0.98) [yellow]not met[/yellow]")
    fail_if_parts_did(output)


def test_what_failed_and_what_is_wrong_fails_the_run() -> None:
    output = Output(None)
    output.figure("take", 1.0)
    assert output.failed("spills", Unmeasurable("too small"), ["spill"]) == ["spill"]
    fail_if_parts_did(output)
    assert output.failed("takes", RuntimeError("it broke"), ["take", "park"]) == ["park"]
    assert output.data["figures"]["take"]["value"] == 1.0
    with pytest.raises(typer.Exit):
        fail_if_parts_did(output)
    output = Output(None)
    output.update({"work": {"bytes": 1}})
    assert output.figure("tiers_wrong", 1) is False
    with pytest.raises(typer.Exit):
        fail_if_parts_did(output)
