"""The benchmark of the first token, at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks import engine, first_token, follow_up
from benchmarks.results import TARGETS
from mmkv.integrations.transformers import cache_argument, new_cache, seek

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

FIGURES = ("first_token_streamed", "first_token_again", "first_token_blocking")


def run(path: Path, *more: Any, code: int = 0) -> str:
    app = typer.Typer()
    app.command()(first_token.main)
    sizes = ["--model", "random-tiny", "--new-tokens", 20, "--repeats", 1, "--device", "cpu"]
    arguments = [*sizes, "--dir", path, "--json", path / "found.json", *more]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code != code:
        raise AssertionError(result.output) from result.exception
    return result.output


def test_every_way_and_figure(ram_path: Path) -> None:
    printed = run(ram_path, "--tokens", 160, "--tokens", 80, "--plot", ram_path / "plot.png")
    found = json.loads((ram_path / "found.json").read_text())
    assert set(found["first_token"]) == {"160", "80"}
    for tokens, length in found["first_token"].items():
        assert set(length["ways"]) == set(follow_up.WAYS)
        assert all(way["ms"] > 0 for way in length["ways"].values())
        assert length["bytes"] == int(tokens) * found["work"]["token_bytes"]
        assert length["path"] == "posix"
    assert set(found["figures"]) == set(FIGURES)
    again = found["figures"]["first_token_again"]
    assert again["value"] == min(again["by_tokens"].values())
    assert found["versions"]["transformers"]
    line = found["timeline"]
    assert line["tokens"] == 80
    for arrived, began, ended in zip(line["arrived_ms"], line["began_ms"], line["ended_ms"], strict=True):
        assert arrived <= began < ended <= line["first_token_ms"]
    for name in FIGURES:
        assert TARGETS[name].what in printed
    assert (ram_path / "plot.png").stat().st_size > 10_000
    assert sorted(path.name for path in ram_path.iterdir()) == ["found.json", "plot.png"]


def test_rows_that_did_not_come_back_are_noticed(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_up.FollowUp, "blocking", lambda self: self._token)
    output = run(ram_path, "--tokens", 100, code=1)
    assert "mmkv, then computing: other bytes than were parked, in layer 0" in output


def test_an_unknown_model_is_said(ram_path: Path) -> None:
    assert "--model gpt is unknown: it is one of smollm2, random" in run(ram_path, "--model", "gpt", code=1)


def test_too_little_memory_is_said(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "available_ram", lambda: 1 << 20)
    printed = run(ram_path, "--tokens", 100, code=1)
    assert "choose fewer --tokens" in " ".join(printed.split())


def test_attention_over_the_filled_rows_is_that_of_transformers(tmp_path: Path) -> None:
    tiny = engine.load_engine("random-tiny", "cpu", tmp_path / "model.pt")
    cache = new_cache(tiny.model, tiny.layout, 64)
    ids = tiny.random_ids(40)
    for parts in ([40], [25, 15], [25, 14, 1]):
        seek(cache, 0)
        start = 0
        for count in parts:
            token = tiny.read(cache, ids[start : start + count], start)
            start += count
        stock = transformers.StaticCache(config=tiny.model.config, max_cache_len=64)
        tiny.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([ids]), **{cache_argument(tiny.model): stock}).logits[0, -1]
        tiny.model.set_attn_implementation("filled_rows")
        assert token == int(logits.argmax())
        for layer, other in zip(cache.layers, stock.layers, strict=True):
            assert torch.allclose(layer.keys[:, :, :40], other.keys[:, :, :40], atol=1e-4)
