"""`make chat`, with a small model in the place of SmolLM2."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.integrations.models import Letters, make_model
from tools import chat

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def small() -> tuple[Any, Any]:
    return make_model("llama"), Letters()


def test_five_chats_through_a_kill(pool_in_ram: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        turns = chat.talk(partial(small), pool_in_ram, answer_tokens=2)
        chat.show(turns)
    assert [(number, one) for one, number, _ in turns] == [(turn, one) for turn in range(3) for one in range(5)]
    for _, number, turn in turns:
        assert (turn.answer.reused > 25) == (number > 0)
        assert turn.again_seconds > 0
    text = printed.getvalue()
    assert "0 conversations are parked" in text
    assert "5 conversations are parked" in text
    assert "reading again" in text


def test_an_engine_that_cannot_start_is_said(pool_in_ram: Path) -> None:
    with pytest.raises(SystemExit, match="the engine ended"):
        chat.Engine(fail, pool_in_ram, 1)


def fail() -> tuple[Any, Any]:
    raise SystemExit(3)
