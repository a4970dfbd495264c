"""What a benchmark is asked for: refused at once where it cannot be had, and answered by the exit code at the end."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import typer
from rich.console import Console

from benchmarks.results import Output

__all__ = ["fail", "fail_if_parts_did", "require_device", "require_plots"]


def fail(message: str) -> typer.Exit:
    """Say what is wrong; to be raised."""
    Console(stderr=True, soft_wrap=True).print("[red]error:[/red]", end=" ")
    Console(stderr=True, soft_wrap=True).print(message, highlight=False, markup=False)
    return typer.Exit(1)


def fail_if_parts_did(output: Output) -> None:
    """End with 1 and the reasons, if a part of the run failed or found other bytes than were parked."""
    if output.failures:
        raise fail("; ".join(output.failures))


def require_plots(file: Path | None) -> None:
    """End at once where a picture is asked for that cannot be drawn."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise fail("--plot needs Matplotlib, which is not installed: pip install '.[bench]', or leave --plot out")


def require_device(device: str) -> None:
    """End at once where a device is not `cpu` and cannot be used."""
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise fail(f"--device {device} is unknown: it is cpu, or cuda:0 and so on")
    try:
        import cupy
    except ImportError:
        raise fail(
            f"--device {device} needs CuPy, which is not installed: pip install '.[cu13]', or '.[cu12]' for drivers "
            "before 580; or choose --device cpu"
        ) from None
    try:
        cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()
    except Exception as error:
        raise fail(f"--device {device} cannot be used: {error}") from error
